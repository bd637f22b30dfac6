"""What the tests of several runtimes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from marft_agents.recording import EpisodeHandle
from marft_agents.schema import JsonDict
from marft_agents.testing import Reply, default_reply


def calls_once(calls: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Any:
    """A script: the agent of a name calls its tool first, and speaks once a tool has answered it.

    ``calls``: agent → (tool, arguments). A model name may have an ending, as in ``planner-tuned``.
    """

    def script(body: JsonDict) -> Reply | str:
        name = str(body["model"]).removesuffix("-tuned")
        offered = [t["function"]["name"] for t in body.get("tools") or ()]
        tool = calls.get(name)
        answered = any(m["role"] == "tool" for m in body["messages"])
        if tool is None or answered or tool[0] not in offered:
            return default_reply({**body, "model": name})
        return Reply(tool_calls=[tool])

    return script


def noting(ends: list[Any]) -> Callable[[EpisodeHandle, Any], None]:
    """An ``on_end`` that notes what it is called with."""

    def on_end(handle: EpisodeHandle, result: Any) -> None:
        ends.append(result)

    return on_end
