"""Server-sent events, fed as bytes in any cut, folded into a reply.

Invariant: lines end as the standard says (LF, CR LF or CR), a byte order mark and comments are
skipped, data of several lines is joined, and nothing counts after ``[DONE]``. What is cut in the
middle of an event does not count; a whole event that is no JSON is an error of the reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from marft_agents.recording.jsontext import mapping, mappings, parse_json
from marft_agents.recording.reply import Choice, Reply, index_of, legacy_call, reasoned, said
from marft_agents.schema import JsonDict

_BOM = b"\xef\xbb\xbf"


class StreamReader:
    """Reads the bytes of a stream into ``reply``; ``echo``: it begins with words of the prompt."""

    def __init__(self, expected: int = 1, *, echo: bool = False) -> None:
        self._echo = echo
        self.reply = Reply(streamed=True, expected=expected)
        self._rest: list[bytes] = []
        """The unfinished line, in pieces."""
        self._data: list[bytes] = []
        self._begun = self._done = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        held_return = bool(self._rest) and self._rest[-1].endswith(b"\r")
        if not held_return and b"\n" not in data and b"\r" not in data:
            self._rest.append(data)
            return
        whole = b"".join([*self._rest, data])
        held = 1 if whole.endswith(b"\r") else 0  # its LF may come with the next bytes
        *lines, last = _lines(whole[: len(whole) - held])
        self._rest = [last + whole[len(whole) - held :]]
        for line in lines:
            self._line(line)

    def end(self) -> None:
        """The body is over: read an event that has no blank line after it."""
        rest, self._rest = b"".join(self._rest), []
        for line in filter(None, _lines(rest)):
            self._line(line)
        self._dispatch(cut=True)

    def _line(self, line: bytes) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(_BOM)
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line:
            self._dispatch()

    def _dispatch(self, *, cut: bool = False) -> None:
        event, self._data = b"\n".join(self._data).strip(), []
        if not event or self._done:
            return
        if event.startswith(b"[DONE]"):
            self._done = True
            return
        try:
            chunk = parse_json(event)
        except ValueError:
            if not cut:
                self.reply.error = self.reply.error or "an event of the stream is not JSON"
            return
        if isinstance(chunk, dict):
            self._chunk(cast("JsonDict", chunk))

    def _chunk(self, chunk: JsonDict) -> None:
        reply = self.reply
        reply.read_common(chunk)
        raws = mappings(chunk.get("choices"))
        # Running usage counts the choice that it comes with, the one at the end counts them all.
        if not raws or reply.expected == 1:
            reply.read_usage(chunk)
        for position, raw in enumerate(raws):
            choice = reply.choice(index_of(raw, position))
            with_ids = choice.read_tokens(raw)
            said_something = _read_delta(choice, mapping(raw.get("delta")))
            echoed = self._echo and choice.token_ids is None
            choice.gap = choice.gap or (said_something and not with_ids and not echoed)
            if len(raws) == 1:
                counted = mapping(chunk.get("usage")).get("completion_tokens")
                choice.counted = counted if isinstance(counted, int) else choice.counted


def _read_delta(choice: Choice, delta: Mapping[str, Any]) -> bool:
    """Append what a delta says; returns whether it says anything."""
    text, reasoning = said(delta), reasoned(delta)
    if text is not None and (text or not choice.tool_calls):
        choice.text = (choice.text or "") + text
    if reasoning:
        choice.reasoning = (choice.reasoning or "") + reasoning
    calls = mappings(delta.get("tool_calls"))
    for call in calls:
        _merge_call(choice, call)
    legacy = delta.get("function_call")
    if isinstance(legacy, dict):
        _merge_call(choice, {"index": 0, **legacy_call(cast("JsonDict", legacy))})
    return bool(text or reasoning or calls or legacy)


def _merge_call(choice: Choice, delta: Mapping[str, Any]) -> None:
    choice.text = choice.text or None  # streams open with an empty text where replies have none
    index = index_of(delta, _place(choice, delta.get("id")))
    if index not in choice.places:
        kind = delta.get("type") or "function"
        choice.places[index] = {"id": "", "type": kind}
        choice.tool_calls = [choice.places[i] for i in sorted(choice.places)]
    call = choice.places[index]
    for name, value in delta.items():
        if name == "id":
            call["id"] = value or call["id"]
        elif isinstance(value, dict):
            call[name] = _joined(call.get(name), cast("JsonDict", value))
        elif name not in ("index", "type"):
            call[name] = value


def _place(choice: Choice, call_id: Any) -> int:
    """Where a piece without an index belongs: to the last call, unless its id is a new one."""
    last = max(choice.places, default=-1)
    known = choice.places[last]["id"] if choice.places else None
    return max(last, 0) if not call_id or call_id == known else last + 1


def _joined(before: Any, piece: JsonDict) -> JsonDict:
    """A function's name and arguments (or a custom tool's input), piece after piece."""
    out = dict(mapping(before))
    for name, value in piece.items():
        text = isinstance(value, str) and isinstance(out.get(name), str)
        out[name] = out[name] + value if text else value if value is not None else out.get(name)
    return out


def _lines(data: bytes) -> list[bytes]:
    """The lines of ``data``, the last one the one that has no end yet."""
    lines = data.splitlines()
    if not data or data.endswith((b"\n", b"\r")):
        lines.append(b"")
    return lines
