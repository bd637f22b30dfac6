"""Guardrails: agents that one of them asks are guards, not actors.

Invariant: a guardrail runs as before; only the context knows that it is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from marft_agents_openai_agents.doors import DOORS
from marft_agents_openai_agents.runs import GUARD


def watch_guardrails(holder: Any) -> None:
    """Of an agent or a run's configuration; and of the agent's tools."""
    for place, guardrail in _guardrails(holder):
        DOORS.replace(guardrail, "run", _as_guard(place))


def _guardrails(holder: Any) -> Iterator[tuple[str, Any]]:
    for place in ("input", "output"):
        for guardrail in getattr(holder, f"{place}_guardrails", None) or ():
            yield place, guardrail
    for tool in getattr(holder, "tools", None) or ():
        for name in ("tool_input_guardrails", "tool_output_guardrails"):
            for guardrail in getattr(tool, name, None) or ():
                yield "tool", guardrail


def _as_guard(place: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        async def run(*args: Any, **kwargs: Any) -> Any:
            token = GUARD.set(place)
            try:
                return await original(*args, **kwargs)
            finally:
                GUARD.reset(token)

        return run

    return make
