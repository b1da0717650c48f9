"""Draw a step's timeline: a row per lane, a mark per event.

There are thousands of marks, so each is as short as can be: the script of the page makes
their text, from three numbers and the list of names that stands beside the picture, when
somebody comes to one. It also moves them when the picture is enlarged.
"""

from __future__ import annotations

from typing import Final

from markupsafe import Markup, escape

from trine.tools.reports.html.svg import WIDTH, tag
from trine.tools.reports.html.timeline import Mark, StepTimeline
from trine.tools.text import format_ns

__all__ = ["draw_timeline"]

_LEFT: Final = 150
_ROW, _GAP, _ABOVE = 14, 12, 20
_LETTER: Final = 6.5


def draw_timeline(timeline: StepTimeline, label: str) -> Markup:
    """The picture of one step; `label` says what it shows."""
    scale = (WIDTH - _LEFT) / (timeline.length_ns or 1)
    content: list[Markup] = []
    y, row = _ABOVE, 0
    for rank, lanes in timeline.ranks.items():
        content.append(tag("text", f"rank {rank}", class_="rank", x=0, y=y + 11))
        for lane in lanes:
            if lane.label:
                content.append(
                    tag("text", lane.label, class_="lane", x=_LEFT - 6, y=y + 11, text_anchor="end")
                )
            marks = [
                _mark(mark, timeline.labels[mark.label], scale, first=not row and not place)
                for place, mark in enumerate(lane.marks)
            ]
            if marks:
                move = f"translate(0 {y})"
                content.append(tag("g", *marks, data_row=row, transform=move))
                row += 1
            y += _ROW
        y += _GAP
    return tag(
        "svg",
        *_axis(timeline, scale, y),
        *content,
        class_="chart timeline",
        role="group",
        aria_label=label,
        viewBox=f"0 0 {WIDTH} {y}",
        data_left=_LEFT,
    )


def _axis(timeline: StepTimeline, scale: float, height: int) -> list[Markup]:
    found = []
    for tick in range(6):
        at_ns = timeline.length_ns * tick / 5
        x = round(_LEFT + at_ns * scale, 2)
        found.append(tag("path", class_="grid", d=f"M{x} {_ABOVE - 4}V{height}"))
        anchor = "end" if tick == 5 else "middle"
        found.append(
            tag(
                "text",
                format_ns(at_ns) if tick else "0",
                class_="tick",
                x=x,
                y=11,
                text_anchor=anchor,
            )
        )
    return found


def _mark(mark: Mark, name: str, scale: float, *, first: bool) -> Markup:
    x, width = _LEFT + mark.start_ns * scale, max(mark.length_ns * scale, 0.4)
    focus = Markup(' tabindex="0" role="img" aria-label="{}"').format(text_of(mark, name))
    drawn = Markup(
        f'<rect class="mark {mark.part}" x="{x:.1f}" width="{width:.1f}" height="{_ROW - 2}" '
        f'data-e="{mark.label} {mark.start_ns} {mark.length_ns}"{focus if first else ""}/>'
    )
    room = int((width - 6) / _LETTER)
    shown = name if len(name) <= room else name.partition(" ")[0]
    if 0 < len(shown) <= room:
        drawn += Markup(f'<text class="on" x="{x + 3:.1f}" y="9">{escape(shown)}</text>')
    return drawn


def text_of(mark: Mark, name: str) -> str:
    """What the script of the page says of a mark, too."""
    return f"{name}: {format_ns(mark.length_ns)}, from {format_ns(mark.start_ns)}"
