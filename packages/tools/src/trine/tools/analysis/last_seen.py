"""What a rank did last, as far as its file tells: for a rank that others wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from trine.core.tracing import TraceEvent
from trine.tools.tracing.reader import RankTrace

__all__ = ["LastCall", "LastSeen", "LastSpan", "last_seen"]


@dataclass(frozen=True)
class LastSpan:
    """The last thing that a rank finished, other than a collective or a step.

    Attributes:
        name: what it was.
        category: of the event.
        unit: full name of the sharded module it belonged to, "" for none.
        ended_ns: when, by rank 0's clock.
    """

    name: str
    category: str
    unit: str
    ended_ns: int


@dataclass(frozen=True)
class LastCall:
    """The last collective that a rank began.

    Attributes:
        group: of which group.
        number: which of the group's collectives.
        operation: what it was.
        unit: full name of the sharded module it was for, "" for none.
        through: whether it ended.
    """

    group: str
    number: int
    operation: str
    unit: str
    through: bool


@dataclass(frozen=True)
class LastSeen:
    """What a rank did last.

    Attributes:
        rank: the rank.
        host: its machine.
        file: how its recording ended; "cut off" if the process was killed, or still runs.
        at_ns: when its last event ended, by rank 0's clock; -1 if it has none.
        step: number of the step that event was in, -1 for none.
        span: the last span that it finished.
        call: the last collective that it began.
    """

    rank: int
    host: str
    file: Literal["closed", "signal", "exit", "cut off"]
    at_ns: int
    step: int
    span: LastSpan | None
    call: LastCall | None


def last_seen(trace: RankTrace, offset_ns: int) -> LastSeen:
    """What the rank did last.

    Args:
        trace: its recording.
        offset_ns: what is added to its times to get rank 0's.
    """
    events = trace.events
    last = int(events.end_ns.argmax()) if len(events) else -1
    comm = events.is_category("comm")
    # A step says only that it ended; what was in it says where.
    own = (events.is_kind("span") & ~comm & ~events.is_category("step")).nonzero().flatten()
    span = events[_latest(own, events.end_ns)] if own.numel() else None
    calls = (comm & (events.sequence >= 0)).nonzero().flatten()
    return LastSeen(
        rank=trace.header.rank,
        host=trace.header.host,
        file=trace.end.reason if trace.end else "cut off",
        at_ns=int(events.end_ns[last]) + offset_ns if last >= 0 else -1,
        step=int(events.step[last]) if last >= 0 else -1,
        span=_span(span, offset_ns) if span else None,
        call=_last_call(trace, calls) if calls.numel() else None,
    )


def _latest(places: Tensor, times: Tensor) -> int:
    return int(places[times[places].argmax()])


def _span(event: TraceEvent, offset_ns: int) -> LastSpan:
    return LastSpan(event.name, event.category, event.unit, event.end_ns + offset_ns)


def _last_call(trace: RankTrace, calls: Tensor) -> LastCall:
    events = trace.events
    begun = _latest(calls, events.enqueue_ns)
    same = (events.group == events.group[begun]) & (events.sequence == events.sequence[begun])
    texts = events.texts
    return LastCall(
        group=texts[int(events.group[begun])],
        number=int(events.sequence[begun]),
        operation=texts[int(events.operation[begun])],
        unit=texts[int(events.unit[begun])],
        through=bool((same & events.is_kind("async")).any()),
    )
