"""Time, bytes and exposed time per FSDP unit and collective.

What is counted: collectives, which are asynchronous events of the category "comm"; those
that start within a step of their rank, where steps were recorded, and all where none were.
Spans of that category on the training thread are waits for those collectives, whose
exposed time says the same. The first step counts like every other; its
time is reported beside the mean, because it warms up. Where a recorder dropped events,
the first step of that rank that is left is incomplete and does not count.

*Exposed* is the time for which the training thread was blocked by a collective: what
overlap with computation did not hide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from trine.core.tracing import TraceEvent
from trine.tools.tracing.reader import RankTrace

__all__ = ["CollectiveSummary", "StepSummary", "Summary", "UnitSummary", "summarize"]


@dataclass(frozen=True)
class CollectiveSummary:
    """One kind of collective of one unit: per step, mean over ranks.

    Attributes:
        count: how many ran.
        time_ns: from enqueueing to completion, summed; includes what computation hid.
        nbytes: bytes that a rank sent.
        exposed_ns: how long the training thread was blocked.
    """

    count: float
    time_ns: float
    nbytes: float
    exposed_ns: float


@dataclass(frozen=True)
class UnitSummary:
    """One FSDP unit, or `""` for communication that belongs to none.

    Attributes:
        unit: full name of the module.
        collectives: name of the collective to its numbers.
        exposed_ns: of all its collectives; per step, mean over ranks.
        exposed_ns_max: the same on the rank where it is greatest.
        exposed_share: mean exposed time as a part of the mean step, or None without steps.
    """

    unit: str
    collectives: dict[str, CollectiveSummary]
    exposed_ns: float
    exposed_ns_max: float
    exposed_share: float | None


@dataclass(frozen=True)
class StepSummary:
    """How long steps took.

    Attributes:
        count: steps per rank that count; the most of any rank.
        mean_ns: over all steps of all ranks.
        median_ns: the same.
        first_ns: the first step, mean over ranks.
        slowest_rank: the rank with the greatest mean.
        slowest_rank_mean_ns: its mean.
    """

    count: int
    mean_ns: float
    median_ns: float
    first_ns: float
    slowest_rank: int
    slowest_rank_mean_ns: float


@dataclass(frozen=True)
class Summary:
    """What a run's traces say about its communication.

    Attributes:
        ranks: those whose traces were read.
        world_size: how many ranks the run had.
        steps: step times, or None if no step was recorded; numbers that are called
            "per step" are then those of the whole recording.
        sent_nbytes: bytes that each rank sent, in the order of `ranks`; whole recording,
            within steps or not.
        dropped: events that did not fit into the recorders.
        units: in the order in which they first communicate.
    """

    ranks: list[int]
    world_size: int
    steps: StepSummary | None
    sent_nbytes: list[int]
    dropped: int
    units: list[UnitSummary]


@dataclass
class _Totals:
    count: int = 0
    time_ns: int = 0
    nbytes: int = 0
    exposed_ns: int = 0


@dataclass
class _RankTotals:
    rank: int
    steps_ns: list[int]
    cells: dict[tuple[str, str], _Totals] = field(default_factory=dict)

    @property
    def divisor(self) -> int:
        return len(self.steps_ns) or 1


def summarize(traces: Sequence[RankTrace]) -> Summary:
    """Sum up the communication of a run.

    Args:
        traces: at least one, as `read_traces` returns them.
    """
    totals = [_total(trace) for trace in traces]
    steps = _summarize_steps([own for own in totals if own.steps_ns])
    names: dict[str, dict[str, None]] = {}  # unit to its collectives, both in order
    for own in totals:
        for unit, name in own.cells:
            names.setdefault(unit, {})[name] = None
    return Summary(
        ranks=[trace.header.rank for trace in traces],
        world_size=traces[0].header.world_size,
        steps=steps,
        sent_nbytes=[sum(event.nbytes for event in _collectives(trace.events)) for trace in traces],
        dropped=sum(trace.dropped for trace in traces),
        units=[_summarize_unit(unit, names[unit], totals, steps) for unit in names],
    )


def _total(trace: RankTrace) -> _RankTotals:
    steps = _counted_steps(trace)
    starts = [start for start, _ in steps]
    totals = _RankTotals(trace.header.rank, [end - start for start, end in steps])
    # By start, not as reported: an early gather may end after a later one.
    for event in sorted(_collectives(trace.events), key=lambda event: event.start_ns):
        if steps:
            index = bisect_right(starts, event.start_ns) - 1
            if index < 0 or event.start_ns >= steps[index][1]:
                continue
        cell = totals.cells.setdefault((event.unit, event.name), _Totals())
        cell.count += 1
        cell.time_ns += event.end_ns - event.start_ns
        cell.nbytes += event.nbytes
        exposed_ns = (event.args or {}).get("exposed_ns")
        if isinstance(exposed_ns, int) and exposed_ns > 0:
            cell.exposed_ns += exposed_ns
    return totals


def _counted_steps(trace: RankTrace) -> list[tuple[int, int]]:
    """Start and end of each step that counts; outermost ones, in order."""
    spans = sorted(
        (event.start_ns, event.end_ns)
        for event in trace.events
        if event.kind == "span" and event.category == "step"
    )
    steps: list[tuple[int, int]] = []
    for start, end in spans:
        if not steps or start >= steps[-1][1]:
            steps.append((start, end))
    return steps[1:] if trace.dropped else steps


def _collectives(events: Iterable[TraceEvent]) -> Iterable[TraceEvent]:
    return (event for event in events if event.category == "comm" and event.kind == "async")


def _summarize_steps(ranks: Sequence[_RankTotals]) -> StepSummary | None:
    if not ranks:
        return None
    every = [step for own in ranks for step in own.steps_ns]
    slowest = max(ranks, key=lambda own: fmean(own.steps_ns))
    return StepSummary(
        count=max(len(own.steps_ns) for own in ranks),
        mean_ns=fmean(every),
        median_ns=median(every),
        first_ns=fmean(own.steps_ns[0] for own in ranks),
        slowest_rank=slowest.rank,
        slowest_rank_mean_ns=fmean(slowest.steps_ns),
    )


def _summarize_unit(
    unit: str, names: Iterable[str], totals: Sequence[_RankTotals], steps: StepSummary | None
) -> UnitSummary:
    def mean(name: str, number: Callable[[_Totals], int]) -> float:
        return fmean(number(own.cells.get((unit, name), _Totals())) / own.divisor for own in totals)

    exposed = [
        sum(cell.exposed_ns for (owner, _), cell in own.cells.items() if owner == unit)
        / own.divisor
        for own in totals
    ]
    return UnitSummary(
        unit=unit,
        collectives={
            name: CollectiveSummary(
                count=mean(name, lambda cell: cell.count),
                time_ns=mean(name, lambda cell: cell.time_ns),
                nbytes=mean(name, lambda cell: cell.nbytes),
                exposed_ns=mean(name, lambda cell: cell.exposed_ns),
            )
            for name in names
        },
        exposed_ns=fmean(exposed),
        exposed_ns_max=max(exposed),
        exposed_share=fmean(exposed) / steps.mean_ns if steps and steps.mean_ns else None,
    )
