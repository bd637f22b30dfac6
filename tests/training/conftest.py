"""One tiny model for all training tests."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from marft_agents.training._quiet import quiet, set_environment
from tests.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from tests.training.synthetic import TinyModel

set_environment()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> Generator[None]:
    """The loop looks for garbage at every start: among what the tests make, not the imports."""
    importlib.import_module("marft_agents.training")
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny(model_dir: Path) -> TinyModel:
    from tests.training.synthetic import TinyModel

    with quiet():
        return TinyModel(model_dir)
