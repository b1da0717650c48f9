"""The summary: traces made by hand, whose sums are seen in the test."""

from __future__ import annotations

import pytest

from tests.tools.events import US, comm, event, rank_trace, step
from trine.tools.reports import CollectiveSummary, summarize


def test_numbers_are_per_step_and_means_over_ranks() -> None:
    rank_0 = rank_trace(
        comm("all_gather", "a", 10, 30, nbytes=100, exposed_us=8),
        comm("all_gather", "a", 40, 50, nbytes=100, exposed_us=2),
        step(0, 100),
        comm("all_gather", "a", 110, 120, nbytes=100, exposed_us=6),
        step(100, 300),
        rank=0,
        world_size=2,
    )
    rank_1 = rank_trace(
        comm("all_gather", "a", 10, 60, nbytes=40, exposed_us=50),
        step(0, 100),
        comm("all_gather", "a", 110, 120, nbytes=40, exposed_us=10),
        step(100, 300),
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
        )
    }
    assert unit.exposed_ns == 19 * US
    assert unit.exposed_ns_max == 30 * US
    assert unit.exposed_share == pytest.approx(19 / 150)  # of the mean step of 100 and 200 us


def test_units_and_collectives_come_in_the_order_of_the_run() -> None:
    trace = rank_trace(
        # As reported: the gather of b, started later, is complete before that of a.
        comm("all_gather", "b", 2, 3),
        comm("all_gather", "a", 1, 9, exposed_us=4),
        comm("reduce_scatter", "b", 10, 12),
        comm("reduce_scatter", "a", 12, 15, exposed_us=3),
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
        comm("all_gather", "a", 0, 5, nbytes=1, exposed_us=5),
        comm("all_gather", "a", 10, 90, nbytes=2, exposed_us=7),
        comm("all_gather", "a", 18, 30, nbytes=4, exposed_us=9),  # starts within, ends after
        step(10, 20),
        comm("all_gather", "a", 20, 25, nbytes=8, exposed_us=1),
    )

    summary = summarize([trace])

    assert summary.units[0].collectives["all_gather"].nbytes == 2 + 4
    assert summary.units[0].exposed_ns == (7 + 9) * US
    assert summary.sent_nbytes == [1 + 2 + 4 + 8]


def test_without_steps_the_whole_recording_counts() -> None:
    trace = rank_trace(comm("all_gather", "a", 0, 5, nbytes=3, exposed_us=5))

    summary = summarize([trace])

    assert summary.steps is None
    assert summary.units[0].collectives["all_gather"].nbytes == 3
    assert summary.units[0].exposed_share is None


def test_step_times_name_the_slowest_rank() -> None:
    rank_0 = rank_trace(step(0, 90), step(100, 110), step(200, 212), rank=0, world_size=2)
    rank_1 = rank_trace(step(0, 70), step(100, 150), step(200, 260), rank=1, world_size=2)

    steps = summarize([rank_0, rank_1]).steps

    assert steps is not None
    assert steps.count == 3
    assert steps.mean_ns == pytest.approx((90 + 10 + 12 + 70 + 50 + 60) / 6 * US)
    assert steps.median_ns == (50 + 60) / 2 * US
    assert steps.first_ns == (90 + 70) / 2 * US
    assert (steps.slowest_rank, steps.slowest_rank_mean_ns) == (1, 60 * US)


def test_the_first_step_left_by_a_full_recorder_is_not_counted() -> None:
    trace = rank_trace(
        # The gather of this step was pushed out; its step span, reported later, was not.
        step(0, 100),
        comm("all_gather", "a", 110, 120, nbytes=6),
        step(100, 300),
        dropped=17,
    )

    summary = summarize([trace])

    assert summary.dropped == 17
    assert summary.steps is not None
    assert (summary.steps.count, summary.steps.mean_ns) == (1, 200 * US)
    assert summary.units[0].collectives["all_gather"].count == 1


def test_waiting_for_a_collective_is_not_counted_beside_its_exposed_time() -> None:
    trace = rank_trace(
        event("wait all_gather", 10, 25, category="comm", unit="a"),
        comm("all_gather", "a", 0, 25, exposed_us=15),
        step(0, 50),
    )

    (unit,) = summarize([trace]).units

    assert list(unit.collectives) == ["all_gather"]
    assert unit.exposed_ns == 15 * US


@pytest.mark.parametrize("exposed", [None, "4", -5, 2.5, [1]])
def test_an_exposed_time_that_is_no_time_counts_as_none(exposed: object) -> None:
    gather = comm("all_gather", "a", 0, 9)
    gather.args = {"exposed_ns": exposed}

    (unit,) = summarize([rank_trace(gather)]).units

    assert unit.exposed_ns == 0


def test_a_step_inside_a_step_is_not_counted_again() -> None:
    trace = rank_trace(step(10, 40), step(0, 100), step(100, 200))

    steps = summarize([trace]).steps

    assert steps is not None
    assert (steps.count, steps.mean_ns) == (2, 100 * US)


def test_a_unit_that_one_rank_lacks_still_averages_over_all() -> None:
    rank_0 = rank_trace(comm("all_gather", "a", 0, 4, exposed_us=4), rank=0, world_size=2)
    rank_1 = rank_trace(rank=1, world_size=2)

    (unit,) = summarize([rank_0, rank_1]).units

    assert (unit.exposed_ns, unit.exposed_ns_max) == (2 * US, 4 * US)
