"""Choose what the timelines of a report show: single steps, with all ranks side by side.

A whole run does not fit a page, and one does not look at it either: the slowest step is what
one wants to see, and an ordinary one to compare it with. What is too short to be seen is left
out, and of very many events the shortest, so that a page stays small; they are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.analysis.steps import Step, training_thread
from trine.tools.text import printable
from trine.tools.tracing.clock import Alignment
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.schema import KINDS

__all__ = ["Lane", "Mark", "StepTimeline", "step_timeline"]

_MAX_DEPTH: Final = 6
_MAX_BESIDE: Final = 4
_ASYNC: Final = KINDS.index("async")
_PIXELS: Final = 2000  # as wide as the picture is on a good screen, before it is enlarged
_LATEST_NS: Final = (1 << 63) - 1  # later is no time; a hostile file may say it
_MAX_MARKS: Final = 800


@dataclass(frozen=True)
class Mark:
    """What is drawn for one event.

    Attributes:
        part: class of its colour and pattern.
        label: place of its name in the timeline's `labels`.
        start_ns: from the beginning of the picture; events that began earlier begin there.
        length_ns: how long.
    """

    part: str
    label: int
    start_ns: int
    length_ns: int


@dataclass(frozen=True)
class Lane:
    """One row of a rank.

    Attributes:
        label: what is written beside it, "" for further rows of the same.
        marks: in the order of time.
    """

    label: str
    marks: list[Mark]


@dataclass(frozen=True)
class StepTimeline:
    """One step on several ranks.

    Attributes:
        step: its number.
        length_ns: how much time the picture shows.
        ranks: rank to its lanes.
        labels: names of events.
        left_out: how many events are too short to be seen, or too deep.
    """

    step: int
    length_ns: int
    ranks: dict[int, list[Lane]]
    labels: list[str]
    left_out: int


def step_timeline(
    traces: Sequence[RankTrace], steps: dict[int, Step], alignment: Alignment
) -> StepTimeline:
    """What each rank did during a step.

    Args:
        traces: of the ranks to show.
        steps: rank to its part of the step, at least one of them.
        alignment: of the clocks of the ranks.
    """
    shown = [trace for trace in traces if trace.header.rank in steps]
    begin = min(alignment.to_common(rank, step.start_ns) for rank, step in steps.items())
    end = max(alignment.to_common(rank, step.end_ns) for rank, step in steps.items())
    windows = {}
    for trace in shown:
        first_ns = alignment.to_rank(trace.header.rank, begin)
        windows[trace.header.rank] = first_ns, min(first_ns + end - begin, _LATEST_NS)
    least_ns = _least_ns([(trace.events, windows[trace.header.rank]) for trace in shown])
    labels: dict[str, int] = {}
    ranks: dict[int, list[Lane]] = {}
    left_out = 0
    for trace in shown:
        rank = trace.header.rank
        ranks[rank], hidden = _lanes(trace.events, windows[rank], least_ns, labels)
        left_out += hidden
    number = next(iter(steps.values())).number
    return StepTimeline(number, end - begin, ranks, list(labels), left_out)


def _least_ns(every: Sequence[tuple[Events, tuple[int, int]]]) -> int:
    """How long an event must be to be drawn."""
    lengths = []
    for events, window in every:
        spans, asyncs = _drawn(events, window)
        chosen = spans | asyncs
        lengths.append(events.end_ns[chosen] - events.start_ns[chosen])
    together = torch.cat(lengths)
    first_ns, last_ns = every[0][1]
    least_ns = (last_ns - first_ns) // _PIXELS
    if together.numel() > _MAX_MARKS:
        least_ns = max(least_ns, int(together.topk(_MAX_MARKS).values[-1]) + 1)
    return least_ns


def _drawn(events: Events, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Masks of the spans of the training thread and of communication, within a time."""
    first_ns, last_ns = window
    within = (events.start_ns < last_ns) & (events.end_ns > first_ns)
    spans = within & events.is_kind("span") & (events.thread == training_thread(events))
    return spans, within & events.is_kind("async") & events.is_category("comm")


def _lanes(
    events: Events, window: tuple[int, int], least_ns: int, labels: dict[str, int]
) -> tuple[list[Lane], int]:
    """The lanes of one rank, and how many events are left out of them."""
    spans, asyncs = _drawn(events, window)
    seen = events.end_ns - events.start_ns >= least_ns
    left_out = int(((spans | asyncs) & ~seen).sum())
    lanes: list[Lane] = []
    for label, chosen, nested in (
        ("thread", spans & seen, True),
        ("communication", asyncs & seen, False),
    ):
        places = _by_start(events, chosen.nonzero().flatten())
        rows, deeper = _rows(events, places, nested=nested)
        left_out += deeper
        lanes += [
            Lane("" if index else label, _marks(events, row, window, labels))
            for index, row in enumerate(rows or [[]])
        ]
    return lanes, left_out


def _by_start(events: Events, places: Tensor) -> Tensor:
    places = places.flip(0)  # of equal spans the inner one was reported first
    places = places[(-events.end_ns[places]).argsort(stable=True)]
    return places[events.start_ns[places].argsort(stable=True)]


def _rows(events: Events, places: Tensor, *, nested: bool) -> tuple[list[list[int]], int]:
    """Places of events row by row, spans below those they lie in, and how many are too deep."""
    rows: list[list[int]] = []
    busy: list[int] = []  # end of the last event of each row
    too_deep = 0
    starts, ends = events.start_ns[places].tolist(), events.end_ns[places].tolist()
    for place, start, end in zip(places.tolist(), starts, ends, strict=True):
        row = sum(until > start for until in busy) if nested else 0
        while not nested and row < len(busy) and busy[row] > start:
            row += 1
        if row >= (_MAX_DEPTH if nested else _MAX_BESIDE):
            too_deep += 1
            continue
        if row == len(rows):
            rows.append([])
            busy.append(end)
        rows[row].append(place)
        busy[row:] = [end] + [min(until, start) for until in busy[row + 1 :]]
    return rows, too_deep


def _marks(
    events: Events, places: Sequence[int], window: tuple[int, int], labels: dict[str, int]
) -> list[Mark]:
    first_ns, last_ns = window
    chosen = torch.tensor(places, dtype=torch.int64)
    columns = (events.kind, events.name, events.category, events.unit)
    starts = events.start_ns[chosen].clamp(min=first_ns)
    lengths = events.end_ns[chosen].clamp(max=last_ns) - starts
    marks = []
    for kind, name, category, unit, start, length in zip(
        *(column[chosen].tolist() for column in columns),
        (starts - first_ns).tolist(),
        lengths.tolist(),
        strict=True,
    ):
        texts = events.texts
        shown = printable(f"{texts[name]} {texts[unit]}" if unit else texts[name])
        part = _part(kind == _ASYNC, texts[category], texts[name])
        marks.append(Mark(part, labels.setdefault(shown, len(labels)), start, length))
    return marks


def _part(asynchronous: bool, category: str, name: str) -> str:
    if category == "comm":
        return "flight" if asynchronous else "blocked"
    if category == "io":
        return "checkpoint" if "checkpoint" in name else "data"
    if category == "compute":
        return "optimizer" if name == "optimizer" else "compute"
    return "step" if category == "step" else "other"
