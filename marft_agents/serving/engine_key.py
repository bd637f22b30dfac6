"""The key between a gateway and the engines that it started.

Invariant: an engine started here answers its gateway alone, on every route. The key is new at every
start and travels in the environment, never on a command line.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from marft_agents.serving.commands import EngineCommand
from marft_agents.serving.engine_side.marft_engine_guard import VARIABLE

_GUARD = "marft_engine_guard.RequireKey"
_FOLDER = Path(__file__).parent / "engine_side"
_VLLM = "vllm.entrypoints.openai.api_server"


def new_engine_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_urlsafe(32)


def guarded(command: EngineCommand, key: str, hidden: Iterable[str] = ()) -> EngineCommand:
    """The same engine, asking for ``key`` on every route, without the variables ``hidden``.

    The local engine reads the variable by itself; vLLM is given the guard as its outermost
    middleware, beside its own check of keys.
    """
    env = command.env | dict.fromkeys(hidden) | {VARIABLE: key}
    if _VLLM not in command.argv:
        return replace(command, env=env)
    path = os.pathsep.join(filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH")]))
    env |= {"VLLM_API_KEY": key, "PYTHONPATH": path}
    return replace(command, argv=(*command.argv, "--middleware", _GUARD), env=env)


def key_of(command: EngineCommand) -> str | None:
    """The key that ``command`` starts its engine with."""
    return command.env.get(VARIABLE)
