"""One tiny model for the tests of ``finetune``; the others load no training library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from marft_agents.training._quiet import quiet, set_environment
from tests.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from tests.cli.shop import Shop
    from tests.training.synthetic import TinyModel

set_environment()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    from tests.training.synthetic import TinyModel

    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with quiet():
        return TinyModel(folder)


@pytest.fixture
def shop(
    tmp_path: Path,
    tiny: TinyModel,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Shop:
    from tests.cli.shop import Shop
    from tests.training.synthetic import publish_untrained

    publish_untrained(tmp_path / "adapters", tiny.folder)
    return Shop(tmp_path, tiny.folder, tiny, capsys, monkeypatch)
