"""Third parties at a volume that leaves our own output readable.

Invariant: nothing of ours is silenced; ``MARFT_VERBOSE=1`` brings everything back. Importing the
training libraries sends nothing home, and threads that wait leave the CPU to others.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager

_NOISY = ("transformers", "trl", "peft", "accelerate", "datasets", "huggingface_hub", "torch")
_SETTINGS = {
    # Waiting threads sleep instead of spinning: beside an engine on the same cores, spinning makes
    # every step ten times slower (measured); alone it makes no difference worth having.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


def set_environment() -> None:
    """Settings that the libraries read when they are imported; the user's own win."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


@contextmanager
def quiet() -> Generator[None]:
    """Errors of third parties only, inside the block."""
    if os.environ.get("MARFT_VERBOSE") == "1":
        yield
        return
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _no_progress_bars()
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _no_progress_bars() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
