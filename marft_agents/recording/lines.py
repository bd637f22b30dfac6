"""The lines of an event stream, cut from bytes that come in any pieces.

Invariant: the texts of the lines and of the rest, one after the other, are the bytes that came. A
line ends as the standard says (LF, CR LF or CR) and is there as soon as its end is; it is parsed
once, whoever reads it.
"""

from __future__ import annotations

from typing import Any, Final

from marft_agents.recording.jsontext import parse_json

NO_JSON: Final = object()
"""What the data of a line is that cannot be parsed."""
_BOM = b"\xef\xbb\xbf"
_ENDS = b"\r\n"
_UNREAD = object()


class Line:
    """One line, its end included; ``silent``: a part of one, which says nothing by itself."""

    __slots__ = ("_value", "at", "data", "silent", "text")

    def __init__(self, text: bytes, *, silent: bool = False) -> None:
        self.text = text
        self.silent = silent
        self.data: bytes | None = None
        if text.startswith(b"data:") and not silent:
            self.at = 6 if text.startswith(b" ", 5) else 5
            """Where the data begins."""
            self.data = text[self.at :].rstrip(_ENDS)
        self._value: Any = _UNREAD

    @property
    def end(self) -> bytes:
        return self.text[len(self.text.rstrip(_ENDS)) :]

    @property
    def blank(self) -> bool:
        """Whether it ends an event."""
        return not self.silent and not self.text.rstrip(_ENDS)

    @property
    def value(self) -> Any:
        """What the data is, read as JSON, else ``NO_JSON``."""
        if self._value is _UNREAD:
            self._value = parsed(self.data or b"")
        return self._value


def parsed(data: bytes) -> Any:
    """A JSON value, else ``NO_JSON``."""
    try:
        return parse_json(data)
    except ValueError:
        return NO_JSON


_BLANK = {end: Line(end) for end in (b"\n", b"\r\n", b"\r")}


class Lines:
    """Takes bytes and gives the lines that they complete."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """The unfinished line, in pieces."""
        self._after_return = self._begun = False
        self._between = True

    def feed(self, data: bytes) -> list[Line]:
        """The lines that end in the next bytes of the body."""
        if not data:
            return []
        out: list[Line] = []
        if self._after_return and data.startswith(b"\n"):  # the second half of the last line's end
            out.append(Line(b"\n", silent=True))
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        if b"\n" not in data and b"\r" not in data:
            self._rest += [data] if data else []
            return out
        texts = b"".join([*self._rest, data]).splitlines(keepends=True)
        self._rest = [] if texts[-1].endswith((b"\n", b"\r")) else [texts.pop()]
        out += self._begin(texts)
        self._begun = True
        self._between = out[-1].blank if out else self._between
        return out

    def unfinished(self) -> bytes | None:
        """What came of the line that has no end yet, to be fed again with more behind it.

        ``None`` in the middle of an event, whose lines belong together.
        """
        if not self._between:
            return None
        rest, self._rest = self._rest, []
        return b"".join(rest)

    def passed(self) -> None:
        """Whole events that followed were read by somebody else."""
        self._after_return, self._begun = False, True

    def rest(self) -> list[Line]:
        """The line that has no end yet; it stays the rest."""
        return self._begin([b"".join(self._rest)]) if self._rest else []

    def _begin(self, texts: list[bytes]) -> list[Line]:
        if self._begun or not texts[0].startswith(_BOM):
            return [_BLANK.get(text) or Line(text) for text in texts]
        first = texts[0].removeprefix(_BOM)
        return [Line(_BOM, silent=True), *(Line(text) for text in [first, *texts[1:]])]
