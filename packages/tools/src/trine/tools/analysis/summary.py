"""What a run did with its time, per step and FSDP unit, over all ranks: `summarize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from trine.tools.analysis.breakdown import (
    PARTS,
    Breakdown,
    Look,
    RankBreakdown,
    break_down_looks,
    looks_at,
)
from trine.tools.analysis.dominant import Waits, dominant
from trine.tools.analysis.measured import Measured, measure
from trine.tools.analysis.unit_table import UnitTotals
from trine.tools.tracing.reader import RankTrace

__all__ = [
    "ClockSummary",
    "CollectiveSummary",
    "Parts",
    "RankSummary",
    "StepSummary",
    "Summary",
    "UnitSummary",
    "summarize",
    "summarize_looks",
]


@dataclass(frozen=True)
class Parts:
    """Where the time of a step went; see `Breakdown`. Means, in nanoseconds."""

    total_ns: float
    compute_ns: float
    exposed_ns: float
    wait_ns: float
    data_ns: float
    optimizer_ns: float
    checkpoint_ns: float
    other_ns: float
    hidden_ns: float


@dataclass(frozen=True)
class CollectiveSummary:
    """One kind of collective of one unit: per step, mean over ranks.

    Attributes:
        count: how many ran.
        time_ns: how long they were under way, summed: from when all ranks had come to the
            end; includes what computation hid.
        nbytes: bytes that a rank sent.
        exposed_ns: how long they blocked the training thread after all ranks had come.
        wait_ns: how long before.
        hidden_ns: how long they were under way while nothing blocked it.
    """

    count: float
    time_ns: float
    nbytes: float
    exposed_ns: float
    wait_ns: float
    hidden_ns: float


@dataclass(frozen=True)
class UnitSummary:
    """One FSDP unit, or `""` for communication that belongs to none.

    Attributes:
        unit: full name of the module.
        collectives: name of the collective to its numbers.
        exposed_ns: of all its collectives; per step, mean over ranks.
        exposed_ns_max: the same on the rank where it is greatest.
        exposed_share: mean exposed time as a part of the mean step, or None without steps.
        wait_ns: of all its collectives; per step, mean over ranks.
        hidden_ns: the same.
    """

    unit: str
    collectives: dict[str, CollectiveSummary]
    exposed_ns: float
    exposed_ns_max: float
    exposed_share: float | None
    wait_ns: float
    hidden_ns: float


@dataclass(frozen=True)
class StepSummary:
    """How long steps took.

    Attributes:
        count: steps per rank that count; the most of any rank.
        mean_ns: over all steps of all ranks.
        median_ns: the same.
        p95_ns: one step of 20 took longer.
        first_ns: the first step, mean over ranks.
        slowest_rank: the rank with the greatest mean.
        slowest_rank_mean_ns: its mean.
    """

    count: int
    mean_ns: float
    median_ns: float
    p95_ns: float
    first_ns: float
    slowest_rank: int
    slowest_rank_mean_ns: float


@dataclass(frozen=True)
class RankSummary:
    """One rank.

    Attributes:
        rank: the rank.
        steps: how many count.
        parts: where the time of a step went, mean over them.
        causes_wait_ns: how long another rank stood waiting for this one, the last to come,
            per step; mean over the other ranks.
        sent_nbytes: bytes that it sent, in the whole recording.
        events: how many its recording holds.
        dropped: how many did not fit.
        cut_off: whether the recording has no end: its process was killed, or still runs.
    """

    rank: int
    steps: int
    parts: Parts
    causes_wait_ns: float
    sent_nbytes: int
    events: int
    dropped: int
    cut_off: bool


@dataclass(frozen=True)
class ClockSummary:
    """How well times of different ranks compare.

    Attributes:
        note: one sentence.
        error_ns: aligned times are wrong by at most this; -1 if nobody knows.
    """

    note: str
    error_ns: int


@dataclass(frozen=True)
class Summary:
    """What a run did with its time.

    Attributes:
        ranks: those whose traces were read, in order.
        world_size: how many ranks the run had.
        dominant: what takes most of the time beside computing, in one sentence.
        steps: step times, or None if no step was recorded; numbers that are called
            "per step" are then those of the whole recording.
        parts: where the time of a step went, mean over all steps of all ranks.
        between: the same of the gaps between steps, per step.
        by_rank: the ranks one by one.
        sent_nbytes: bytes that each rank sent, in the order of `ranks`; whole recording,
            within steps or not.
        events: how many were read.
        dropped: events that did not fit into the recorders.
        units: in the order in which they first communicate.
        clock: how well times of different ranks compare.
        per_step: what two runs are compared by, with its spread over the steps.
    """

    ranks: list[int]
    world_size: int
    dominant: str
    steps: StepSummary | None
    parts: Parts
    between: Parts
    by_rank: list[RankSummary]
    sent_nbytes: list[int]
    events: int
    dropped: int
    units: list[UnitSummary]
    clock: ClockSummary
    per_step: Measured


def summarize(traces: Iterable[RankTrace]) -> Summary:
    """Sum up a run.

    Args:
        traces: at least one. Each is done with before the next is asked for, so they need
            not all be in memory.
    """
    return summarize_looks(sorted(looks_at(traces), key=lambda look: look.header.rank))


def summarize_looks(looks: Sequence[Look]) -> Summary:
    """Sum up what was kept of the recordings of a run, at least one."""
    run = break_down_looks(looks)
    with_steps = [rank for rank in run.ranks if rank.has_steps]
    # Where some ranks have steps, those that do not would only distort the means.
    counted = with_steps or run.ranks
    steps = _summarize_steps(with_steps)
    units = _summarize_units(counted, steps)
    by_rank = [
        _summarize_rank(look, own, counted) for look, own in zip(looks, run.ranks, strict=True)
    ]
    parts = _mean_parts([row for rank in counted for row in rank.steps])
    return Summary(
        ranks=[look.header.rank for look in looks],
        world_size=looks[0].header.world_size,
        dominant=dominant(
            parts,
            {
                (unit.unit, name): own.exposed_ns
                for unit in units
                for name, own in unit.collectives.items()
            },
            [Waits(rank.rank, rank.causes_wait_ns) for rank in by_rank],
        ),
        steps=steps,
        parts=parts,
        between=_mean_parts(
            [row for rank in counted for row in rank.between],
            sum(len(rank.steps) for rank in counted),
        ),
        by_rank=by_rank,
        sent_nbytes=[rank.sent_nbytes for rank in run.ranks],
        events=sum(look.events for look in looks),
        dropped=sum(look.dropped for look in looks),
        units=units,
        clock=ClockSummary(
            run.alignment.note,
            -1 if -1 in (errors := run.alignment.error_ns.values()) else max(errors),
        ),
        per_step=measure(looks[0].header.world_size, run.ranks),
    )


def _summarize_steps(ranks: Sequence[RankBreakdown]) -> StepSummary | None:
    if not ranks:
        return None
    every = sorted(step.total_ns for rank in ranks for step in rank.steps)
    means = {rank.rank: fmean(step.total_ns for step in rank.steps) for rank in ranks}
    slowest = max(means, key=lambda rank: means[rank])
    return StepSummary(
        count=max(len(rank.steps) for rank in ranks),
        mean_ns=fmean(every),
        median_ns=median(every),
        p95_ns=float(every[int(0.95 * (len(every) - 1))]),
        first_ns=fmean(rank.steps[0].total_ns for rank in ranks),
        slowest_rank=slowest,
        slowest_rank_mean_ns=means[slowest],
    )


def _summarize_rank(
    look: Look, own: RankBreakdown, counted: Sequence[RankBreakdown]
) -> RankSummary:
    others = [rank for rank in counted if rank.rank != own.rank]
    waits = [rank.waited_for_ns.get(own.rank, 0) / max(1, len(rank.steps)) for rank in others]
    return RankSummary(
        rank=own.rank,
        steps=len(own.steps) if own.has_steps else 0,
        parts=_mean_parts(own.steps),
        causes_wait_ns=fmean(waits) if waits else 0.0,
        sent_nbytes=own.sent_nbytes,
        events=look.events,
        dropped=look.dropped,
        cut_off=look.end is None,
    )


def _mean_parts(rows: Sequence[Breakdown], count: int | None = None) -> Parts:
    divisor = max(1, len(rows) if count is None else count)
    names = [f"{name}_ns" for name in ("total", *PARTS, "hidden")]
    return Parts(**{name: sum(getattr(row, name) for row in rows) / divisor for name in names})


def _summarize_units(
    ranks: Sequence[RankBreakdown], steps: StepSummary | None
) -> list[UnitSummary]:
    found: dict[str, dict[str, list[tuple[int, UnitTotals]]]] = {}
    for at, rank in enumerate(ranks):
        for own in rank.by_unit.totals():
            found.setdefault(own.unit, {}).setdefault(own.operation, []).append((at, own))
    divisors = [max(1, len(rank.steps)) for rank in ranks]
    return [_summarize_unit(unit, found[unit], divisors, steps) for unit in found]


def _summarize_unit(
    unit: str,
    operations: dict[str, list[tuple[int, UnitTotals]]],
    divisors: Sequence[int],
    steps: StepSummary | None,
) -> UnitSummary:
    def mean(rows: list[tuple[int, UnitTotals]], number: Callable[[UnitTotals], int]) -> float:
        return sum(number(own) / divisors[at] for at, own in rows) / len(divisors)

    exposed = [0.0] * len(divisors)
    for rows in operations.values():
        for at, own in rows:
            exposed[at] += own.exposed_ns / divisors[at]
    collectives = {
        name: CollectiveSummary(
            count=mean(rows, lambda own: own.count),
            time_ns=mean(rows, lambda own: own.in_flight_ns),
            nbytes=mean(rows, lambda own: own.nbytes),
            exposed_ns=mean(rows, lambda own: own.exposed_ns),
            wait_ns=mean(rows, lambda own: own.wait_ns),
            hidden_ns=mean(rows, lambda own: own.hidden_ns),
        )
        for name, rows in operations.items()
    }
    return UnitSummary(
        unit=unit,
        collectives=collectives,
        exposed_ns=fmean(exposed),
        exposed_ns_max=max(exposed),
        exposed_share=fmean(exposed) / steps.mean_ns if steps and steps.mean_ns else None,
        wait_ns=sum(own.wait_ns for own in collectives.values()),
        hidden_ns=sum(own.hidden_ns for own in collectives.values()),
    )
