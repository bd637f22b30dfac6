"""A reply as it would have been without a recorder on the way.

Invariant: the top-level ``model`` is the one that was asked for; token fields that the recorder put
in read as where nobody asked: they keep their place and are null, and chunks that came only for
their sake are gone. Every other byte passes as it came, each line of a stream as soon as it is
complete; what is no JSON passes untouched. Only text that is not in UTF-8 is written anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, cast

from pydantic_core import PydanticSerializationError, to_json

from marft_agents.recording.jsontext import revised
from marft_agents.recording.lines import NO_JSON, Line, parsed
from marft_agents.recording.splicing import (
    chunk_without_tokens,
    events_without_tokens,
    is_whole,
    with_model,
    without_tokens,
)
from marft_agents.schema import JsonDict

NOTHING: frozenset[str] = frozenset()
_DONE = b"[DONE]"
_LOOK = 64
_LENGTH = b"content-length"
_BOTH = frozenset({"token_ids", "logprobs"})


def _raise(error: Exception) -> None:
    raise error


class Restorer:
    """Restores one reply.

    ``asked``: the model's name for the app, in place of ``served`` alone where that is given.
    ``hidden``: of ``token_ids`` and ``logprobs``, what the app is not to see. ``failed`` is told of
    a bug in here; the text concerned then passes as it came.
    """

    def __init__(
        self,
        asked: str | None,
        hidden: Collection[str] = NOTHING,
        *,
        served: str | None = None,
        failed: Callable[[Exception], None] = _raise,
    ) -> None:
        self._asked = asked
        self._hidden = frozenset(hidden)
        self._hides_ids = "token_ids" in hidden
        self._hides_both = self._hidden >= _BOTH
        self._served = served
        self._mark = b"" if hidden or served is None else served.encode()
        self._names = (None, None) if asked is None else (_in_json(asked), _in_json(served))
        self._failed = failed
        self._held: list[Line] = []
        """Of an event in several lines, those that came."""
        self._dropped = self._line_dropped = False

    def whole(self, body: bytes, value: Any = None) -> bytes:
        """A reply in one piece; ``value``: what it is, where that is known."""
        quick = self._quick(body)
        if quick is not None:
            return quick
        return self._text(body, parsed(body) if value is None else value)

    def events(self, data: bytes) -> tuple[bytes, int]:
        """What the app is to see of the first events in ``data``, and how much of it they are.

        Only where all that is in the form which needs no reading; what is left is for ``lines``.
        """
        asked, served = self._names
        fits = self._hides_both and (asked is not None or self._asked is None)
        if not fits or self._held or self._dropped or self._line_dropped:
            return b"", 0
        try:
            return events_without_tokens(data, asked, served)
        except Exception as error:
            self._failed(error)
            return b"", 0

    def lines(self, lines: Iterable[Line]) -> bytes:
        """What the app is to see of these lines of a stream."""
        return b"".join(map(self._line, lines))

    def end(self, rest: Iterable[Line]) -> bytes:
        """What is left to see when nothing more comes."""
        return self.lines(rest) + self._release(b"")

    def _line(self, line: Line) -> bytes:
        data = line.data
        if data is None or data.startswith(_DONE) or self._mark not in line.text:
            return self._other(line)
        quick = None if self._held else self._quick_chunk(data)
        if quick is not None:
            self._dropped = self._line_dropped = False
            return line.text if quick is data else _put(line, quick)
        value = line.value
        if self._held or value is NO_JSON:
            self._held.append(line)
            return b""
        text = self._text(data, value)
        self._dropped = self._line_dropped = not text
        if not text or text is data:
            return line.text if text else b""
        return _put(line, text)

    def _quick(self, data: bytes) -> bytes | None:
        """The text restored without reading it, where that can be done."""
        try:
            quick = data
            if self._hidden:
                logprobs = "logprobs" in self._hidden
                quick = without_tokens(data, ids=self._hides_ids, logprobs=logprobs)
            return self._renamed(quick)
        except Exception as error:
            self._failed(error)
            return None

    def _quick_chunk(self, data: bytes) -> bytes | None:
        """The same for one line of a stream, which may be a part of an event."""
        if self._hides_both and (quick := chunk_without_tokens(data)) is not None:
            return self._renamed(quick)
        return self._quick(data) if is_whole(data) else None

    def _renamed(self, quick: bytes | None) -> bytes | None:
        if quick is None or self._asked is None:
            return quick
        asked, served = self._names
        return with_model(quick, asked, served) if asked is not None else None

    def _other(self, line: Line) -> bytes:
        """A line without data, or without any that concerns us."""
        if line.silent and not self._held:
            return b"" if self._line_dropped else line.text
        self._line_dropped = False
        if self._held and not line.blank:
            self._held.append(line)
            return b""
        if self._held:
            return self._release(line.text)
        if self._dropped and line.blank:  # it ended the event that is gone
            self._dropped, self._line_dropped = False, True
            return b""
        self._dropped = self._dropped and line.data is None
        return line.text

    def _release(self, end: bytes) -> bytes:
        """The event in several lines that is over."""
        held, self._held = self._held, []
        said = [line for line in held if line.data is not None]
        joined = b"\n".join(cast("bytes", line.data) for line in said)
        value = parsed(joined) if len(said) > 1 else NO_JSON
        text = joined if value is NO_JSON else self._text(joined, value)
        if text is joined:
            return b"".join(line.text for line in held) + end
        others = b"".join(line.text for line in held if line.data is None and not line.silent)
        self._line_dropped = not text
        if not text:
            return others
        tail = b"\r\n" if any(line.silent for line in held) else said[0].end
        return others + b"".join(b"data: " + part + tail for part in text.split(b"\n")) + end

    def _text(self, data: bytes, value: Any) -> bytes:
        """A JSON text, restored; empty when nothing of it is left."""
        if not isinstance(value, dict):
            return data
        fields = cast("JsonDict", value)
        try:
            if self._hides_both and _is_bare(fields):
                return b""
            wanted = self._wanted(fields)
            return data if wanted is None else _written(data, fields, wanted)
        except Exception as error:
            self._failed(error)
            return data

    def _wanted(self, fields: JsonDict) -> JsonDict | None:
        """The fields as they are to be, ``None`` where they are so already."""
        put: JsonDict = {}
        if self._asked is not None:
            model = fields.get("model")
            if isinstance(model, str) and model != self._asked and self._served in (None, model):
                put["model"] = self._asked
        if self._hides_ids and fields.get("prompt_token_ids") is not None:
            put["prompt_token_ids"] = None
        choices = fields.get("choices")
        if self._hidden and isinstance(choices, list):
            before = cast("list[Any]", choices)
            after = [self._without(choice) for choice in before]
            if after != before:
                put["choices"] = after
        return fields | put if put else None

    def _without(self, choice: Any) -> Any:
        if not isinstance(choice, dict):
            return choice
        out = cast("JsonDict", choice)
        for name in self._hidden:
            if out.get(name) is not None:
                out = out | {name: None}
        return out


def _in_json(name: str | None) -> bytes | None:
    """A name as it stands between quotation marks."""
    if name is None:
        return None
    try:
        return json.dumps(name, ensure_ascii=False)[1:-1].encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return None


def _put(line: Line, text: bytes) -> bytes:
    """A line with another text as its data."""
    return line.text[: line.at] + text + line.text[line.at + len(line.data or b"") :]


def _is_bare(fields: JsonDict) -> bool:
    """A chunk without any text, which vLLM sends to those who ask for ids or log-probabilities."""
    choices = fields.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    for choice in cast("list[Any]", choices):
        if not isinstance(choice, dict):
            return False
        found = cast("JsonDict", choice)
        if found.get("delta") != {} or found.get("finish_reason") is not None:
            return False
        if all(found.get(name) is None for name in _BOTH):
            return False
    return True


def _written(data: bytes, fields: JsonDict, wanted: JsonDict) -> bytes:
    """``wanted`` in the text of ``fields``.

    Text without spaces or escapes, as engines write it, comes out the same when written anew.
    """
    if b'": ' not in data[:_LOOK] and b"\\u" not in data:
        try:
            return to_json(wanted)
        except PydanticSerializationError:
            pass  # half a surrogate pair
    try:
        return revised(data, fields, wanted)
    except (ValueError, LookupError):  # written in an encoding other than UTF-8
        return json.dumps(wanted, separators=(",", ":")).encode()


def restored_response(response: Any, content: bytes) -> Any:
    """``response`` with another body; its headers are those of a server that sent this one.

    The same object as a rule; another one where somebody has taken more out of it than its bytes.
    """
    state: dict[str, Any] = vars(response)
    if "_content" in state and "_text" not in state:
        state["_content"] = content
        if response.content is content:
            set_length(response, content)
            return response
    coded = (b"content-length", b"content-encoding", b"transfer-encoding")
    built = type(response)(
        response.status_code,
        headers=[(k, v) for k, v in response.headers.raw if k.lower() not in coded],
        content=content,
        request=response.request,
        extensions=response.extensions,
        history=response.history,
    )
    with suppress(RuntimeError):  # not known of replies that never were a stream
        built.elapsed = response.elapsed
    built.headers = response.headers.copy()
    set_length(built, content)
    return built


def _put_length(listed: list[tuple[bytes, bytes, bytes]], length: int) -> bool:
    """Put it where the class of the headers keeps them (name, in lower case, value), if possible.

    By its name, it would be found and set by reading all headers four times.
    """
    names = [lower for _, lower, _ in listed]
    if names.count(_LENGTH) != 1 or b"content-encoding" in names:
        return False
    listed[names.index(_LENGTH)] = _LENGTH, _LENGTH, b"%d" % length
    return True


def set_length(response: Any, content: bytes | None) -> None:
    """Correct ``content-length``, which counts the body as sent; unknown, it is left out."""
    headers = response.headers
    listed: Any = vars(headers).get("_list")
    if content is not None and type(listed) is list and _put_length(listed, len(content)):
        return
    if content is not None and "content-length" in headers and "content-encoding" not in headers:
        headers["content-length"] = str(len(content))
    else:
        headers.pop("content-length", None)
