"""A base of the relay that is made once, and too small to know anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning.base import BaseSettings, base_folder
from marft_agents.training._quiet import set_environment

set_environment()

QUICK = BaseSettings(hidden=16, layers=1, steps=3, batch=8)


@pytest.fixture(scope="session")
def relay_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.learning.base.CACHE", tmp_path_factory.mktemp("cache"))
        return base_folder(QUICK, lambda _: None)
