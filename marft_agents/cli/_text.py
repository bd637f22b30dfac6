"""Plain text for terminals and pipes.

Invariant: what was recorded cannot move the cursor or change colours (control characters are
escaped), and no output encoding makes printing fail.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

import click

_KEPT = "\n\t"
_TURNS_AROUND = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that let a text be shown in another order than it is written."""


def say(text: str) -> None:
    """Print to stdout, whatever is in ``text``."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(printable(text).encode(encoding, "backslashreplace").decode(encoding))


def printable(text: str) -> str:
    """``text`` with control characters and lone surrogates escaped."""
    return "".join(c if c in _KEPT or _is_plain(c) else ascii(c)[1:-1] for c in text)


def _is_plain(char: str) -> bool:
    return unicodedata.category(char) not in ("Cc", "Cs") and char not in _TURNS_AROUND


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> list[str]:
    """Rows under their header, two spaces apart; the columns in ``right`` end together."""
    lines = [[printable(cell).replace("\n", "\\n") for cell in line] for line in (header, *rows)]
    widths = [max(len(line[c]) for line in lines) for c in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if c in right else cell.ljust(width)
            for c, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def number(value: float | None, form: str = ".4g") -> str:
    """A number for people; ``-`` for one that is not known."""
    return "-" if value is None else format(value, form)
