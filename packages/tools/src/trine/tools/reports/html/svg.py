"""Draw the pictures of a report as SVG, to be put into its page.

Everything that can be pointed at is a *mark*: an element with the class `mark` and a text
that says its values, in `aria-label`. The first of a picture can be reached with the Tab key,
the others from there with the arrow keys: `data-row` says in which row a mark is. Colours and
patterns are classes, which the style sheet knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from markupsafe import Markup, escape

from trine.tools.text import format_nbytes, format_ns

__all__ = ["WIDTH", "Bar", "Segment", "areas", "bars", "columns", "tag"]

WIDTH: Final = 1000
_LEFT, _RIGHT = 80, 90  # room for labels beside bars
_ROW, _BAR, _BESIDE = 40, 22, 7  # heights
_PLOT, _BELOW = 220, 24
_LETTER: Final = 7.5  # how wide a letter is, about


@dataclass(frozen=True)
class Segment:
    """A part of a bar.

    Attributes:
        part: its class.
        label: what it is, in a word or two.
        size: in the unit of the picture.
    """

    part: str
    label: str
    size: float


@dataclass(frozen=True)
class Bar:
    """A bar, or a column.

    Attributes:
        label: what is written beside it.
        text: all its values, in words.
        segments: from the axis on.
        beside: what is drawn beside the bar because it is no part of the sum.
    """

    label: str
    text: str
    segments: Sequence[Segment]
    beside: Segment | None = None

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(segment.size for segment in self.segments)


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """An element; underscores in names of attributes stand for hyphens, a last one for nothing.

    Attributes are escaped, and content is unless it is markup. Those that are None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(content)
    return Markup(f"<{name}{written}>{inside}</{name}>" if content else f"<{name}{written}/>")


def bars(drawn: Sequence[Bar], label: str) -> Markup:
    """One bar per row, each a mark, with its length beside it; sizes are ns."""
    scale = (WIDTH - _LEFT - _RIGHT) / (max((_extent(bar) for bar in drawn), default=0) or 1)
    rows = []
    for row, bar in enumerate(drawn):
        y = row * _ROW + 4
        content = [tag("text", bar.label, x=_LEFT - 8, y=y + 15, text_anchor="end")]
        for segment, start in zip(bar.segments, _starts(bar.segments), strict=True):
            x, width = _LEFT + start * scale, segment.size * scale
            if segment.size > 0:
                content.append(_rect(segment, x, y, width, _BAR))
                content += _inside(f"{segment.label} {format_ns(segment.size)}", x, y, width)
        if bar.beside is not None and bar.beside.size * scale >= 1:
            content.append(_rect(bar.beside, _LEFT, y + _BAR + 1, bar.beside.size * scale, _BESIDE))
        end = _LEFT + bar.total * scale + 8
        content.append(tag("text", format_ns(bar.total), x=end, y=y + 15))
        rows.append(_mark(content, bar.text, row, first=row == 0))
    return _picture(rows, label, len(drawn) * _ROW + 4)


def columns(drawn: Sequence[Bar], label: str) -> Markup:
    """One column per step, each a mark, on an axis of time; sizes are ns."""
    high = max((bar.total for bar in drawn), default=0) or 1
    scale, wide = _PLOT / high, (WIDTH - _LEFT) / max(len(drawn), 1)
    gap = min(2.0, wide / 5)
    marks = []
    for place, bar in enumerate(drawn):
        x = _LEFT + place * wide
        content = [
            _rect(segment, x, 8 + _PLOT - end * scale, wide - gap, segment.size * scale)
            for segment, end in zip(
                bar.segments, accumulate(segment.size for segment in bar.segments), strict=True
            )
            if segment.size > 0
        ]
        marks.append(_mark(content, bar.text, 0, first=place == 0))
    axis = [*_grid(high, format_ns), *_below([bar.label for bar in drawn], wide)]
    return _picture([*axis, *marks], label, 8 + _PLOT + _BELOW)


