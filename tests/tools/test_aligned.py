"""Times of all ranks on one axis, as timelines draw them."""

from __future__ import annotations

from dataclasses import replace

from tests.tools.events import US, event, rank_trace
from trine.tools.tracing import ClockReading, RankTrace
from trine.tools.tracing.aligned import aligned_events, clock_words
from trine.tools.tracing.clock import align


def starts_us(*traces: RankTrace, first_ns: int = 0) -> list[list[float]]:
    each = aligned_events(traces, align(traces), first_ns)
    return [[start / US for start in events.start_ns.tolist()] for _, events in each]


def test_the_earliest_event_of_all_ranks_starts_at_the_time_that_is_asked_for() -> None:
    rank_0 = rank_trace(event("x", 70, 80), rank=0, world_size=2)
    rank_1 = rank_trace(event("x", 50, 60), event("y", 65), rank=1, world_size=2)

    assert starts_us(rank_0, rank_1, first_ns=1_000) == [[21.0], [1.0, 16.0]]


def test_a_clock_that_runs_slowly_is_stretched() -> None:
    # Rank 1's clock loses 100 us in each second.
    rank_0 = rank_trace(event("x", 0), event("y", 1_000_000), rank=0, world_size=2)
    rank_1 = replace(
        rank_trace(
            *(event("x", at) for at in (0, 500_000, 1_000_000)),
            rank=1,
            world_size=2,
            clock="clock of host-b",
        ),
        readings=(ClockReading(0, 0, 1_000), ClockReading(1_000_000 * US, 100 * US, 1_000)),
    )

    assert starts_us(rank_0, rank_1)[1] == [0.0, 500_050.0, 1_000_100.0]
    assert clock_words(align([rank_0, rank_1]), 1) == "clock aligned by readings"


def test_ranks_without_events_and_none_at_all_are_no_trouble() -> None:
    assert starts_us(rank_trace(), first_ns=7) == [[]]
    assert starts_us() == []


def test_the_recording_itself_is_not_changed() -> None:
    trace = rank_trace(event("x", 70, 80))

    list(aligned_events([trace], align([trace])))

    assert trace.events.start_ns.tolist() == [70 * US]


def test_times_that_no_clock_shows_break_nothing() -> None:
    latest = 2**63 - 1
    late = event("x", 5)
    late.start_ns = late.end_ns = latest
    rank_0 = rank_trace(late, rank=0, world_size=2, perf_counter_ns=latest)
    rank_1 = rank_trace(
        late, event("y", 0), rank=1, world_size=2, clock="clock of host-b", unix_ns=latest
    )

    made = starts_us(rank_0, rank_1)

    assert min(min(starts) for starts in made) == 0.0
    assert made[1] == sorted(made[1], reverse=True)
