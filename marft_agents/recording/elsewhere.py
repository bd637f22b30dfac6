"""Requests that generate text on another route than chat completions.

Invariant: they pass untouched; a recorded agent whose model answers there is told once that its
turns are missing, and what to do.
"""

from __future__ import annotations

from marft_agents.recording.call import Call
from marft_agents.recording.core import Core
from marft_agents.recording.episode import current_episode

_CURES = {
    "/responses": (
        "the Responses API returns no token ids",
        "use chat completions, e.g. client.chat.completions, OpenAIChatCompletionsModel or"
        " OpenAIChatCompletionClient",
    ),
    "/completions": (
        "only chat completions are recorded",
        "use client.chat.completions.create(messages=[...])",
    ),
    "/runs": (
        "the Assistants API returns no token ids",
        "use chat completions",
    ),
    "/messages": (
        "only chat completions are recorded",
        "point the agent at an OpenAI-compatible server and use chat completions",
    ),
}


def say_elsewhere(path: str, call: Call | None, core: Core | None, agent: str | None) -> None:
    """Warn once per agent and route; ``core`` and ``agent`` own the client, where someone does."""
    route = next((route for route in _CURES if path.endswith(route)), None)
    if route is None:
        return
    if call is not None:
        core, agent = call.episode.core, call.agent
    elif core is None or current_episode(core) is None:
        return
    why, cure = _CURES[route]
    core.safety.warn_once(
        ("elsewhere", agent, route),
        f"marft-agents: agent {agent!r} calls its model at {path}, which is not recorded: {why};"
        f" to record its turns, {cure}",
    )