def areas(drawn: Sequence[Bar], label: str) -> Markup:
    """Stacked areas over time, each moment a mark and the highest pointed at; sizes are bytes.

    Args:
        drawn: the moments, at least one, all with the same segments.
        label: what the picture shows.
    """
    high = max((bar.total for bar in drawn), default=0) or 1
    scale, wide = _PLOT / high, (WIDTH - _LEFT) / max(len(drawn), 1)
    content: list[Markup] = _grid(high, format_nbytes)
    below = [0.0] * len(drawn)
    for index, segment in enumerate(drawn[0].segments):
        above = [low + bar.segments[index].size for low, bar in zip(below, drawn, strict=True)]
        if above != below:
            edge = _steps(above, wide, scale) + _steps(below, wide, scale, back=True)
            content.append(tag("path", class_=segment.part, d=f"M{_LEFT} {_PLOT + 8}{edge}z"))
        below = above
    content += _below([bar.label for bar in drawn], wide)
    for place, bar in enumerate(drawn):
        hit = tag("rect", class_="hit", x=_LEFT + place * wide, y=8, width=wide, height=_PLOT)
        content.append(_mark([hit], bar.text, 0, first=place == 0))
    x = _LEFT + (max(range(len(drawn)), key=lambda place: drawn[place].total) + 0.5) * wide
    content.append(tag("path", class_="peak", d=f"M{_number(x)} 8l-5-7h10z"))
    return _picture(content, label, 8 + _PLOT + _BELOW)


def _steps(heights: Sequence[float], wide: float, scale: float, *, back: bool = False) -> str:
    """A line over the heights, one step each: from the left, or back again."""
    line = ""
    for place in reversed(range(len(heights))) if back else range(len(heights)):
        x, y = _LEFT + (place + (not back)) * wide, 8 + _PLOT - heights[place] * scale
        line += f"V{_number(y)}H{_number(x)}"
    return line


def _extent(bar: Bar) -> float:
    return max(bar.total, bar.beside.size if bar.beside else 0)


def _starts(segments: Sequence[Segment]) -> list[float]:
    return list(accumulate((segment.size for segment in segments), initial=0.0))[:-1]


def _rect(segment: Segment, x: float, y: float, width: float, height: float) -> Markup:
    return tag("rect", class_=segment.part, x=x, y=y, width=width, height=height)


def _inside(text: str, x: float, y: float, width: float) -> list[Markup]:
    """The text, if there is room for it."""
    if len(text) * _LETTER + 8 > width:
        return []
    return [tag("text", text, class_="on", x=x + 5, y=y + 15)]


def _grid(high: float, written: Callable[[float], str]) -> list[Markup]:
    found = []
    for line in range(5):
        y = 8 + _PLOT * (1 - line / 4)
        found.append(tag("path", class_="grid", d=f"M{_LEFT} {_number(y)}H{WIDTH}"))
        size = written(high * line / 4) if line else "0"
        found.append(tag("text", size, x=_LEFT - 8, y=y + 4, text_anchor="end"))
    return found


def _below(labels: Sequence[str], wide: float) -> list[Markup]:
    """Labels under a plot, as many as there is room for."""
    longest = max((len(label) for label in labels), default=0)
    every = int((longest * _LETTER + 20) / wide) + 1
    return [
        tag("text", label, x=_LEFT + place * wide, y=_PLOT + 26)
        for place, label in enumerate(labels)
        if place % every == 0 and _LEFT + place * wide + len(label) * _LETTER <= WIDTH
    ]


def _mark(content: Sequence[Markup], text: str, row: int, *, first: bool) -> Markup:
    focus = 0 if first else -1
    return tag(
        "g", *content, class_="mark", role="img", tabindex=focus, aria_label=text, data_row=row
    )


def _picture(content: Sequence[Markup], label: str, height: float) -> Markup:
    box = f"0 0 {WIDTH} {_number(height)}"
    return tag("svg", *content, class_="chart", role="group", aria_label=label, viewBox=box)


def _number(value: object) -> object:
    """A number with one digit after the point at most; anything else as it is."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
