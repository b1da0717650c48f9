"""Clocks of several machines on one axis: made up, so that how far they are apart is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tests.tools.events import event, rank_trace
from trine.core.tracing import TraceEvent
from trine.tools.tracing import RankTrace
from trine.tools.tracing.bounds import Line
from trine.tools.tracing.clock import align
from trine.tools.tracing.schema import ClockReading

SECOND = 1_000_000_000
FAR = 7 * SECOND


@dataclass(frozen=True)
class Machine:
    """A machine whose clock differs: what it shows is t - offset, running slower by drift."""

    name: str
    offset_ns: int = 0
    drift: float = 0.0

    def shows(self, true_ns: int) -> int:
        """What its clock shows at a time of the first machine's clock."""
        return round((true_ns - self.offset_ns) / (1 + self.drift))


def collective(
    machine: Machine, number: int, enqueue_ns: int, end_ns: int, *, group: str, op: str
) -> TraceEvent:
    made = event(
        op, 0, kind="async", category="comm", args={"group": group, "seq": number, "op": op}
    )
    made.start_ns, made.end_ns = machine.shows(enqueue_ns), machine.shows(end_ns)
    return made


def run(
    machines: Sequence[Machine],
    *,
    lasts_s: float = 100.0,
    count: int = 400,
    groups: Mapping[str, Sequence[int]] | None = None,
    op: str = "all_reduce",
) -> list[RankTrace]:
    """A run of one rank per machine: collectives of 100 us and more, ranks come as they like."""
    chance = random.Random(0)
    events: list[list[TraceEvent]] = [[] for _ in machines]
    for number in range(1, count + 1):
        at = 20 * SECOND + round(lasts_s * SECOND * number / count)
        for group, ranks in (groups or {"0": range(len(machines))}).items():
            comes = {rank: at + round(chance.expovariate(1 / 500_000)) for rank in ranks}
            begins = max(comes.values())
            for rank in ranks:
                ends = begins + 100_000 + round(chance.expovariate(1 / 300_000))
                machine = machines[rank]
                events[rank].append(
                    collective(machine, number, comes[rank], ends, group=group, op=op)
                )
    return [
        rank_trace(*own, rank=rank, world_size=len(machines), clock=machine.name, host=machine.name)
        for rank, (machine, own) in enumerate(zip(machines, events, strict=True))
    ]


def worst_error_ns(traces: Sequence[RankTrace], machines: Sequence[Machine], rank: int) -> int:
    """How wrong the aligned ends of a rank's collectives are, at worst."""
    found = align(traces).to_common(rank, traces[rank].events.end_ns)
    machine = machines[rank]
    shown = traces[rank].events.end_ns.tolist()
    # The nanosecond that a clock's reading is rounded to is part of the clock.
    true = torch.tensor([round(ns * (1 + machine.drift)) + machine.offset_ns for ns in shown])
    return int((found - true).abs().max())


def test_ranks_of_one_machine_need_no_alignment() -> None:
    traces = run([Machine("a"), Machine("a")])

    alignment = align(traces)

    assert alignment.offset_ns == {0: 0, 1: 0}
    assert alignment.error_ns == {0: 0, 1: 0}
    assert alignment.clocks == 1


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
@pytest.mark.parametrize("offset_ns", [FAR, -FAR])
def test_clocks_seconds_apart_are_aligned_by_collectives_within_the_stated_error(
    offset_ns: int, drift: float
) -> None:
    machines = [Machine("a"), Machine("b", offset_ns, drift)]
    traces = run(machines)

    alignment = align(traces)

    stated_ns = alignment.error_ns[1]
    assert alignment.by_rank[1].how == "collectives"
    assert worst_error_ns(traces, machines, 1) <= stated_ns
    # Two clocks can be told apart to about what the quickest collectives take.
    assert stated_ns < 200_000
    assert alignment.drift[1] == pytest.approx(drift, abs=5e-6)


def test_a_drift_that_nobody_takes_out_would_be_a_greater_error() -> None:
    machines = [Machine("a"), Machine("b", FAR, 5e-5)]

    traces = run(machines)

    moved_ns = round(5e-5 * 100 * SECOND)
    assert worst_error_ns(traces, machines, 1) < moved_ns / 10


def test_a_machine_is_reached_by_way_of_another() -> None:
    machines = [Machine("a"), Machine("b", FAR), Machine("c", -3 * FAR, 2e-5)]
    traces = run(machines, groups={"left": (0, 1), "right": (1, 2)})

    alignment = align(traces)

    assert alignment.by_rank[2].how == "collectives"
    assert worst_error_ns(traces, machines, 2) <= alignment.error_ns[2]
    assert alignment.error_ns[2] > alignment.error_ns[1]


def test_ranks_of_one_machine_move_together() -> None:
    machines = [Machine("a"), Machine("b", FAR), Machine("b", FAR)]

    alignment = align(run(machines))

    assert alignment.by_rank[1] == alignment.by_rank[2]


