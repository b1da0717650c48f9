"""Hand-made recordings of jobs: what each rank began, waited for and was through with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.tools.events import US, event, rank_trace
from trine.core.tracing import TraceEvent
from trine.tools.tracing import RankTrace
from trine.tools.tracing.schema import End, Reason


def begin(
    number: int,
    at_us: int,
    *,
    op: str = "all_gather",
    unit: str = "layer",
    group: str = "0",
    elements: int = 72,
    dtype: str = "float32",
    step: int = 0,
    ranks: Sequence[int] | None = None,
) -> TraceEvent:
    """A rank starts a collective."""
    args: dict[str, object] = {"group": group, "seq": number, "op": op, "dtype": dtype}
    args["elements"] = elements
    if ranks is not None:
        args["ranks"] = list(ranks)
    return event(
        f"start {op}", at_us, kind="instant", category="comm", unit=unit, args=args, step=step
    )


def through(
    number: int,
    enqueue_us: int,
    end_us: int,
    *,
    op: str = "all_gather",
    unit: str = "layer",
    group: str = "0",
    nbytes: int = 288,
    dtype: str = "float32",
    step: int = 0,
) -> TraceEvent:
    """A collective is through on a rank."""
    args = {"group": group, "seq": number, "op": op, "dtype": dtype, "enqueue_ns": enqueue_us * US}
    return event(
        op,
        enqueue_us,
        end_us,
        kind="async",
        category="comm",
        unit=unit,
        nbytes=nbytes,
        args=args,
        step=step,
    )


def wait(
    number: int,
    start_us: int,
    end_us: int,
    *,
    op: str = "all_gather",
    unit: str = "layer",
    group: str = "0",
    step: int = 0,
) -> TraceEvent:
    """The training thread waits for a collective."""
    args = {"group": group, "seq": number, "op": op}
    return event(f"wait {op}", start_us, end_us, category="comm", unit=unit, args=args, step=step)


def done(
    number: int,
    at_us: int,
    end_us: int,
    *,
    op: str = "all_gather",
    unit: str = "layer",
    group: str = "0",
    nbytes: int = 288,
    step: int = 0,
) -> list[TraceEvent]:
    """A collective that a rank started, waited for and was through with."""
    return [
        begin(number, at_us, op=op, unit=unit, group=group, step=step),
        wait(number, at_us, end_us, op=op, unit=unit, group=group, step=step),
        through(number, at_us, end_us, op=op, unit=unit, group=group, nbytes=nbytes, step=step),
    ]


def left(
    rank: int, world_size: int, *events: TraceEvent, end: Reason | None = None, dropped: int = 0
) -> RankTrace:
    """What a rank left: a file without an end, unless it says how it ended."""
    trace = rank_trace(*events, rank=rank, world_size=world_size, dropped=dropped)
    return trace if end is None else replace(trace, end=End(len(events), dropped, end))
