"""Tests here run inside the environment of their runtime: ``python tools/runtimes.py NAME``.

That program names the environment in ``MARFT_RUNTIME``; without it nothing here is collected,
because these runtimes cannot share one environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from marft_agents import MarftRecorder
from marft_agents.testing import InMemoryLog

HERE = Path(__file__).parent
collect_ignore = (
    [] if os.environ.get("MARFT_RUNTIME") else [p.name for p in HERE.iterdir() if p.is_dir()]
)


@pytest.fixture
def log() -> InMemoryLog:
    return InMemoryLog()


@pytest.fixture
def recorder(log: InMemoryLog) -> Iterator[MarftRecorder]:
    with MarftRecorder(log=log) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
