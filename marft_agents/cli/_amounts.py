"""Shares, durations and versions on the command line: ``10%``, ``0.1``, ``30m``, ``v7``."""

from __future__ import annotations

import math
import re
from typing import Any

import click

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Finite(click.FloatRange):
    """A range of numbers without ``nan``, which no bound keeps out, and ``inf``."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return number


def version_number(value: Any) -> int:
    """A version as the commands print it, ``v7``, or ``7``; a type of option.

    Raises:
        click.BadParameter: it is none.
    """
    text = str(value).strip()
    match = re.fullmatch(r"v?(\d{1,9})", text, re.ASCII)
    if match is None or not (number := int(match[1])):
        raise click.BadParameter(f"{text!r} is no version; write it as 7 or v7")
    return number


def share(value: Any) -> float:
    """A share as a number from 0 to 1, itself excluded; a type of option.

    Raises:
        click.BadParameter: it is none.
    """
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1:
        raise click.BadParameter(f"{text!r} is no share; write it as 10% or 0.1, below 100%")
    return number


def span(value: Any) -> float:
    """Seconds; a type of option.

    Raises:
        click.BadParameter: it is no time.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)", str(value).strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= 30 * 86400:
        raise click.BadParameter(f"{value!r} is no time; write it as 90s, 30m or 2h, 30d at most")
    return seconds


def percent(share: float) -> str:
    """``10%`` for 0.1."""
    return f"{100 * share:.4g}%"


def duration(seconds: float) -> str:
    """``30 min`` for 1800."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def episodes(count: int) -> str:
    return f"{count} episode{'' if count == 1 else 's'}"
