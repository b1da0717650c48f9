"""Which ranks make others wait, from hand-made runs whose answer is known."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.tools.events import US, event, step, write_rank_file
from tests.tools.jobs import begin, done, left, through, wait
from trine.core.tracing import TraceEvent
from trine.tools.analysis.stragglers import RankLateness, Stragglers, find_stragglers
from trine.tools.cli import main
from trine.tools.reports import tables
from trine.tools.reports.stragglers_table import print_stragglers, verdict
from trine.tools.tracing import RankTrace

STEPS = 10
LOAD, FORWARD, BACKWARD, MOVE = 100, 400, 400, 50

Late = Callable[[int, int], int]
"""How much longer a rank loads in a step, in us."""


def nobody(rank: int, step: int) -> int:
    return 0


def run(world_size: int, late: Late, steps: int = STEPS) -> list[list[TraceEvent]]:
    """Ranks that load, compute and then meet in one collective, step after step."""
    events: list[list[TraceEvent]] = [[] for _ in range(world_size)]
    start = 0
    for number in range(steps):
        came = [start + LOAD + late(rank, number) + FORWARD for rank in range(world_size)]
        end = max(came) + MOVE
        for rank, own in enumerate(events):
            loaded = start + LOAD + late(rank, number)
            own += [
                event("load batch", start, loaded, category="io", step=number),
                event("forward", loaded, came[rank], category="compute", step=number),
                *done(number + 1, came[rank], end, step=number),
                step(start, end, number),
            ]
        start = end
    return events


def found(world_size: int, late: Late, steps: int = STEPS) -> Stragglers:
    events = run(world_size, late, steps)
    return find_stragglers([left(rank, world_size, *own) for rank, own in enumerate(events)])


def of_rank(result: Stragglers, rank: int) -> RankLateness:
    return next(each for each in result.ranks if each.rank == rank)


def late_ranks(result: Stragglers) -> list[int]:
    return [each.rank for each in result.standing_out]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_a_rank_that_loads_longer_is_named_with_how_much_and_where(world_size: int) -> None:
    result = found(world_size, lambda rank, number: 120 if rank == 1 else 0)

    assert late_ranks(result) == [1]
    late = of_rank(result, 1)
    assert (late.median_ns, late.p95_ns, late.max_ns) == (120 * US,) * 3
    assert (late.phase, late.phase_ns) == ("load batch", 120 * US)
    assert late.last_share == 1
    assert late.cost_ns == 120 * US
    assert late.arrives_ns == 120 * US
    assert late.waits_ns == 0
    assert of_rank(result, 0).waits_ns == 120 * US
    assert result.step_ns == (LOAD + 120 + FORWARD + MOVE) * US
    assert verdict(result) == [
        "Rank 1 (host-a) makes everybody wait 120 us a step, in 'load batch' (17.9%)."
    ]


def test_two_stragglers_are_both_named() -> None:
    result = found(4, lambda rank, number: {1: 120, 3: 80}.get(rank, 0))

    assert late_ranks(result) == [1, 3]
    assert of_rank(result, 3).median_ns == 80 * US
    assert of_rank(result, 3).last_share == 0
    assert of_rank(result, 1).cost_ns == 40 * US  # rank 3 would keep them waiting then


def test_half_of_the_ranks_can_be_stragglers() -> None:
    result = found(8, lambda rank, number: 100 + number % 3 if rank >= 4 else number % 2)

    assert sorted(late_ranks(result)) == [4, 5, 6, 7]


def test_equal_ranks_do_not_stand_out() -> None:
    result = found(4, nobody)

    assert late_ranks(result) == []
    assert result.skew.max_ns == 0
    assert verdict(result)[0].startswith(
        "No rank stands out: none is late by 2% of a step (11.0 us)"
    )


@pytest.mark.parametrize("world_size", [2, 4, 64])
def test_chance_makes_no_straggler_and_does_not_hide_one(world_size: int) -> None:
    """Noise of 10 % of the step on every rank and step; then one rank late by 15 %."""
    chance = random.Random(5)
    noise = [[abs(int(chance.gauss(0, 55))) for _ in range(50)] for _ in range(world_size)]

    equal = found(world_size, lambda rank, number: noise[rank][number], steps=50)
    planted = found(
        world_size, lambda rank, number: noise[rank][number] + 85 * (rank == 1), steps=50
    )

    assert late_ranks(equal) == []
    assert late_ranks(planted) == [1]
    assert of_rank(planted, 1).median_ns == pytest.approx(85 * US, rel=0.3)


def test_computing_that_varies_does_not_hide_a_rank_that_loads_longer() -> None:
    """Forward takes up to twice as long by chance; rank 1 loads 60 of some 800 us longer."""
    chance = random.Random(7)
    traces = []
    for rank in range(2):
        events: list[TraceEvent] = []
        for number in range(20):
            start = number * 2_000
            loaded = start + 100 + 60 * rank
            came = loaded + 400 + int(chance.random() * 400)
            end = start + 1_100
            events.append(event("load batch", start, loaded, category="io", step=number))
            events.append(event("forward", loaded, came, category="compute", step=number))
            events += [*done(number + 1, came, end, step=number), step(start, end, number)]
        traces.append(left(rank, 2, *events))

    result = find_stragglers(traces)

    assert late_ranks(result) == [1]
    assert (of_rank(result, 1).phase, of_rank(result, 1).phase_ns) == ("load batch", 60 * US)


def test_lateness_below_the_threshold_is_not_worth_a_verdict() -> None:
    result = found(4, lambda rank, number: 10 if rank == 1 else 0)

    assert of_rank(result, 1).share == pytest.approx(10 / 560)
    assert late_ranks(result) == []


def chained(late_us: int) -> list[RankTrace]:
    """Rank 2 is late; rank 1 waits for it in "a", so it comes late to "b" with rank 0."""
    events: list[list[TraceEvent]] = [[], [], []]
    start = 0
    for number in range(STEPS):
        came = [start + 100, start + 100, start + 100 + late_us]
        met_a = came[2] + MOVE
        end = met_a + MOVE
        events[0] += done(number + 1, came[0], end, group="b", step=number)
        events[1] += done(number + 1, came[1], met_a, group="a", step=number)
        events[1] += done(number + 1, met_a, end, group="b", step=number)
        events[2] += done(number + 1, came[2], met_a, group="a", step=number)
        events[2] += [event("evaluate", met_a, end, step=number)]
        for own in events:
            own.append(step(start, end, number))
        start = end
    # Rank 2 has its last 50 us of each step for itself, where the others move data.
    return [left(rank, 3, *own) for rank, own in enumerate(events)]


def test_a_rank_that_was_held_up_by_another_is_not_blamed() -> None:
    result = find_stragglers(chained(200))

    assert late_ranks(result) == [2]
    held_up = of_rank(result, 1)
    assert held_up.arrives_ns >= 0
    assert held_up.median_ns <= 0
    assert held_up.waits_ns == 200 * US  # in "a", for rank 2
    assert of_rank(result, 0).waits_ns == 250 * US  # in "b", for rank 1


def test_time_between_steps_counts() -> None:
    """Rank 1 loads after the step's span has ended, and rank 0 waits for it in the next."""
    first: list[TraceEvent] = []
    second: list[TraceEvent] = []
    for number in range(STEPS):
        start = number * 1_000
        second += [event("load batch", start, start + 300, category="io", step=number)]
        second += [*done(number + 1, start + 500, start + 1_000, step=number)]
        second += [step(start + 300, start + 1_000, number)]
        first += [*done(number + 1, start + 200, start + 1_000, step=number)]
        first += [step(start, start + 1_000, number)]

    result = find_stragglers([left(0, 2, *first), left(1, 2, *second)])

    assert late_ranks(result) == [1]
    assert of_rank(result, 1).phase == "load batch"


