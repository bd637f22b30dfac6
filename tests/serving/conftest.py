"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.stage import House, Stage, make_house, running_stage


def furnished(root: Path) -> House:
    """router: v1 untrained (current), v2 trained; writer: v1 untrained."""
    house = make_house(root)
    house.publish("router", untrained=True)
    house.publish("router")
    house.publish("writer", untrained=True)
    return house


@pytest.fixture
def house(tmp_path: Path) -> House:
    return furnished(tmp_path)


@pytest.fixture(scope="module")
def quiet_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """For tests that change nothing."""
    with running_stage(furnished(tmp_path_factory.mktemp("quiet"))) as stage:
        yield stage


@pytest.fixture
def stage(house: House) -> Iterator[Stage]:
    with running_stage(house) as stage:
        yield stage
