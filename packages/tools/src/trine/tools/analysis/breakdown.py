"""Where the time of steps went: see docs/explanation/exposed-communication.md.

In two passes, because whether a rank waited for others is known once all are read, and all
do not fit into memory. `look_at` keeps of a recording what it takes; `break_down_looks` then
divides the time of every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trine.tools.analysis.blocked import Blocked, blocked_pieces
from trine.tools.analysis.collectives import Collectives, on_one_axis
from trine.tools.analysis.flights import Flights, flights
from trine.tools.analysis.intervals import Cover
from trine.tools.analysis.steps import Step, steps_of, training_thread
from trine.tools.analysis.unit_table import Labels, UnitTable
from trine.tools.tracing.clock import Alignment, align_clocks
from trine.tools.tracing.events import Events
from trine.tools.tracing.matching import Calls, calls_of, match
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.schema import ClockReading, End, Header

__all__ = [
    "PARTS",
    "Breakdown",
    "Look",
    "RankBreakdown",
    "RunBreakdown",
    "break_down",
    "break_down_looks",
    "look_at",
    "looks_at",
]

PARTS = ("compute", "exposed", "wait", "data", "optimizer", "checkpoint", "other")
"""What the time of a step is divided into, with nothing left and nothing counted twice."""


@dataclass(frozen=True)
class Breakdown:
    """Where the time of one step of one rank went, in nanoseconds.

    `hidden_ns` lies beside the others, which sum to `total_ns`.

    Attributes:
        rank: the rank.
        step: number of the step; -1 for a recording without steps.
        total_ns: how long it took.
        compute_ns: forward and backward.
        exposed_ns: blocked by communication to which all ranks had come.
        wait_ns: blocked by communication to which some rank had not come.
        data_ns: loading batches.
        optimizer_ns: the optimizer.
        checkpoint_ns: checkpoints.
        other_ns: what no span accounts for.
        hidden_ns: communication was under way, and the training thread was not blocked.
    """

    rank: int
    step: int
    total_ns: int
    compute_ns: int
    exposed_ns: int
    wait_ns: int
    data_ns: int
    optimizer_ns: int
    checkpoint_ns: int
    other_ns: int
    hidden_ns: int


@dataclass(frozen=True, eq=False)
class RankBreakdown:
    """Where the time of one rank went.

    Attributes:
        rank: the rank.
        has_steps: whether it recorded steps; if not, `steps` is its whole recording.
        steps: in order.
        between: the gaps between them, each under the number of the step before it.
        by_unit: communication within steps, by unit and operation.
        waited_for_ns: by rank how long this one was blocked until that one came, as the
            last; within steps.
        sent_nbytes: bytes that it sent, within steps or not.
    """

    rank: int
    has_steps: bool
    steps: list[Breakdown]
    between: list[Breakdown]
    by_unit: UnitTable
    waited_for_ns: dict[int, int]
    sent_nbytes: int


@dataclass(frozen=True, eq=False)
class RunBreakdown:
    """Where the time of a run went.

    Attributes:
        alignment: how times of ranks were compared.
        ranks: in the order of ranks.
    """

    alignment: Alignment
    ranks: list[RankBreakdown]


@dataclass(frozen=True, eq=False)
class Look:
    """What is kept of one rank's recording until all are read.

    Attributes:
        header: of the recording.
        readings: of its clock.
        end: how it ended; None if it was cut off.
        dropped: how many events did not fit.
        events: how many it holds.
        steps: of the rank.
        windows: where each step and each gap begins, in turns, and where the last ends.
        calls: its collectives.
        blocked: when communication blocked the training thread.
        flights: when communication was under way.
        parts_ns: by part, what does not depend on other ranks; one number per window.
    """

    header: Header
    readings: tuple[ClockReading, ...]
    end: End | None
    dropped: int
    events: int
    steps: list[Step]
    windows: Tensor
    calls: Calls
    blocked: Blocked
    flights: Flights
    parts_ns: dict[str, Tensor]


def break_down(traces: Iterable[RankTrace]) -> RunBreakdown:
    """Divide the time of every step of every rank.

    Args:
        traces: the recordings of a run, in the order of ranks. Each is done with before the
            next is asked for, so they need not all be in memory.
    """
    return break_down_looks(looks_at(traces))


def break_down_looks(every: Sequence[Look]) -> RunBreakdown:
    """The same from what was kept of the recordings."""
    matched = match([look.calls for look in every])
    alignment = align_clocks(
        [look.header for look in every],
        {look.header.rank: look.readings for look in every},
        matched,
    )
    axis = on_one_axis(matched, alignment)
    return RunBreakdown(alignment, [_rank_breakdown(look, axis) for look in every])


def looks_at(traces: Iterable[RankTrace]) -> list[Look]:
    """Keep of each recording what `break_down_looks` needs, and let go of it."""
    looks: list[Look] = []
    for trace in traces:
        looks.append(look_at(trace))
        del trace  # before the next one is read
    return looks


def look_at(trace: RankTrace) -> Look:
    """Keep of a recording what `break_down_looks` needs."""
    events = trace.events
    steps = steps_of(trace)
    edges = [edge for step in steps for edge in (step.start_ns, step.end_ns)]
    windows = torch.tensor(edges, dtype=torch.int64)
    calls, rows = calls_of(trace.header.rank, events)
    labels = Labels(events)
    spans = events.is_kind("span") & (events.thread == training_thread(events))
    comm = (spans & events.is_category("comm")).nonzero().flatten()
    return Look(
        trace.header,
        trace.readings,
        trace.end,
        trace.dropped,
        len(events),
        steps,
        windows,
        calls,
        blocked_pieces(events, comm, windows, rows, labels),
        flights(events, windows, rows, labels),
        _own_parts(events, spans, comm, windows),
    )


def _own_parts(events: Events, spans: Tensor, comm: Tensor, windows: Tensor) -> dict[str, Tensor]:
    """What does not depend on other ranks, in each window.

    What is more special comes first and takes its time from what follows. So the parts
    cannot overlap, however spans lie within each other, and sum to the whole exactly.
    """
    starts, ends = windows[:-1], windows[1:]
    io, compute = spans & events.is_category("io"), spans & events.is_category("compute")
    checkpoint = _named(events, "checkpoint")[events.name.long()]
    optimizer = _named(events, "optimizer")[events.name.long()]
    cover = Cover.of(events.start_ns[comm], events.end_ns[comm])
    before = cover.within(starts, ends)
    parts: dict[str, Tensor] = {}
    for name, mask in (
        ("checkpoint", io & checkpoint),
        ("data", io & ~checkpoint),
        ("optimizer", compute & optimizer),
        ("compute", compute & ~optimizer),
    ):
        cover = Cover.of(
            torch.cat([cover.starts_ns, events.start_ns[mask]]),
            torch.cat([cover.ends_ns, events.end_ns[mask]]),
        )
        covered = cover.within(starts, ends)
        parts[name] = covered - before
        before = covered
    parts["total"] = ends - starts
    parts["other"] = parts["total"] - before
    return parts


def _named(events: Events, beginning: str) -> Tensor:
    """A mask over the table of texts: which begin like that."""
    return torch.tensor([text.startswith(beginning) for text in events.texts], dtype=torch.bool)


def _rank_breakdown(look: Look, axis: Collectives) -> RankBreakdown:
    rank = look.header.rank
    count = max(0, look.windows.numel() - 1)
    split = look.blocked.split(rank, axis, count)
    flown = look.flights.fly(rank, axis, look.blocked.cover, look.windows)
    parts = {
        **look.parts_ns,
        "exposed": split.exposed_ns,
        "wait": split.wait_ns,
        "hidden": flown.hidden_ns,
    }
    columns = zip(*(parts[name].tolist() for name in ("total", *PARTS, "hidden")), strict=True)
    numbers = [step.number for step in look.steps for _ in range(2)]
    rows = [
        Breakdown(rank, number, *values) for number, values in zip(numbers, columns, strict=False)
    ]
    return RankBreakdown(
        rank=rank,
        has_steps=any(step.number >= 0 for step in look.steps),
        steps=rows[::2],
        between=rows[1::2],
        by_unit=UnitTable.of(flown.cells, split.cells),
        waited_for_ns=split.waited_for_ns,
        sent_nbytes=look.flights.sent_nbytes,
    )
