"""What a reply cost in tokens, as the engine counts it.

Invariant: streams are asked for their usage on our own account where the client did not ask, and
the client sees byte for byte what it would have seen. For that the chunk with the usage is taken
out, and the last chunk before it waits for it: an engine that sends no usage puts its fingerprint
there. Streams of several choices, and clients that say something else of ``stream_options``, are
left alone; their tokens are then not known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from marft_agents.recording.jsontext import mapping
from marft_agents.recording.lines import Line
from marft_agents.schema import JsonDict

Told = Callable[[int | None, int | None], None]
"""Called with the tokens of the prompt and of the reply."""
_USAGE, _REASON, _PRINT = b'"usage"', b'"finish_reason"', "system_fingerprint"
_GOES_ON, _GOES_ON_TOO = b'"finish_reason":null', b'"finish_reason": null'
_SPACE = b" \t\r\n"


def own_usage(body: Mapping[str, Any]) -> JsonDict:
    """The fields to add to a request so that its reply says its usage."""
    if body.get("stream") is not True or _choices(body) != 1:
        return {}
    options = body.get("stream_options")
    if options is None:
        return {"stream_options": {"include_usage": True}}
    if not isinstance(options, dict):
        return {}
    said = cast("JsonDict", options)
    if said.get("include_usage") is not False or said.get("continuous_usage_stats"):
        return {}
    return {"stream_options": said | {"include_usage": True}}


def _choices(body: Mapping[str, Any]) -> Any:
    n, prompt = body.get("n"), body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(p, int) for p in prompt)
    return 2 if several else 1 if n is None else n


def tell_usage(reply: Any, told: Told) -> None:
    """Say what a reply or a chunk counted, if it did."""
    usage = mapping(mapping(reply).get("usage"))
    if usage:
        told(_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if valid else None


class StreamUsage:
    """Reads the usage in the lines of a stream; ``ours``: asked for on our own account."""

    def __init__(self, told: Told, *, ours: bool) -> None:
        self._told = told
        self._ours = ours
        self._held: list[Line] = []
        """The last chunk, and what came after it, until the usage."""
        self._dropping = self._line_dropped = False

    @property
    def idle(self) -> bool:
        """Whether it holds nothing, so that the next line alone says what becomes of it."""
        return not (self._held or self._dropping or self._line_dropped)

    def take(self, lines: list[Line]) -> list[Line]:
        """Of these lines, what the client is to see now."""
        if self.idle and not any(map(self._matters, lines)):
            return lines
        out: list[Line] = []
        for line in lines:
            if self._drops(line):
                continue
            if line.data is not None:
                self._read(line, out)
            elif self._held:
                self._held.append(line)
            else:
                out.append(line)
        return out

    def end(self, rest: Sequence[Line] = ()) -> list[Line]:
        """What is left to see when nothing more comes."""
        return self.take(list(rest)) + self._release()

    def _matters(self, line: Line) -> bool:
        text = line.text
        return line.data is not None and (_USAGE in text or (self._ours and _is_last(text)))

    def _drops(self, line: Line) -> bool:
        """Whether a line belongs to the event that is taken out."""
        dropped = self._line_dropped if line.silent else self._dropping and line.data is None
        if dropped and line.blank:
            self._dropping = False
        self._line_dropped = dropped
        return dropped

    def _read(self, line: Line, out: list[Line]) -> None:
        self._dropping = False
        text = line.text
        if _USAGE in text and (usage := _chunk(line)).get("usage"):
            tell_usage(usage, self._told)
            if usage.get(
                "choices"
            ):  # nobody asked us for running usage: this engine always sends it
                self._ours = False
            elif self._ours:
                out += self._release(usage.get(_PRINT))
                self._dropping = self._line_dropped = True
                return
        out += self._release()
        if self._ours and _is_last(text):
            self._held.append(line)
        else:
            out.append(line)

    def _release(self, fingerprint: Any = None) -> list[Line]:
        held, self._held = self._held, []
        if held and isinstance(fingerprint, str) and _PRINT not in _chunk(held[0]):
            held[0] = _with_print(held[0], fingerprint)
        return held


def _is_last(text: bytes) -> bool:
    """Whether a chunk ends its choice, as far as its text tells."""
    return _GOES_ON not in text and _REASON in text and _GOES_ON_TOO not in text


def _chunk(line: Line) -> Mapping[str, Any]:
    return mapping(line.value)


def _with_print(line: Line, fingerprint: str) -> Line:
    """The last chunk as it is where no usage follows it."""
    text = line.text.rstrip(_SPACE)
    if not text.endswith(b"}"):
        return line
    member = f",{json.dumps(_PRINT)}:{json.dumps(fingerprint, ensure_ascii=False)}}}".encode()
    return Line(text[:-1] + member + line.text[len(text) :])
