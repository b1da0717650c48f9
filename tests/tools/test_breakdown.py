"""Where the time of steps went: recordings made by hand, whose answers are seen in the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.events import US, event, rank_trace, step
from tests.tools.jobs import begin, done, through, wait
from trine.core.tracing import TraceEvent
from trine.tools.analysis.breakdown import PARTS, Breakdown, RankBreakdown, break_down
from trine.tools.tracing import RankTrace
from trine.tools.tracing.schema import ClockReading

OTHER_THREAD = 7002


def run(*ranks: Sequence[TraceEvent], dropped: int = 0) -> list[RankBreakdown]:
    """The breakdown of a run of these ranks, of one host."""
    traces = [
        rank_trace(*events, rank=rank, world_size=len(ranks), dropped=dropped)
        for rank, events in enumerate(ranks)
    ]
    return break_down(traces).ranks


def parts_us(row: Breakdown) -> dict[str, float]:
    """The parts that are not zero, hidden time too, in microseconds."""
    every = {name: getattr(row, f"{name}_ns") / US for name in (*PARTS, "hidden")}
    return {name: value for name, value in every.items() if value}


def test_communication_behind_computation_is_hidden() -> None:
    (rank,) = run(
        [
            event("forward", 0, 100, category="compute"),
            through(1, 20, 60),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {"compute": 100, "hidden": 40}


def test_communication_that_the_thread_waits_for_all_the_time_is_exposed() -> None:
    (rank,) = run(
        [
            event("forward", 0, 100, category="compute"),
            *done(1, 20, 60),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {"compute": 60, "exposed": 40}


def test_communication_that_is_waited_for_halfway_is_half_hidden() -> None:
    (rank,) = run(
        [
            event("forward", 0, 100, category="compute"),
            begin(1, 20),
            wait(1, 40, 60),
            through(1, 20, 60),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {"compute": 80, "exposed": 20, "hidden": 20}
    (unit,) = rank.by_unit.totals()
    assert (unit.in_flight_ns, unit.exposed_ns, unit.hidden_ns) == (40 * US, 20 * US, 20 * US)


def test_until_the_last_rank_comes_others_wait_and_nothing_is_under_way() -> None:
    early, late = run(
        [begin(1, 10), wait(1, 20, 60), through(1, 10, 60), step(0, 100)],
        [begin(1, 50), wait(1, 50, 60), through(1, 50, 60), step(0, 100)],
    )

    assert parts_us(early.steps[0]) == {"wait": 30, "exposed": 10, "other": 60}
    assert parts_us(late.steps[0]) == {"exposed": 10, "other": 90}
    assert early.waited_for_ns == {1: 30 * US}
    assert late.waited_for_ns == {}
    (unit,) = early.by_unit.totals()
    assert (unit.in_flight_ns, unit.wait_ns) == (10 * US, 30 * US)


@pytest.mark.parametrize("rank_with_other_clock", [0, 1])
def test_waiting_is_told_across_two_clocks(rank_with_other_clock: int) -> None:
    apart_us = 7_000_000

    def recording(rank: int, arrives_us: int) -> RankTrace:
        shift = apart_us if rank == rank_with_other_clock else 0
        trace = rank_trace(
            *done(1, arrives_us + shift, 60 + shift),
            step(shift, 100 + shift),
            rank=rank,
            world_size=2,
            clock=f"clock {shift}",
        )
        # Readings are of rank 0's clock.
        offset_us = apart_us if rank_with_other_clock == 0 else -apart_us
        readings = (ClockReading(0, offset_us * US, 0),) if rank else ()
        return replace(trace, readings=readings)

    early, late = break_down([recording(0, 20), recording(1, 50)]).ranks

    assert parts_us(early.steps[0]) == {"wait": 30, "exposed": 10, "other": 60}
    assert parts_us(late.steps[0]) == {"exposed": 10, "other": 90}


def test_waits_nested_deeper_than_is_looked_at_are_of_the_one_around_them() -> None:
    depth = 50
    waits = [wait(level, level, 200 - level, unit=f"u{level}") for level in range(depth)]

    (rank,) = run([*waits[::-1], step(0, 200)])

    assert parts_us(rank.steps[0]) == {"exposed": 200}
    totals = rank.by_unit.totals()
    units = {own.unit: own.exposed_ns // US for own in totals if own.exposed_ns}
    # Each has what the next one leaves of it; the last that is looked at has all the rest.
    assert units == {f"u{level}": 2 for level in range(31)} | {"u31": 200 - 2 * 31}


def test_a_broadcast_may_end_before_all_have_come_so_nobody_is_said_to_be_waited_for() -> None:
    early, _ = run(
        [*done(1, 10, 60, op="broadcast"), step(0, 100)],
        [*done(1, 80, 90, op="broadcast"), step(0, 100)],
    )

    assert parts_us(early.steps[0]) == {"exposed": 50, "other": 50}


def test_a_rank_without_a_recording_cannot_be_seen_to_be_late() -> None:
    alone = rank_trace(*done(1, 10, 60), step(0, 100), rank=0, world_size=2)

    (rank,) = break_down([alone]).ranks

    assert parts_us(rank.steps[0]) == {"exposed": 50, "other": 50}


def test_a_rank_that_was_cut_off_before_a_collective_counts_as_far_as_it_got() -> None:
    survivor, killed = run(
        [*done(1, 10, 30), *done(2, 40, 60), step(0, 100)],
        [*done(1, 20, 30), begin(2, 50)],
    )

    assert parts_us(survivor.steps[0]) == {"wait": 20, "exposed": 20, "other": 60}
    assert not killed.has_steps


def test_groups_are_told_apart_by_their_names() -> None:
    first, second = run(
        [*done(1, 10, 30, group="a"), *done(1, 40, 60, group="b"), step(0, 100)],
        [*done(1, 45, 60, group="b"), step(0, 100)],
    )

    assert first.waited_for_ns == {1: 5 * US}
    assert parts_us(first.steps[0]) == {"wait": 5, "exposed": 35, "other": 60}
    assert parts_us(second.steps[0]) == {"exposed": 15, "other": 85}


def test_collectives_under_way_at_once_hide_the_time_once_and_each_its_own() -> None:
    (rank,) = run(
        [
            event("forward", 0, 100, category="compute"),
            through(1, 10, 50, unit="a"),
            through(2, 30, 70, unit="b"),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {"compute": 100, "hidden": 60}
    assert [(own.unit, own.hidden_ns // US) for own in rank.by_unit.totals()] == [
        ("a", 40),
        ("b", 40),
    ]


def test_the_wait_for_one_collective_is_not_hidden_time_of_another() -> None:
    (rank,) = run(
        [through(2, 10, 70, unit="b"), *done(1, 20, 50, unit="a"), step(0, 100)],
    )

    assert parts_us(rank.steps[0]) == {"exposed": 30, "hidden": 30, "other": 70}
    assert {own.unit: own.hidden_ns // US for own in rank.by_unit.totals()} == {"a": 0, "b": 30}


def test_exposed_time_goes_to_the_unit_and_operation_that_was_waited_for() -> None:
    (rank,) = run(
        [
            *done(1, 0, 10, unit="a"),
            *done(2, 20, 40, unit="b"),
            *done(3, 50, 80, unit="b", op="reduce_scatter"),
            step(0, 100),
        ]
    )

    assert [(own.unit, own.operation, own.exposed_ns // US) for own in rank.by_unit.totals()] == [
        ("a", "all_gather", 10),
        ("b", "all_gather", 20),
        ("b", "reduce_scatter", 30),
    ]


def test_of_waits_within_each_other_the_innermost_has_the_time() -> None:
    (rank,) = run(
        [
            wait(2, 20, 50, unit="inner"),
            wait(1, 10, 90, unit="outer"),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {"exposed": 80, "other": 20}
    assert {own.unit: own.exposed_ns // US for own in rank.by_unit.totals()} == {
        "inner": 30,
        "outer": 50,
    }


def test_a_wait_within_the_optimizer_is_communication() -> None:
    (rank,) = run(
        [
            *done(1, 60, 70),
            event("optimizer", 50, 90, category="compute"),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {"exposed": 10, "optimizer": 30, "other": 60}


def test_every_part_has_its_name() -> None:
    (rank,) = run(
        [
            event("load batch", 0, 5, category="io"),
            event("forward", 5, 20, category="compute"),
            event("backward", 20, 50, category="compute"),
            event("optimizer", 50, 60, category="compute"),
            event("checkpoint_stage", 60, 90, category="io"),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {
        "data": 5,
        "compute": 45,
        "optimizer": 10,
        "checkpoint": 30,
        "other": 10,
    }


def test_a_span_within_one_of_its_kind_counts_once() -> None:
    (rank,) = run(
        [
            event("attention", 20, 40, category="compute"),
            event("forward", 10, 60, category="compute"),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {"compute": 50, "other": 50}


def test_other_threads_do_not_block_the_one_that_trains() -> None:
    (rank,) = run(
        [
            event("wait all_gather", 10, 40, category="comm", thread=OTHER_THREAD),
            event("load batch", 10, 90, category="io", thread=OTHER_THREAD),
            event("forward", 0, 100, category="compute"),
            step(0, 100),
        ]
    )

    assert parts_us(rank.steps[0]) == {"compute": 100}


def test_what_crosses_the_end_of_a_step_is_divided() -> None:
    (rank,) = run([step(0, 100), wait(1, 90, 130), step(120, 200, 1)])

    assert [parts_us(row) for row in rank.steps] == [
        {"exposed": 10, "other": 90},
        {"exposed": 10, "other": 70},
    ]
    assert [parts_us(row) for row in rank.between] == [{"exposed": 20}]


def test_time_between_steps_is_not_of_a_step() -> None:
    (rank,) = run(
        [step(0, 100), event("checkpoint_write", 110, 150, category="io"), step(160, 200)]
    )

    assert [row.total_ns // US for row in rank.steps] == [100, 40]
    assert [parts_us(row) for row in rank.between] == [{"checkpoint": 40, "other": 20}]


def test_without_steps_the_whole_recording_is_one() -> None:
    (rank,) = run([event("forward", 0, 60, category="compute"), *done(1, 60, 100)])

    assert not rank.has_steps
    (row,) = rank.steps
    assert (row.step, parts_us(row)) == (-1, {"compute": 60, "exposed": 40})


def test_the_first_step_that_a_full_recorder_left_does_not_count() -> None:
    (rank,) = run([step(0, 100), step(100, 250, 1)], dropped=3)

    assert [row.step for row in rank.steps] == [1]


def test_an_empty_recording_has_no_steps() -> None:
    (rank,) = run([])

    assert not rank.steps
    assert not rank.between
    assert rank.by_unit.totals() == []


def test_bytes_and_counts_are_of_the_step_in_which_a_collective_was_started() -> None:
    (rank,) = run(
        [
            through(1, 90, 120, nbytes=8),
            step(0, 100),
            through(2, 130, 140, nbytes=16),
            step(100, 200, 1),
            through(3, 250, 260, nbytes=32),
        ]
    )

    table = rank.by_unit
    assert table.step.tolist() == [0, 1]
    assert table.numbers["nbytes"].tolist() == [8, 16]
    assert table.numbers["count"].tolist() == [1, 1]
    assert rank.sent_nbytes == 8 + 16 + 32


KINDS = (
    ("step", "step"),
    ("forward", "compute"),
    ("optimizer", "compute"),
    ("load batch", "io"),
    ("checkpoint_write", "io"),
    ("wait all_gather", "comm"),
    ("epoch", "user"),
)


@st.composite
def recordings(draw: st.DrawFn) -> list[list[TraceEvent]]:
    """Any spans and collectives of a few ranks, nested, overlapping or apart."""
    ranks = draw(st.integers(1, 3))
    time = st.integers(0, 60)
    made: list[list[TraceEvent]] = [[] for _ in range(ranks)]
    for events in made:
        for _ in range(draw(st.integers(0, 12))):
            begins, ends = sorted((draw(time), draw(time)))
            number, unit = draw(st.integers(1, 4)), draw(st.sampled_from("ab"))
            if draw(st.booleans()):
                events.append(through(number, begins, ends, unit=unit))
            else:
                name, category = draw(st.sampled_from(KINDS))
                args = {"group": "0", "seq": number, "op": "all_gather"}
                args = args if category == "comm" else {}
                events.append(event(name, begins, ends, category=category, unit=unit, args=args))
    return made


@given(recordings())
def test_parts_sum_to_the_step_exactly_and_none_is_negative(made: list[list[TraceEvent]]) -> None:
    for rank in run(*made):
        for row in (*rank.steps, *rank.between):
            parts = [getattr(row, f"{name}_ns") for name in PARTS]
            assert sum(parts) == row.total_ns
            assert min(*parts, row.hidden_ns) >= 0
            assert row.hidden_ns <= row.total_ns - row.exposed_ns - row.wait_ns
        units = rank.by_unit.totals()
        assert sum(own.exposed_ns for own in units) == sum(row.exposed_ns for row in rank.steps)
        assert sum(own.wait_ns for own in units) == sum(row.wait_ns for row in rank.steps)
        assert sum(own.wait_ns for own in units) == sum(rank.waited_for_ns.values())


def in_order(trace: RankTrace) -> list[tuple[int, str]]:
    """What the training thread does at each microsecond, found out one by one."""
    events = [made for made in trace.events if made.kind == "span"]
    steps = [made for made in events if made.category == "step"]
    order = {"comm": 0, "checkpoint": 1, "data": 2, "optimizer": 3, "compute": 4}
    found: list[tuple[int, str]] = []
    for at in range(60):
        if not any(made.start_ns <= at * US < made.end_ns for made in steps):
            continue
        names = ["other"]
        for made in events:
            if made.start_ns <= at * US < made.end_ns and made.category in (
                "comm",
                "io",
                "compute",
            ):
                special = {"io": "data", "compute": "compute", "comm": "comm"}[made.category]
                if made.name.startswith(("checkpoint", "optimizer")):
                    special = made.name.split("_")[0]
                names.append(special)
        found.append((at, min(names, key=lambda name: order.get(name, 9))))
    return found


@given(recordings())
def test_parts_are_what_looking_at_each_microsecond_finds(made: list[list[TraceEvent]]) -> None:
    for rank, events in zip(run(*made), made, strict=True):
        if not rank.has_steps:
            continue
        found = [name for _, name in in_order(rank_trace(*events))]
        sums = {name: sum(getattr(row, f"{name}_ns") for row in rank.steps) // US for name in PARTS}
        assert sums.pop("exposed") + sums.pop("wait") == found.count("comm")
        assert sums == {name: found.count(name) for name in sums}


@pytest.mark.parametrize("late_us", [0, 15, 40])
def test_how_late_a_rank_comes_is_how_long_the_others_wait(late_us: int) -> None:
    ranks = [[*done(1, 10 + (late_us if rank == 2 else 0), 100), step(0, 120)] for rank in range(4)]

    waits = [row.steps[0].wait_ns for row in run(*ranks)]

    assert waits == [late_us * US, late_us * US, 0, late_us * US]
