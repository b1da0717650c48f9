"""Spread a rank's events over lanes in which viewers can draw them.

Slices of one lane must be nested or apart; the formats have no way to say anything else,
and viewers drop what overlaps. The first lane is the thread that trains; other threads
follow, then one lane per kind of asynchronous work, or several where such work overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.tracing.events import Events

__all__ = ["Lane", "lanes_of"]

_FIRST_ASYNC: Final = ("all_gather", "reduce_scatter")
_PART: Final = 1 << 16  # events turned into Python integers at a time


@dataclass(frozen=True, eq=False)
class Lane:
    """One row of a timeline.

    Attributes:
        label: what is written beside it.
        places: of its events in the recording; by start, the longest first; int64.
    """

    label: str
    places: Tensor


def lanes_of(events: Events) -> list[Lane]:
    """The lanes of one rank, in the order in which they are to be drawn; counters have none."""
    lanes: list[Lane] = []
    for index, places in enumerate(_by_thread(events)):
        label = f"thread {index + 1}" if index else "main"
        lanes += _numbered(label, events, places, nested=True)
    for label, places in _by_async_name(events):
        lanes += _numbered(label, events, places, nested=False)
    return lanes


def _by_thread(events: Events) -> list[Tensor]:
    """Spans and instants by the thread that reported them, the one that trains first."""
    drawn = events.is_kind("span") | events.is_kind("instant")
    steps = events.is_category("step")
    found: list[tuple[bool, int, Tensor]] = []
    for thread in range(len(events.threads)):
        places = (drawn & (events.thread == thread)).nonzero().flatten()
        if places.numel():
            # Of equal spans the inner one was reported first.
            places = _by_start(events, places.flip(0))
            trains = bool(steps[places].any())
            found.append((not trains, int(events.start_ns[places[0]]), places))
    return [places for _, _, places in sorted(found, key=lambda own: own[:2])]


def _by_async_name(events: Events) -> Iterator[tuple[str, Tensor]]:
    asyncs = events.is_kind("async")
    # A name's first event decides where it stands, after those that one looks for.
    names = dict.fromkeys(events.place(name) for name in _FIRST_ASYNC)
    present, inverse = torch.unique(events.name[asyncs], return_inverse=True)
    first = torch.full((present.numel(),), len(events)).scatter_reduce(
        0, inverse, torch.arange(inverse.numel()), "amin"
    )
    names |= dict.fromkeys(present[first.argsort()].tolist())
    for name in names:
        places = (asyncs & (events.name == name)).nonzero().flatten()
        if places.numel():
            yield events.texts[name], _by_start(events, places)


def _by_start(events: Events, places: Tensor) -> Tensor:
    places = places[(-events.end_ns[places]).argsort(stable=True)]
    return places[events.start_ns[places].argsort(stable=True)]


def _numbered(label: str, events: Events, places: Tensor, *, nested: bool) -> Iterator[Lane]:
    starts, ends = events.start_ns[places], events.end_ns[places]
    if not nested and bool((starts[1:] >= ends[:-1]).all()):
        yield Lane(label, places)
        return
    lane = _spread(starts, ends, nested=nested)
    for index in range(int(lane.max()) + 1):
        yield Lane(f"{label} ({index + 1})" if index else label, places[lane == index])


def _spread(starts: Tensor, ends: Tensor, *, nested: bool) -> Tensor:
    """The number of the lane of each event, as few as it takes.

    Args:
        starts: in rising order; where they are equal, the longest event first.
        ends: of the same events.
        nested: whether one may lie within another, as calls do.
    """
    chosen: list[int] = []
    open_ends: list[list[int]] = [[]]  # per lane, ends of what is open, innermost last
    for first in range(0, starts.numel(), _PART):
        part = slice(first, first + _PART)
        for start, end in zip(starts[part].tolist(), ends[part].tolist(), strict=True):
            for index, open_ in enumerate(open_ends):
                while open_ and open_[-1] <= start:
                    open_.pop()
                if not open_ or (nested and end <= open_[-1]):
                    chosen.append(index)
                    break
            else:
                chosen.append(len(open_ends))
                open_ends.append(open_ := [])
            open_.append(end)
    return torch.tensor(chosen, dtype=torch.int64)
