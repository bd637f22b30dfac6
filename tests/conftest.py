"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_flushing() -> Iterator[None]:
    """A flush of this process reaches its file, and waits for no disk.

    No test takes a machine's power away, which is all that flushing is for; what is written is
    there for every process all the same. Programs that tests start flush as they always do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _flushed)
        yield


def _flushed(file: int) -> None:
    os.fstat(file)  # a bad descriptor is an error, as ever
