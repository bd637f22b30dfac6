"""Which format a file has, by what stands in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from marft_agents.errors import LogError
from marft_agents.log.importing.lines import document, rows
from marft_agents.schema import JsonDict

_TRIED = 20
"""Records that are looked at before giving up."""


def detect(path: Path) -> str:
    """The name of the format.

    Raises:
        LogError: when it cannot be told.
        OSError: when the file cannot be read.
    """
    if path.is_dir():
        raise LogError(f"{path} is a folder; name one file")
    with path.open("rb") as file:
        if file.read(16) == b"SQLite format 3\0":
            return "autogen-sqlite"
    for _, (_, value, _) in zip(range(_TRIED), rows(path), strict=False):
        name = None if value is None else _of(value)
        if name is not None:
            return name
    try:
        whole = document(path)
    except LogError:
        whole = None
    name = _of(cast("JsonDict", whole)) if isinstance(whole, dict) else None
    if name is None:
        raise LogError(
            f"cannot tell the format of {path}: neither a database of runtime logging, a saved"
            " state or result of AgentChat, nor chats with 'messages' or 'conversations'; name it"
            " with --from"
        )
    return name


def _of(value: JsonDict) -> str | None:
    if value.get("schema_version") is not None and "episode_id" in value:
        raise LogError("this is a log already; name it to finetune or inspect as it is")
    if "agent_states" in value or "llm_context" in value or "message_thread" in value:
        return "agentchat-state"
    if "source" in value and "content" in value:
        return "agentchat-result"
    if isinstance(value.get("conversations"), list):
        return "sharegpt"
    messages = value.get("messages")
    if isinstance(messages, list) and messages:
        first: Any = cast("list[Any]", messages)[0]
        if isinstance(first, dict) and "source" in first and "role" not in first:
            return "agentchat-result"
        return "openai"
    return None
