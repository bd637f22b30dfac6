"""Line charts as SVG, without a plotting library.

Invariant: a chart is a function of its data; drawing it again gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _BOTTOM = 270, 200, 58, 34, 34, 74
_COLOURS = ("#1f5fa8", "#d1495b", "#2e933c", "#8e5ea2", "#e08e0b", "#5c6770")


@dataclass(frozen=True)
class Line:
    """One curve with a band from ``low`` to ``high`` around it (empty: no band)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """One picture of the row; ``marks`` are dashed horizontal lines."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[float] = field(default_factory=tuple[float, ...])


@dataclass(frozen=True)
class _Scale:
    left: float
    x_most: float
    y_most: float

    def x(self, value: float) -> float:
        return self.left + _WIDTH * value / self.x_most

    def y(self, value: float) -> float:
        return _TOP + _HEIGHT * (1 - min(max(value / self.y_most, 0.0), 1.0))


def draw(
    panels: Sequence[Panel], *, x_label: str, y_label: str, y_most: float | None = None
) -> str:
    """Panels side by side, one legend below; all start at zero and share the y axis."""
    width = _LEFT + len(panels) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + _BOTTOM
    top = y_most or 1.05 * max(v for p in panels for line in p.lines for v in line.y)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        most = max(v for line in panel.lines for v in line.x)
        scale = _Scale(_LEFT + i * (_WIDTH + _GAP), most, top)
        parts += _axes(panel, scale, numbers=i == 0)
        for line in panel.lines:
            parts += _curve(line, scale, colours[line.name])
    middle = _LEFT + (len(panels) * (_WIDTH + _GAP) - _GAP) / 2
    parts.append(_text(middle, height - 40, x_label, "middle"))
    parts.append(
        f'<text transform="translate(14 {_TOP + _HEIGHT / 2}) rotate(-90)"'
        f' text-anchor="middle">{escape(y_label)}</text>'
    )
    parts += _legend(names, colours, height - 14)
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(panel: Panel, scale: _Scale, *, numbers: bool) -> list[str]:
    out = [_text(scale.left + _WIDTH / 2, _TOP - 12, panel.title, "middle")]
    for step in range(5):
        value = scale.y_most * step / 4
        y = scale.y(value)
        out.append(
            f'<line x1="{scale.left}" x2="{scale.left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"'
            ' stroke="#dddddd"/>'
        )
        if numbers:
            out.append(_text(scale.left - 6, y + 4, f"{value:.3g}", "end"))
    for step in range(5):
        value = scale.x_most * step / 4
        out.append(_text(scale.x(value), _TOP + _HEIGHT + 16, f"{value:.4g}", "middle"))
    for mark in panel.marks:
        y = scale.y(mark)
        out.append(
            f'<line x1="{scale.left}" x2="{scale.left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"'
            ' stroke="#555555" stroke-dasharray="4 3"/>'
        )
    return out


def _points(x: Sequence[float], y: Sequence[float], scale: _Scale) -> list[str]:
    return [f"{scale.x(a):.1f},{scale.y(b):.1f}" for a, b in zip(x, y, strict=True)]


def _curve(line: Line, scale: _Scale, colour: str) -> list[str]:
    out: list[str] = []
    if line.low and line.high:
        around = [
            *_points(line.x, line.high, scale),
            *reversed(_points(line.x, line.low, scale)),
        ]
        out.append(f'<polygon points="{" ".join(around)}" fill="{colour}" fill-opacity="0.13"/>')
    points = " ".join(_points(line.x, line.y, scale))
    out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return out


def _legend(names: Sequence[str], colours: dict[str, str], y: float) -> list[str]:
    out: list[str] = []
    x = float(_LEFT)
    for name in names:
        out.append(
            f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}"'
            f' stroke="{colours[name]}" stroke-width="3"/>'
        )
        out.append(_text(x + 23, y, name))
        x += 40 + 7 * len(name)
    return out
