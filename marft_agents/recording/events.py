"""Server-sent events, taken line by line, folded into a reply.

Invariant: comments are skipped, data of several lines is joined, and nothing counts after
``[DONE]``. What is cut in the middle of an event does not count; a whole event that is no JSON is
an error of the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from marft_agents.recording.jsontext import mapping, mappings
from marft_agents.recording.lines import NO_JSON, Line, parsed
from marft_agents.recording.reply import (
    Choice,
    Reply,
    index_of,
    legacy_call,
    reasoned,
    said,
    token_ids,
)
from marft_agents.schema import JsonDict

_SAID = frozenset({"content", "role"})


class StreamReader:
    """Reads the lines of a stream into ``reply``; ``echo``: it begins with words of the prompt."""

    def __init__(self, expected: int = 1, *, echo: bool = False) -> None:
        self._echo = echo
        self.reply = Reply(streamed=True, expected=expected)
        self._event: list[Line] = []
        self._done = False

    def take(self, lines: Iterable[Line]) -> None:
        """Read the next lines of the body."""
        for line in lines:
            if line.data is not None:
                self._event.append(line)
            elif line.blank:
                self._dispatch()

    def take_next(self, piece: Line | bytes) -> None:
        """Read the next line, or the next events of one line of data each."""
        if isinstance(piece, Line):
            self.take((piece,))
            return
        events = piece.removeprefix(b"data: ").removesuffix(b"\n\n").split(b"\n\ndata: ")
        chunks = [] if self._done else _all_parsed(events)
        at = 0
        while at < len(chunks):
            if read := read_plain(self.reply, chunks, at):
                at += read
            else:
                self._read(chunks[at])
                at += 1

    def end(self, rest: Iterable[Line] = ()) -> None:
        """The body is over: read an event that has no blank line after it."""
        self.take(rest)
        self._dispatch(cut=True)

    def _dispatch(self, *, cut: bool = False) -> None:
        event, self._event = self._event, []
        if self._done or not event:
            return
        data = (event[0].data or b"").strip()
        if len(event) > 1:
            data = b"\n".join([line.data or b"" for line in event]).strip()
        if not data:
            return
        if data.startswith(b"[DONE]"):
            self._done = True
            return
        chunk = event[0].value if len(event) == 1 else parsed(data)
        self._read(chunk, cut=cut)

    def _read(self, chunk: Any, *, cut: bool = False) -> None:
        if chunk is NO_JSON and not cut:
            self.reply.error = self.reply.error or "an event of the stream is not JSON"
        if isinstance(chunk, dict):
            self._chunk(cast("JsonDict", chunk))

    def _chunk(self, chunk: JsonDict) -> None:
        reply = self.reply
        reply.read_common(chunk)
        raws, usage = mappings(chunk.get("choices")), chunk.get("usage")
        # Running usage counts the choice that it comes with, the one at the end counts them all.
        if usage and (not raws or reply.expected == 1):
            reply.read_usage(chunk)
        for position, raw in enumerate(raws):
            choice = reply.choice(index_of(raw, position))
            with_ids = choice.read_tokens(raw)
            said_something = _read_delta(choice, mapping(raw.get("delta")))
            echoed = self._echo and choice.token_ids is None
            choice.gap = choice.gap or (said_something and not with_ids and not echoed)
            if usage and len(raws) == 1:
                counted = mapping(usage).get("completion_tokens")
                choice.counted = counted if isinstance(counted, int) else choice.counted


def read_plain(reply: Reply, chunks: Sequence[Any], start: int) -> int:
    """Read the chunks from ``start`` on that say nothing but the next tokens of the only choice.

    Nearly all are such; one by one in every detail, they cost the log's thread several times as
    much, which an application that never waits has to wait for. Returns how many there are.
    """
    if len(reply.choices) != 1:
        return 0
    (choice,) = reply.choices.values()
    texts: list[str] = []
    ids: list[int] = []
    logprobs: list[float] = []
    for chunk in islice(chunks, start, None):
        try:
            (raw,) = chunk["choices"]
            delta, index, told = raw["delta"], raw["index"], raw["logprobs"]["content"]
            found, values = token_ids(raw["token_ids"]), [float(e["logprob"]) for e in told]
            text = delta["content"]
            others = [delta[name] for name in delta if name not in _SAID]
            if chunk["id"] != reply.response_id or chunk["model"] != reply.last_model:
                break
            get = chunk.get  # a generator over the names would take as long as all the rest
            if get("usage") or get("error") or get("prompt_token_ids"):
                break
            if raw.get("finish_reason") is not None:
                break
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
            break
        if not (type(text) is str and text and type(told) is list and found is not None):
            break
        if type(index) is not int or index != choice.index or others.count(None) != len(others):
            break
        texts.append(text)
        ids += found
        logprobs += values
    if texts:
        choice.text = (choice.text or "") + "".join(texts)
        choice.token_ids = [*(choice.token_ids or ()), *ids]
        choice.logprobs = [*(choice.logprobs or ()), *logprobs]
    return len(texts)


def _all_parsed(events: list[bytes]) -> list[Any]:
    """Each event's value; read at once where they are all well."""
    together = parsed(b"[" + b",".join(events) + b"]")
    if isinstance(together, list) and len(cast("list[Any]", together)) == len(events):
        return cast("list[Any]", together)
    return [parsed(event) for event in events]


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
