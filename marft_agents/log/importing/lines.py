"""Foreign JSON, one record at a time.

Invariant: a line that is no JSON object costs that line. A file that is one JSON document is read
whole; one of lines is not.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from marft_agents.errors import LogError
from marft_agents.schema import JsonDict

_WIDE = re.compile(rb"\0\0?\0?[\[{]\0?\0?\0?|[\[{]\0\0?\0?")
"""How JSON begins where a character has two or four bytes."""


def require_utf8(path: Path) -> None:
    """
    Raises:
        LogError: the file's first bytes are those of text in UTF-16 or UTF-32.
        OSError: when the file cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(4)
    if begin[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or _WIDE.match(begin):
        raise LogError(
            f"{path} is written in UTF-16 or UTF-32; save it as UTF-8, e.g. with `iconv -f UTF-16"
            " -t UTF-8`, and import that"
        )


class Row(NamedTuple):
    """A JSON object, or why there is none, and the line (or the number in a list) it stands at."""

    line: int
    value: JsonDict | None
    wrong: str


def rows(path: Path) -> Iterator[Row]:
    """The objects of a file of lines, or of one JSON list."""
    with path.open("rb") as file:
        first = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first == b"[":
        for number, value in enumerate(cast("list[Any]", document(path)), 1):
            yield _row(number, value)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                try:
                    yield _row(number, json.loads(line.decode("utf-8-sig")))
                except (ValueError, RecursionError) as error:
                    yield Row(number, None, f"torn or not JSON ({error})"[:200])


def document(path: Path) -> Any:
    """A file that is one JSON document.

    Raises:
        LogError: when it is not.
    """
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path} is not one JSON document ({error})") from error


def _row(number: int, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(number, cast("JsonDict", value), "")
    return Row(number, None, f"JSON {type(value).__name__}, not an object")
