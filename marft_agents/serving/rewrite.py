"""Put the name that was asked for back into what the engine answers, and hide what was not.

Invariant: the reply is restored as the recorder in a process restores it; the top-level ``model``
changes only where it is the engine's name for the version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from pydantic_core import PydanticSerializationError, to_json

from marft_agents.recording.lines import Lines, parsed
from marft_agents.recording.restoring import NOTHING, Restorer
from marft_agents.schema import JsonDict
from marft_agents.serving.large import to_json_piecewise
from marft_agents.serving.masking import Mask, masked_events, masking
from marft_agents.serving.threads import in_thread
from marft_agents.serving.usage import StreamUsage, Told, tell_usage

_EVENT_END = b"\n\n"
_MODEL, _USAGE = b'"model"', b'"usage"'
_ERROR = b'"error"'
_REASON, _GOES_ON = b'"finish_reason"', b'"finish_reason":null'


async def written(body: JsonDict, *, large: bool) -> bytes:
    """A request's body for the engine; of a ``large`` one in a thread."""
    return await in_thread(on_the_wire, body, to_json_piecewise) if large else on_the_wire(body)


def on_the_wire(body: JsonDict, write: Callable[[JsonDict], bytes] = to_json) -> bytes:
    """A request's body for the engine."""
    try:
        return write(body)
    except PydanticSerializationError:  # half a surrogate pair
        return json.dumps(body).encode()


def rewrite_json(
    body: bytes,
    engine_name: str,
    asked: str,
    hidden: Collection[str] = NOTHING,
    told: Told | None = None,
) -> bytes:
    """The JSON body with its model renamed; anything else as it is.

    ``hidden``: of ``token_ids`` and ``logprobs``, what the client is not to see. ``told`` learns
    the usage.
    """
    value = parsed(body)
    if told is not None:
        tell_usage(value, told)
    return Restorer(asked, hidden, served=engine_name).whole(body, value)


class StreamRewriter:
    """Rewrites an event stream line by line; only an unfinished line is held back.

    ``usage`` reads the usage on the way, and may hold the last chunk until it is there. Events that
    tell of an error are ``masked``.
    """

    def __init__(
        self,
        engine_name: str,
        asked: str,
        hidden: Collection[str] = NOTHING,
        usage: StreamUsage | None = None,
        masked: Mask | None = None,
    ) -> None:
        self._masked = masked or masking(None)
        self._lines = Lines()
        self._restorer = Restorer(asked, hidden, served=engine_name)
        self._usage = usage or StreamUsage(_ignored, ours=False)
        self._alike = None if hidden else _Alike(engine_name, asked)

    def feed(self, chunk: bytes) -> bytes:
        """What the client is to see now that the engine has sent ``chunk``."""
        alike = self._alike
        if alike is not None and self._usage.idle and (renamed := alike.renamed(chunk)):
            return renamed
        seen = self._restorer.lines(self._usage.take(self._lines.feed(chunk)))
        seen = masked_events(seen, self._masked)
        if alike is not None:
            alike.look(chunk, seen, whole=not self._lines.rest())
        return seen

    def broken(self) -> bytes:
        """What was held back, when the engine has broken off."""
        return masked_events(self._restorer.lines(self._usage.end()), self._masked)

    def end(self) -> bytes:
        """What is left to see when nothing more comes."""
        rest = self._restorer.end(self._usage.end(self._lines.rest()))
        return masked_events(rest, self._masked)


class _Alike:
    """Events that begin with the very bytes of one that was renamed: renamed without parsing them.

    Where an object begins as another one did up to the end of its model's name, that name stands
    in the same place. Whatever could make a difference is left to be read: another ``model``, the
    end of a choice, the usage, an error, a chunk that does not end with an event. That the rest is
    JSON is not looked at.
    """

    def __init__(self, served: str, asked: str) -> None:
        self._marks = [
            b'"model":' + json.dumps(name, ensure_ascii=False).encode() for name in (served, asked)
        ]
        self._begins: tuple[bytes, bytes] | None = None
        """How events begin, and how they are to begin."""
        self._between = True
        """Whether what has come so far ends with an event."""

    def renamed(self, chunk: bytes) -> bytes | None:
        """The chunk as the client is to see it; ``None`` where it has to be read for that."""
        if self._begins is None or not self._between:
            return None
        before, after = self._begins
        alike = (
            chunk.startswith(before)
            and chunk.endswith(_EVENT_END)
            and chunk.count(_MODEL) == chunk.count(b"\n" + before) + 1
            and _USAGE not in chunk
            and _ERROR not in chunk
            and chunk.count(_REASON) == chunk.count(_GOES_ON)
        )
        return chunk.replace(before, after) if alike else None

    def look(self, chunk: bytes, seen: bytes, *, whole: bool) -> None:
        """Learn from a chunk that was read, and from what was made of it."""
        begun, self._between = self._between, whole and chunk.endswith(_EVENT_END)
        if self._begins is not None or not begun or not chunk.startswith(b"data: {"):
            return
        served, asked = self._marks
        head, mark, rest = chunk.partition(served)
        event = rest.partition(b"\n")[0]
        first = mark and b"\n" not in head and _MODEL not in head
        if first and seen.startswith(head + asked + event + b"\n"):
            self._begins = head + served, head + asked


def _ignored(_prompt: int | None, _reply: int | None) -> None:
    """Nobody asks what a reply cost."""


__all__ = ["NOTHING", "StreamRewriter", "on_the_wire", "rewrite_json"]
