"""Put what torch.profiler saw of a rank beside what the rank's own recording says."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from trine.core.tracing import TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.sources.kineto import SEAM, give_step_numbers
from trine.tools.text import format_ranks
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["join_profiler"]

_NEAR_NS: Final = 1_000_000  # the wall clock may have been set in between, but not by much


def join_profiler(own: Sequence[RankTrace], profiled: Sequence[RankTrace]) -> list[RankTrace]:
    """One recording of each rank with the events of both.

    The times of torch.profiler are those of the wall clock. They become times of the
    recording's clock by the readings of both in its header, and more precisely by the spans
    of the tracing seam that both have seen. Those are kept once, as the recording has them,
    and so are steps and collectives, if it has any.

    Args:
        own: recordings, which `trine.tools.sources.read` has read.
        profiled: traces of torch.profiler, read by it too. Ranks may be missing.

    Raises:
        TraceFileError: if a rank was profiled of which there is no recording, or the two are
            of different worlds.
    """
    by_rank = {trace.header.rank: trace for trace in profiled}
    missing = by_rank.keys() - {trace.header.rank for trace in own}
    if missing:
        raise TraceFileError(
            f"torch.profiler's traces are of {format_ranks(by_rank)}, and there is no recording "
            f"of {format_ranks(missing)}. Give the files of one run."
        )
    worlds = {trace.header.world_size for trace in (*own, *profiled)}
    if len(worlds) > 1:
        raise TraceFileError(
            f"The recordings are of {own[0].header.world_size} ranks and torch.profiler's traces "
            f"of {profiled[0].header.world_size}. Give the files of one run."
        )
    return [
        _join(trace, by_rank[trace.header.rank]) if trace.header.rank in by_rank else trace
        for trace in own
    ]


def _join(own: RankTrace, profiled: RankTrace) -> RankTrace:
    kept = list(own.events)
    added = list(profiled.events)
    wall_ns = own.header.perf_counter_ns - own.header.unix_ns
    wall_ns += profiled.header.unix_ns - profiled.header.perf_counter_ns
    pairs = _same_spans(kept, added, wall_ns)
    offset_ns = wall_ns
    if pairs:
        offset_ns = round(median(mine.start_ns - theirs.start_ns for mine, theirs in pairs))
    threads = {theirs.thread: mine.thread for mine, theirs in pairs}
    categories = {event.category for event in kept} & {"step", "comm"}
    added = [
        event
        for event in added
        if SEAM not in (event.args or ())
        and event.category not in categories
        and event.start_ns + offset_ns >= 0
    ]
    for event in added:
        event.start_ns += offset_ns
        event.end_ns += offset_ns
        if event.kind != "async":
            event.thread = threads.get(event.thread, event.thread)
    steps = [event for event in kept if event.category == "step"]
    if steps:
        give_step_numbers(added, sorted(steps, key=lambda step: step.start_ns))
    events = sorted((*kept, *added), key=lambda event: (event.end_ns, -event.start_ns))
    header = replace(own.header, environment={**own.header.environment, "joined": "torch.profiler"})
    end = own.end and replace(own.end, events=len(events))
    return RankTrace(header, Events.of(events), own.dropped, own.readings, end)


def _same_spans(
    own: Sequence[TraceEvent], profiled: Sequence[TraceEvent], offset_ns: int
) -> list[tuple[TraceEvent, TraceEvent]]:
    """Spans that both have seen: with the same name, and about the same time."""
    by_label: dict[str, list[TraceEvent]] = {}
    for event in sorted(own, key=lambda event: event.start_ns):
        if event.kind == "span":
            label = f"{event.name} {event.unit}" if event.unit else event.name
            by_label.setdefault(label, []).append(event)
    pairs = []
    for event in profiled:
        same = by_label.get(str((event.args or {}).get(SEAM)), [])
        at_ns = event.start_ns + offset_ns
        after = bisect_left(same, at_ns, key=lambda each: each.start_ns)
        near = same[max(0, after - 1) : after + 1]
        if near:
            mine = min(near, key=lambda each: abs(each.start_ns - at_ns))
            if abs(mine.start_ns - at_ns) <= _NEAR_NS:
                pairs.append((mine, event))
    return pairs
