"""Hand-made recordings of a training loop whose parts take as long as one likes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.tools.events import event, step, write_rank_file
from tests.tools.jobs import done, left
from trine.core.tracing import TraceEvent
from trine.tools.tracing import RankTrace

Times = Callable[[int], int]
"""How long something takes in a step, in us."""


def train(
    *,
    world_size: int = 2,
    steps: int = 10,
    load: Times = lambda step: 100,
    compute: Times = lambda step: 400,
    move: Times = lambda step: 50,
    nbytes: int = 1_000,
    units: tuple[str, ...] = ("layer",),
) -> list[list[TraceEvent]]:
    """Per rank its events: load, compute, and an exposed all-gather of each unit, in each step."""
    events: list[TraceEvent] = []
    at, number = 0, 0
    for index in range(steps):
        start, at = at, at + load(index)
        events.append(event("load batch", start, at, category="io", step=index))
        events.append(event("forward", at, at + compute(index), category="compute", step=index))
        at += compute(index)
        for unit in units:
            number += 1
            made = done(number, at, at + move(index), unit=unit, step=index)
            made[-1].nbytes = nbytes
            events += made
            at += move(index)
        events.append(step(start, at, index))
    return [events] * world_size


def recorded(events: list[list[TraceEvent]]) -> list[RankTrace]:
    """The recordings of the ranks, as reading their files gives them."""
    return [left(rank, len(events), *own, end="closed") for rank, own in enumerate(events)]


def write_run(folder: Path, events: list[list[TraceEvent]]) -> Path:
    """The folder with the files of the ranks."""
    for rank, own in enumerate(events):
        write_rank_file(folder, *own, rank=rank, world_size=len(events))
    return folder
