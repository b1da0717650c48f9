"""Which thread trains, and when its steps begin and end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trine.tools.analysis.intervals import outermost
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["Step", "steps_of", "training_thread"]


@dataclass(frozen=True)
class Step:
    """One training step of one rank.

    Attributes:
        number: as the program numbered it, or in order if it did not; -1 for a recording
            without steps.
        start_ns: by the rank's own clock.
        end_ns: the same.
    """

    number: int
    start_ns: int
    end_ns: int


def training_thread(events: Events) -> int:
    """Place in `events.threads` of the thread that trains, -1 if there are no events.

    It is the one that reported the steps, else the one that reported most.
    """
    steps = events.is_category("step") & events.is_kind("span")
    threads = events.thread[steps] if bool(steps.any()) else events.thread
    return int(threads.bincount().argmax()) if threads.numel() else -1


def steps_of(trace: RankTrace) -> list[Step]:
    """The steps of a rank in order, which do not overlap.

    A step within a step is a part of it. Where events were dropped, the first step that is
    left may have lost some of its own, and is left out. A rank of which no whole step is
    there has one, which is its whole recording; one that recorded nothing has none.
    """
    events = trace.events
    if not len(events):
        return []
    places = _step_spans(events)
    first = 1 if trace.dropped else 0
    if places.numel() <= first:
        return [Step(-1, int(events.enqueue_ns.min()), int(events.end_ns.max()))]
    starts, ends = events.start_ns[places], events.end_ns[places]
    if bool((starts[1:] < ends[:-1]).any()):  # no program does that; a file may say it
        starts = torch.cat([starts[:1], torch.maximum(starts[1:], ends[:-1])])
    numbers = events.step[places]
    if bool((numbers[1:] <= numbers[:-1]).any()) or int(numbers[0]) < 0:
        numbers = torch.arange(places.numel())
    rows = zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [Step(*row) for row in rows][first:]


def _step_spans(events: Events) -> Tensor:
    """Places of the outermost steps of the training thread, in the order of time."""
    steps = events.is_category("step") & events.is_kind("span")
    places = (steps & (events.thread == training_thread(events))).nonzero().flatten()
    return places[outermost(events.start_ns[places], events.end_ns[places])]
