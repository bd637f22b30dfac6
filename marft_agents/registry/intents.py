"""Changes of ``CANARY`` and ``PINNED``, whose line in the trail no crash can swallow.

Invariant: the line lies in ``.noting-*``, flushed, before the file is changed, and until the trail
has it. Whether a change that was cut off was made is seen from the file itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from marft_agents.registry import durable
from marft_agents.registry.canary import CANARY_FILE
from marft_agents.registry.reader import PINNED_FILE

_INTENT_FILE = ".noting"
LATE = "the process ended before it wrote this"


@contextlib.contextmanager
def intended(path: Path, text: str | None, entry: Mapping[str, Any]) -> Generator[None]:
    """Replace ``path`` by ``text``, or take it away; the block then writes ``entry``.

    When the block raises, the file is as it was.

    Raises:
        OSError: the disk refuses; nothing was changed.
    """
    intent = path.with_name(f"{_INTENT_FILE}-{os.getpid()}-{secrets.token_hex(4)}")
    told = {"file": path.name, "text": text, "entry": entry}
    try:
        durable.write_file(intent, json.dumps(told).encode())
        durable.fsync_folder(intent.parent)
        with durable.restored_on_error(path):
            if text is None:
                path.unlink()
            else:
                durable.replace_file(path, text.encode())
            yield
    finally:
        intent.unlink(missing_ok=True)


def unwritten(folder: Path, entries: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Lines of changes in a folder that were made and that are not among ``entries``."""
    for intent in sorted(folder.glob(f"{_INTENT_FILE}-*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = cast("dict[str, Any]", json.loads(intent.read_bytes()))
            entry: dict[str, Any] = told["entry"]
            if _text(folder / told["file"]) == told["text"] and entry not in entries:
                yield {**entry, "evidence": {**entry["evidence"], "late": LATE}}


def remove_intents(folder: Path) -> None:
    """Take away what changes that a crash cut off left in a folder."""
    for name in (_INTENT_FILE, f".{CANARY_FILE}", f".{PINNED_FILE}"):
        for left in folder.glob(f"{name}-*"):
            left.unlink(missing_ok=True)


def _text(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    return None
