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


def say(text: str) -> None:
    """Print to stdout, whatever is in ``text``."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(printable(text).encode(encoding, "backslashreplace").decode(encoding))


def printable(text: str) -> str:
    """``text`` with control characters and lone surrogates escaped."""
    return "".join(
        c if c in _KEPT or unicodedata.category(c) not in ("Cc", "Cs") else repr(c)[1:-1]
        for c in text
    )


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> list[str]:
    """Rows under their header, two spaces apart; the columns in ``right`` end together."""
    lines = [header, *rows]
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
