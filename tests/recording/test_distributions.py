"""The installed runtime is one that was tried, or the error names the command that mends it."""

from __future__ import annotations

import pytest

from marft_agents.recording import IntegrationError, KnownDistribution, installed_runtime

KNOWN = [KnownDistribution("autogen", "0.14", "1"), KnownDistribution("ag2", "0.3", "1")]


def installed(**versions: str) -> str:
    return installed_runtime("classic AutoGen", KNOWN, version_of=versions.get)


def test_the_one_that_is_installed_is_named() -> None:
    assert installed(autogen="0.14.1") == "autogen 0.14.1"
    assert installed(ag2="0.9.10") == "ag2 0.9.10"


def test_a_source_tree_has_no_version() -> None:
    assert installed() == "classic AutoGen"


@pytest.mark.parametrize("version", ["1.2.1", "1.0.0rc1", "0.2.35"])
def test_a_version_out_of_range_is_named_with_the_cure(version: str) -> None:
    with pytest.raises(IntegrationError) as raised:
        installed(ag2=version)
    assert f"ag2 {version} is installed" in str(raised.value)
    assert "pip install 'ag2>=0.3,<1'" in str(raised.value)


def test_two_distributions_in_one_folder_are_named() -> None:
    with pytest.raises(IntegrationError, match="are installed together"):
        installed(autogen="0.14.1", ag2="0.14.0")


@pytest.mark.parametrize("version", ["0.14", "0.14.0", "0.14.0.post1", "0.99.0b3"])
def test_all_versions_in_range_pass(version: str) -> None:
    assert installed(autogen=version) == f"autogen {version}"
