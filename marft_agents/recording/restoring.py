"""A reply of one model under the name of the model that the app asked for.

Invariant: only the value of the top-level ``model`` changes, in a whole reply and in every event of
a stream; every other byte passes as it came, each line of a stream as soon as it is complete.
"""

from __future__ import annotations

from typing import Any

from marft_agents.recording.jsontext import JsonObject

_DATA = b"data:"


class Renamer:
    """Puts ``asked`` into the bytes of one reply."""

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._held: list[bytes] = []
        self._whole = False

    def in_one_piece(self) -> None:
        """The reply is no stream: nothing can be said before its end."""
        self._whole = True

    def feed(self, data: bytes) -> bytes:
        """What the app is to see after these bytes."""
        if self._whole or b"\n" not in data:
            self._held.append(data)
            return b""
        lines = b"".join([*self._held, data]).split(b"\n")
        self._held = [lines.pop()]
        return b"".join(self._line(line) + b"\n" for line in lines)

    def end(self) -> bytes:
        """What is left to see when nothing more comes."""
        rest, self._held = b"".join(self._held), []
        return self._renamed(rest) if self._whole else self._line(rest)

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(_DATA):
            return line
        return _DATA + self._renamed(line[len(_DATA) :])

    def _renamed(self, text: bytes) -> bytes:
        try:
            found = JsonObject(text)
        except ValueError:
            return text
        if not isinstance(found.fields.get("model"), str):
            return text
        return found.edited({"model": self._asked})[1]


def renamed_response(response: Any, content: bytes) -> Any:
    """``response`` with another body."""
    changed = (b"content-length", b"content-encoding", b"transfer-encoding")
    headers = [(k, v) for k, v in response.headers.raw if k.lower() not in changed]
    renamed = type(response)(
        response.status_code,
        headers=headers,
        content=content,
        request=response.request,
        extensions=response.extensions,
        history=response.history,
    )
    renamed.elapsed = response.elapsed
    return renamed
