"""The events of all ranks with times that can be drawn on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trine.tools.tracing.clock import Alignment
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["aligned_events", "clock_words"]

_WORDS = {
    "same": "",
    "readings": "clock aligned by readings",
    "collectives": "clock aligned by collectives",
    "wall": "clock aligned by wall clock",
}


def aligned_events(
    traces: Sequence[RankTrace], alignment: Alignment, first_ns: int = 0
) -> Iterator[tuple[RankTrace, Events]]:
    """Each rank's trace and its events, with times moved, one rank at a time.

    Args:
        traces: of a run.
        alignment: of their clocks.
        first_ns: when the earliest event of all ranks is to start.
    """
    starts = [
        int(alignment.to_common(trace.header.rank, trace.events.start_ns).min())
        for trace in traces
        if len(trace.events)
    ]
    shift_ns = first_ns - min(starts, default=0)
    for trace in traces:
        rank, events = trace.header.rank, trace.events
        yield (
            trace,
            replace(
                events,
                start_ns=alignment.to_common(rank, events.start_ns) + shift_ns,
                end_ns=alignment.to_common(rank, events.end_ns) + shift_ns,
                enqueue_ns=alignment.to_common(rank, events.enqueue_ns) + shift_ns,
            ),
        )


def clock_words(alignment: Alignment, rank: int) -> str:
    """How the clock of a rank was aligned; "" for one that needed no aligning."""
    return _WORDS[alignment.by_rank[rank].how]