def test_the_note_states_the_error() -> None:
    note = align(run([Machine("a"), Machine("b", FAR)])).note

    assert note.startswith("Ranks of 2 machines, aligned by their collectives: times between")
    assert " us." in note


def test_collectives_that_contradict_each_other_raise_the_error() -> None:
    machines = [Machine("a"), Machine("b", FAR)]
    traces = run(machines)
    jumped = run([machines[0], Machine("b", FAR + 2_000_000)])
    half = len(traces[1].events) // 2
    # As if somebody had set the second clock by 2 ms in the middle of the run.
    mixed = [*list(traces[1].events)[:half], *list(jumped[1].events)[half:]]

    alignment = align([traces[0], rank_trace(*mixed, rank=1, world_size=2, clock="b")])

    assert alignment.error_ns[1] > align(traces).error_ns[1]


@pytest.mark.parametrize("op", ["broadcast", "send"])
def test_what_can_end_before_all_have_come_bounds_nothing(op: str) -> None:
    traces = run([Machine("a"), Machine("b", FAR)], op=op)

    assert align(traces).by_rank[1].how == "wall"


def test_without_anything_in_common_wall_clocks_are_compared() -> None:
    traces = run([Machine("a"), Machine("b", FAR)], groups={"x": (0,), "y": (1,)})
    headers = [
        replace(traces[0].header, perf_counter_ns=0, unix_ns=FAR),
        replace(traces[1].header, perf_counter_ns=0, unix_ns=3 * FAR),
    ]

    alignment = align(
        [replace(trace, header=header) for trace, header in zip(traces, headers, strict=True)]
    )

    assert alignment.offset_ns == {0: 0, 1: 2 * FAR}
    assert alignment.error_ns == {0: 0, 1: -1}
    assert "wall clocks" in alignment.note


def with_readings(trace: RankTrace, *readings: ClockReading) -> RankTrace:
    return replace(trace, readings=readings)


def test_readings_are_preferred_and_drift_between_the_first_and_the_last_is_taken_out() -> None:
    machine = Machine("b", FAR, 5e-5)
    traces = run([Machine("a"), machine])
    first, last = (machine.shows(at) for at in (20 * SECOND, 120 * SECOND))
    readings = [
        ClockReading(first, 20 * SECOND - first, 4_000),
        ClockReading(last, 120 * SECOND - last, 9_000),
    ]

    alignment = align([traces[0], with_readings(traces[1], *readings)])

    assert alignment.by_rank[1].how == "readings"
    assert alignment.error_ns[1] == 9_000
    middle = machine.shows(70 * SECOND)
    assert alignment.to_common(1, middle) == pytest.approx(70 * SECOND, abs=2)
    assert alignment.to_rank(1, 70 * SECOND) == pytest.approx(middle, abs=2)


def test_readings_too_close_to_show_a_drift_show_none() -> None:
    traces = run([Machine("a"), Machine("b", FAR)])
    # 8 us apart within 10 us: that is their error, not a clock that runs almost twice as fast.
    readings = [ClockReading(0, FAR, 5_000), ClockReading(10_000, FAR + 8_000, 5_000)]

    alignment = align([traces[0], with_readings(traces[1], *readings)])

    assert alignment.drift[1] == 0
    assert alignment.offset_ns[1] == FAR + 4_000
    assert alignment.error_ns[1] == 13_000


def test_of_a_machine_the_rank_that_read_best_speaks_for_all() -> None:
    traces = run([Machine("a"), Machine("b", FAR), Machine("b", FAR)])

    alignment = align(
        [
            traces[0],
            with_readings(traces[1], ClockReading(0, FAR + 300, 9_000)),
            with_readings(traces[2], ClockReading(0, FAR + 20, 4_000)),
        ]
    )

    assert alignment.offset_ns == {0: 0, 1: FAR + 20, 2: FAR + 20}


def test_one_machine_alone_is_its_own_axis_whatever_it_read_of_another() -> None:
    (_, alone) = run([Machine("a"), Machine("b", FAR)])

    alignment = align([with_readings(alone, ClockReading(0, FAR, 4_000))])

    assert alignment.offset_ns == {1: 0}
    assert alignment.error_ns == {1: 0}


def test_readings_taken_by_ranks_of_one_machine_move_nothing() -> None:
    traces = run([Machine("a"), Machine("a")])

    alignment = align([traces[0], with_readings(traces[1], ClockReading(0, 700, 2_000))])

    assert alignment.offset_ns[1] == 0


@pytest.mark.parametrize("slope", [0.0, 5e-5, -1e-4])
def test_a_line_is_taken_from_times_as_it_was_added(slope: float) -> None:
    # 53 bits would not hold such a time to the nanosecond.
    times = torch.tensor([1_760_000_000_123_456_789, 1_760_000_900_123_456_789])
    line = Line(int(times[0]), -FAR, slope)

    back = line.take_from(line.add_to(times))

    assert (back - times).abs().max() <= 1
    assert line.take_from(line.add_to(int(times[1]))) == pytest.approx(int(times[1]), abs=1)
