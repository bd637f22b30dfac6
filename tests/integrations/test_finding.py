"""Integrations are found by the object, one by one, and a broken one disturbs nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from marft_agents.errors import ConfigError, IntegrationError
from marft_agents.recording import MarftRecorder, integrations
from marft_agents.recording.integrations import GROUP, find_integration
from marft_agents.testing import InMemoryLog


class Team:
    """Of some runtime."""


def _module(wrapped: list[Any]) -> Any:
    def wrap(obj: Any, recorder: Any, **options: Any) -> Any:
        wrapped.append((obj, options))
        return "not the same object"

    return SimpleNamespace(OPTIONS={"name"}, matches=lambda obj: isinstance(obj, Team), wrap=wrap)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType] a fake


def _install(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    points: list[EntryPoint] = []
    for name, module in modules.items():
        if module is not None:
            monkeypatch.setitem(sys.modules, f"fake_{name}", module)
        points.append(EntryPoint(name=name, value=f"fake_{name}", group=GROUP))
    monkeypatch.setattr(integrations, "installed", lambda: points)


def test_a_broken_integration_disturbs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[Any] = []
    _install(monkeypatch, broken=None, good=_module(wrapped))
    team = Team()
    with MarftRecorder(log=InMemoryLog()) as recorder:
        assert recorder.wrap(team, name="x") is team
    assert wrapped == [(team, {"name": "x"})]


async def _later(episode: Any, result: Any) -> None: ...


class _Scorer:
    async def __call__(self, episode: Any, result: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"end": "terminate"}, "one of auto, terminated"),
        ({"on_ned": len}, "unknown option; there are end, name, on_end"),
        ({"on_end": 5}, "is a function"),
        ({"on_end": _later}, "nobody can await it"),
        ({"on_end": _Scorer()}, "nobody can await it"),
    ],
)
def test_options_are_checked_before_anything_is_touched(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped: list[Any] = []
    _install(monkeypatch, good=_module(wrapped))
    with MarftRecorder(log=InMemoryLog()) as recorder, pytest.raises(ConfigError, match=said):
        recorder.wrap(Team(), **options)
    assert not wrapped


def test_a_closed_recorder_says_that_it_wraps_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped: list[Any] = []
    _install(monkeypatch, good=_module(wrapped))
    recorder = MarftRecorder(log=InMemoryLog())
    recorder.close()
    recorder.wrap(Team())
    assert not wrapped and "is closed is not recorded" in caplog.text


def test_an_unknown_object_names_its_type_and_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, broken=None, good=_module([]))
    with pytest.raises(IntegrationError) as caught:
        find_integration(3)
    for words in ("builtins.int", "broken, good", "No module named 'fake_broken'", "attach_client"):
        assert words in str(caught.value)


def test_looking_for_an_integration_imports_no_framework() -> None:
    code = (
        "import sys, json\n"
        "from marft_agents import MarftRecorder\n"
        "from marft_agents.testing import InMemoryLog\n"
        "try: MarftRecorder(log=InMemoryLog()).wrap(object())\n"
        "except TypeError: pass\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(out.stdout))
    assert "marft_agents_autogen" in loaded
    assert not loaded & {"autogen_agentchat", "autogen_core", "openai", "httpx", "httpx2", "torch"}