def test_what_lies_within_a_phase_but_blocks_is_not_its_time() -> None:
    """Both are in "forward" for 500 us; rank 0 waits for 300 of them."""
    first: list[TraceEvent] = []
    second: list[TraceEvent] = []
    for number in range(STEPS):
        start = number * 600
        for own, came in ((first, start + 100), (second, start + 400)):
            own += done(number + 1, came, start + 450, step=number)
            own += [event("forward", start, start + 500, category="compute", step=number)]
            own += [step(start, start + 600, number)]

    result = find_stragglers([left(0, 2, *first), left(1, 2, *second)])

    late = of_rank(result, 1)
    assert (late.median_ns, late.phase, late.phase_ns) == (300 * US, "forward", 300 * US)


def test_steps_that_a_rank_did_not_record_are_left_out() -> None:
    events = run(2, lambda rank, number: 500 if number == 0 and rank == 0 else 0)
    without_first = [each for each in events[1] if each.step > 0]

    result = find_stragglers([left(0, 2, *events[0]), left(1, 2, *without_first)])

    assert result.steps == STEPS - 1


def test_steps_without_numbers_are_matched_in_order() -> None:
    def unnumbered(events: Sequence[TraceEvent]) -> list[TraceEvent]:
        for each in events:
            each.step = -1
        return list(events)

    first, second = run(2, lambda rank, number: 120 if rank == 1 else 0)

    result = find_stragglers([left(0, 2, *unnumbered(first)), left(1, 2, *unnumbered(second[:-6]))])

    assert result.steps == STEPS - 1
    assert late_ranks(result) == [1]
    assert of_rank(result, 0).waits_ns == 120 * US


