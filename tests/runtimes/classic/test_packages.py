"""A wrong or half-overwritten installation is named, with the command that mends it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from marft_agents.errors import IntegrationError
from marft_agents_classic.packages import KNOWN, runtime

CASES: dict[str, tuple[dict[str, str], bool, tuple[str, ...]]] = {
    "two owners": (
        {"pyautogen": "0.2.35", "ag2": "0.14.0"},
        True,
        ("ag2 0.14.0, pyautogen 0.2.35", "pip uninstall -y ag2 pyautogen && pip install"),
    ),
    "ag2 of another framework": (
        {"ag2": "1.2.1"},
        False,
        ("ag2 1.2.1", "`import ag2`", "pip install 'autogen[openai]>=0.14,<1'"),
    ),
    "an empty proxy": (
        {"pyautogen": "0.10.0", "autogen-agentchat": "0.7.5"},
        False,
        ("pyautogen 0.10.0", "empty package", "extra agentchat", "pip install 'autogen[openai]"),
    ),
    "a folder left over": (
        {"autogen": "0.14.1"},
        False,
        ("has no code", "pip install --force-reinstall --no-deps autogen==0.14.1"),
    ),
    "nothing": ({}, False, ("no distribution of classic AutoGen", "pip install 'autogen[openai]")),
    "too old": ({"pyautogen": "0.2.10"}, True, ("pyautogen 0.2.10", "pyautogen>=0.2.35,<0.10")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_installation_is_named_with_its_cure(case: str) -> None:
    versions, whole, words = CASES[case]
    with pytest.raises(IntegrationError) as caught:
        runtime(versions.get, lambda: whole)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("versions", "name"),
    [
        ({"autogen": "0.14.1"}, "autogen 0.14.1"),
        ({"ag2": "0.14.0"}, "ag2 0.14.0"),
        ({"pyautogen": "0.9"}, "pyautogen 0.9"),
        ({"autogen-agentchat": "0.2.40"}, "autogen-agentchat 0.2.40"),
        ({"autogen": "0.14.1", "autogen-agentchat": "0.7.5"}, "autogen 0.14.1"),
        ({"autogen": "0.14.1", "ag2": "1.2.1"}, "autogen 0.14.1"),
        ({"autogen": "0.14.1", "pyautogen": "0.10.0"}, "autogen 0.14.1"),
        ({}, "autogen"),
    ],
)
def test_a_whole_installation_is_named(versions: dict[str, str], name: str) -> None:
    assert runtime(versions.get, lambda: True) == name


def test_the_ranges_leave_no_distribution_out() -> None:
    assert {known.name for known in KNOWN} == {
        "autogen",
        "ag2",
        "pyautogen",
        "autogen-agentchat",
    }


def test_the_installation_may_be_asked_for_without_importing_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "marft_agents_classic"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip() == runtime()
