"""The summary: traces made by hand, whose sums are seen in the test."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.events import US, comm, event, rank_trace, step
from tests.tools.jobs import done, through
from trine.core.tracing import TraceEvent
from trine.tools.analysis.summary import Summary, summarize
from trine.tools.reports import CollectiveSummary, print_summary
from trine.tools.tracing import RankTrace
from trine.tools.tracing.schema import ClockReading, End


def blocked(op: str, unit: str, start_us: int, end_us: int) -> TraceEvent:
    """The training thread stands still for a collective of a unit."""
    return event(f"wait {op}", start_us, end_us, category="comm", unit=unit)


def test_numbers_are_per_step_and_means_over_ranks() -> None:
    rank_0 = rank_trace(
        comm("all_gather", "a", 10, 30, nbytes=100),
        blocked("all_gather", "a", 22, 30),
        comm("all_gather", "a", 40, 50, nbytes=100),
        blocked("all_gather", "a", 48, 50),
        step(0, 100),
        comm("all_gather", "a", 110, 120, nbytes=100),
        blocked("all_gather", "a", 114, 120),
        step(100, 300, 1),
        rank=0,
        world_size=2,
    )
    rank_1 = rank_trace(
        comm("all_gather", "a", 10, 60, nbytes=40),
        blocked("all_gather", "a", 10, 60),
        step(0, 100),
        comm("all_gather", "a", 110, 120, nbytes=40),
        blocked("all_gather", "a", 110, 120),
        step(100, 300, 1),
        rank=1,
        world_size=2,
    )

    (unit,) = summarize([rank_0, rank_1]).units

    assert unit.unit == "a"
    assert unit.collectives == {
        "all_gather": CollectiveSummary(
            count=(3 / 2 + 2 / 2) / 2,
            time_ns=((20 + 10 + 10) / 2 + (50 + 10) / 2) / 2 * US,
            nbytes=(300 / 2 + 80 / 2) / 2,
            exposed_ns=((8 + 2 + 6) / 2 + (50 + 10) / 2) / 2 * US,
            wait_ns=0,
            hidden_ns=(12 + 8 + 4) / 2 / 2 * US,
        )
    }
    assert unit.exposed_ns == 19 * US
    assert unit.exposed_ns_max == 30 * US
    assert unit.exposed_share == pytest.approx(19 / 150)  # of the mean step of 100 and 200 us


def test_units_and_collectives_come_in_the_order_of_the_run() -> None:
    trace = rank_trace(
        # As reported: the gather of b, started later, is complete before that of a.
        comm("all_gather", "b", 2, 3),
        comm("all_gather", "a", 1, 9),
        blocked("all_gather", "a", 5, 9),
        comm("reduce_scatter", "b", 10, 12),
        comm("reduce_scatter", "a", 12, 15),
        blocked("reduce_scatter", "a", 12, 15),
        step(0, 20),
    )

    summary = summarize([trace])

    assert [(unit.unit, list(unit.collectives)) for unit in summary.units] == [
        ("a", ["all_gather", "reduce_scatter"]),
        ("b", ["all_gather", "reduce_scatter"]),
    ]
    assert [unit.exposed_ns for unit in summary.units] == [7 * US, 0]


def test_communication_outside_of_steps_counts_in_the_bytes_sent_only() -> None:
    trace = rank_trace(
        comm("all_gather", "a", 0, 5, nbytes=1),
        blocked("all_gather", "a", 0, 5),
        comm("all_gather", "a", 10, 90, nbytes=2),
        comm("all_gather", "a", 18, 30, nbytes=4),  # starts within, ends after
        blocked("all_gather", "a", 18, 30),
        step(10, 20),
        comm("all_gather", "a", 20, 25, nbytes=8),
    )

    summary = summarize([trace])

    assert summary.units[0].collectives["all_gather"].nbytes == 2 + 4
    assert summary.units[0].exposed_ns == 2 * US
    assert summary.sent_nbytes == [1 + 2 + 4 + 8]


def test_without_steps_the_whole_recording_counts() -> None:
    trace = rank_trace(comm("all_gather", "a", 0, 5, nbytes=3))

    summary = summarize([trace])

    assert summary.steps is None
    assert summary.units[0].collectives["all_gather"].nbytes == 3
    assert summary.units[0].exposed_share is None
    assert summary.parts.total_ns == 5 * US


def test_step_times_name_the_slowest_rank() -> None:
    rank_0 = rank_trace(step(0, 90), step(100, 110, 1), step(200, 212, 2), rank=0, world_size=2)
    rank_1 = rank_trace(step(0, 70), step(100, 150, 1), step(200, 260, 2), rank=1, world_size=2)

    steps = summarize([rank_0, rank_1]).steps

    assert steps is not None
    assert steps.count == 3
    assert steps.mean_ns == pytest.approx((90 + 10 + 12 + 70 + 50 + 60) / 6 * US)
    assert steps.median_ns == (50 + 60) / 2 * US
    assert steps.first_ns == (90 + 70) / 2 * US
    assert (steps.slowest_rank, steps.slowest_rank_mean_ns) == (1, 60 * US)


def test_one_step_of_20_takes_longer_than_the_95th_percentile() -> None:
    lengths = [100 + number for number in range(40)]
    begins = [1000 * number for number in range(40)]

    steps = summarize(
        [rank_trace(*(step(at, at + long, at) for at, long in zip(begins, lengths, strict=True)))]
    ).steps

    assert steps is not None
    assert sum(long * US > steps.p95_ns for long in lengths) == 2


def test_the_first_step_left_by_a_full_recorder_is_not_counted() -> None:
    trace = rank_trace(
        # The gather of this step was pushed out; its step span, reported later, was not.
        step(0, 100),
        comm("all_gather", "a", 110, 120, nbytes=6),
        step(100, 300, 1),
        dropped=17,
    )

    summary = summarize([trace])

    assert (summary.dropped, summary.by_rank[0].dropped) == (17, 17)
    assert summary.steps is not None
    assert (summary.steps.count, summary.steps.mean_ns) == (1, 200 * US)
    assert summary.units[0].collectives["all_gather"].count == 1


def test_a_step_inside_a_step_is_not_counted_again() -> None:
    trace = rank_trace(step(10, 40), step(0, 100), step(100, 200, 1))

    steps = summarize([trace]).steps

    assert steps is not None
    assert (steps.count, steps.mean_ns) == (2, 100 * US)


def test_a_unit_that_one_rank_lacks_still_averages_over_all() -> None:
    rank_0 = rank_trace(*done(1, 0, 4, unit="a"), rank=0, world_size=2)
    rank_1 = rank_trace(event("forward", 0, 4), rank=1, world_size=2)

    (unit,) = summarize([rank_0, rank_1]).units

    assert (unit.exposed_ns, unit.exposed_ns_max) == (2 * US, 4 * US)


def test_a_rank_without_steps_does_not_distort_the_means_of_those_that_have_them() -> None:
    rank_0 = rank_trace(step(0, 100), rank=0, world_size=2)
    rank_1 = rank_trace(event("forward", 0, 9_000, category="compute"), rank=1, world_size=2)

    summary = summarize([rank_0, rank_1])

    assert summary.parts.total_ns == 100 * US
    assert [rank.steps for rank in summary.by_rank] == [1, 0]


def test_a_recording_without_an_end_is_cut_off() -> None:
    killed = rank_trace(step(0, 100), rank=0, world_size=2)
    closed = replace(rank_trace(step(0, 100), rank=1, world_size=2), end=End(1, 0, "closed"))

    summary = summarize([killed, closed])

    assert [rank.cut_off for rank in summary.by_rank] == [True, False]


def test_recordings_are_let_go_of_before_the_next_is_read() -> None:
    alive: list[int] = []

    class Counted(RankTrace):
        def __del__(self) -> None:
            alive.pop()

    def reading() -> Iterator[RankTrace]:
        for rank in range(3):
            made = rank_trace(step(0, 100), rank=rank, world_size=3)
            assert not alive
            alive.append(rank)
            yield Counted(made.header, made.events)

    summary = summarize(reading())

    assert summary.ranks == [0, 1, 2]


def with_straggler() -> list[RankTrace]:
    """Four ranks of which rank 2 comes 12 us late to a gather that then takes 5 us."""
    traces = []
    for rank in range(4):
        arrives = 52 if rank == 2 else 40
        traces.append(
            rank_trace(
                event("forward", 0, arrives, category="compute"),
                *done(1, arrives, 57),
                through(2, 60, 70, unit="head"),
                step(0, 100),
                rank=rank,
                world_size=4,
            )
        )
    return traces


def test_who_makes_the_others_wait_is_named_with_how_long() -> None:
    summary = summarize(with_straggler())

    assert [rank.causes_wait_ns for rank in summary.by_rank] == [0, 0, 12 * US, 0]
    assert "; rank 2 makes the others wait 12.0 us a step." in summary.dominant


def one(*events: TraceEvent) -> Summary:
    return summarize([rank_trace(*events, step(0, 100))])


def test_what_dominates_is_said_with_the_unit_that_most_of_it_belongs_to() -> None:
    forward = event("forward", 0, 65, category="compute")

    said = one(forward, *done(1, 65, 90, unit="blocks.3"), *done(2, 90, 96)).dominant

    assert said == "31% of the step is exposed communication, most of it all_gather of blocks.3."


@pytest.mark.parametrize(
    ("name", "category", "said"),
    [
        ("load batch", "io", "40% of the step is loading data."),
        ("checkpoint_write", "io", "40% of the step is checkpoints."),
        ("optimizer", "compute", "40% of the step is the optimizer."),
        ("epoch", "user", "40% of the step is not covered by any span."),
    ],
)
def test_whatever_dominates_has_its_words(name: str, category: str, said: str) -> None:
    forward = event("forward", 0, 60, category="compute")

    assert one(forward, event(name, 60, 100, category=category)).dominant == said


def test_a_step_that_only_computes_is_praised() -> None:
    assert one(event("forward", 0, 99, category="compute")).dominant == (
        "99% of the step is computing, and nothing else takes 2% of it."
    )


def test_names_in_the_sentence_cannot_steer_a_terminal() -> None:
    said = one(*done(1, 0, 90, unit="a\x1b[2J")).dominant

    assert r"a\x1b[2J" in said
    assert "\x1b" not in said


_LATEST = (1 << 63) - 1
times = st.one_of(st.integers(0, 100), st.integers(0, _LATEST), st.sampled_from([0, _LATEST]))


@st.composite
def hostile_traces(draw: st.DrawFn) -> list[RankTrace]:
    """Recordings whose numbers are allowed by the format and make no sense."""
    traces = []
    for rank in range(draw(st.integers(1, 3))):
        events = []
        for number in range(draw(st.integers(0, 6))):
            kind = draw(st.sampled_from(["step", "wait", "async"]))
            made = step(0, 0) if kind == "step" else done(number % 3, 0, 0)[kind == "async"]
            made.start_ns, made.end_ns = sorted((draw(times), draw(times)))
            made.nbytes = draw(times)
            made.step = draw(st.integers(-_LATEST, _LATEST))
            if made.args:
                made.args = {**made.args, "enqueue_ns": draw(times)}
            events.append(made)
        made_trace = rank_trace(
            *events,
            rank=rank,
            world_size=3,
            clock=draw(st.sampled_from("ab")),
            perf_counter_ns=draw(times),
            unix_ns=draw(times),
        )
        offsets = st.integers(-_LATEST, _LATEST)
        reading = st.builds(ClockReading, times, offsets, times)
        readings = tuple(draw(st.lists(reading, max_size=2)))
        traces.append(replace(made_trace, readings=readings))
    return traces


@given(hostile_traces())
def test_any_numbers_that_a_file_may_hold_have_a_summary(traces: list[RankTrace]) -> None:
    summary = summarize(traces)

    assert json.loads(json.dumps(asdict(summary), allow_nan=False))
    print_summary(summary, io.StringIO())