def test_hosts_whose_ranks_are_late_are_named() -> None:
    events = run(4, lambda rank, number: 120 if rank >= 2 else 0)
    traces = [left(rank, 4, *own) for rank, own in enumerate(events)]
    hosts = ["host-a", "host-a", "host-b", "host-b"]
    traces = [
        replace(trace, header=replace(trace.header, host=host))
        for trace, host in zip(traces, hosts, strict=True)
    ]

    result = find_stragglers(traces)

    assert [(host.host, host.ranks, host.late) for host in result.hosts] == [
        ("host-b", 2, 2),
        ("host-a", 2, 0),
    ]
    assert verdict(result)[-1] == "All of them are on host-b: look at that machine."
    out = io.StringIO()
    print_stragglers(result, out)
    lines = out.getvalue().splitlines()
    assert [line.split()[:3] for line in lines[-2:]] == [
        ["all", "of", "host-b"],
        ["all", "of", "host-a"],
    ]
    assert lines[-6].split()[:2] == ["2", "host-b"]


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        ([left(0, 1, step(0, 10))], "Only one rank was recorded"),
        ([left(rank, 2, *done(1, 0, 5)) for rank in range(2)], "No step was recorded"),
        ([left(rank, 2, step(0, 10)) for rank in range(2)], "1 step is too few"),
        ([left(rank, 2) for rank in range(2)], "No step was recorded"),
    ],
)
def test_without_enough_to_compare_there_is_no_verdict(traces: list[RankTrace], said: str) -> None:
    result = find_stragglers(traces)

    assert late_ranks(result) == []
    assert said in verdict(result)[0]


def test_ranks_without_steps_are_said() -> None:
    events = run(2, nobody)
    traces = [left(0, 3, *events[0]), left(1, 3, *events[1]), left(2, 3)]

    out = io.StringIO()
    print_stragglers(find_stragglers(traces), out)

    assert "left out, since they recorded no step: rank 2" in out.getvalue()


def test_clocks_that_differ_by_seconds_change_no_lateness() -> None:
    events = run(2, lambda rank, number: 120 if rank == 1 else 0)
    there = left(1, 2, *events[1])
    header = replace(there.header, clock="clock of host-b", unix_ns=7_000_000_000)

    result = find_stragglers([left(0, 2, *events[0]), replace(there, header=header)])

    assert late_ranks(result) == [1]
    assert of_rank(result, 1).median_ns == 120 * US


def test_many_ranks_are_summed_up_below_the_latest() -> None:
    out = io.StringIO()
    print_stragglers(found(40, lambda rank, number: 120 if rank == 17 else rank % 5), out)

    lines = out.getvalue().splitlines()
    assert lines[0] == "40 ranks, 10 steps of 670 us"
    assert lines[1] == "ranks are late by -2.00 us (min), 0 ns (median), 118 us (max) a step"
    assert [line.split()[0] for line in lines[-11:-9]] == ["17", "4"]
    assert lines[-1].startswith("30 more")


def test_a_terminal_of_80_columns_is_wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()

    def terminal(**kwargs: object) -> Console:
        return Console(file=out, width=80, force_terminal=True, color_system=None, highlight=False)

    monkeypatch.setattr(tables, "Console", terminal)
    print_stragglers(found(2, lambda rank, number: 120_000 if rank == 1 else 0), out)

    row = next(line for line in out.getvalue().splitlines() if line.startswith("1 "))
    assert row.split()[-2:] == ["load", "batch"]
    assert "\u2026" not in out.getvalue()  # nothing was cut off


def test_names_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\n"
    events = run(2, lambda rank, number: 120 if rank == 1 else 0)
    for own in events:
        for each in own:
            each.name = evil if each.name == "load batch" else each.name
    traces = [left(rank, 2, *own) for rank, own in enumerate(events)]
    traces = [replace(each, header=replace(each.header, host=evil)) for each in traces]

    out = io.StringIO()
    print_stragglers(find_stragglers(traces), out)

    assert "\x1b" not in out.getvalue()
    assert r"\x1b[2J\n" in out.getvalue()


def test_the_command_prints_verdict_and_ranks(tmp_path: Path) -> None:
    for rank, own in enumerate(run(2, lambda rank, number: 120 if rank == 1 else 0)):
        write_rank_file(tmp_path, *own, rank=rank, world_size=2)

    result = CliRunner().invoke(main, ["trace", "stragglers", str(tmp_path)])
    as_json = CliRunner().invoke(main, ["trace", "stragglers", str(tmp_path), "--json"])

    assert result.exit_code == 0
    assert "makes everybody wait 120 us a step, in 'load batch'" in result.output
    data = json.loads(as_json.output)
    assert (data["format"], data["version"]) == ("trine-stragglers", 1)
    assert [rank["rank"] for rank in data["ranks"] if rank["stands_out"]] == [1]


def test_waits_without_an_end_or_a_beginning_are_no_fault() -> None:
    events = [begin(1, 5), wait(2, 6, 8), through(3, 9, 12), step(0, 20)]

    result = find_stragglers([left(0, 2, *events), left(1, 2, begin(4, 3), step(0, 20))])

    assert result.skew.collectives == 0
