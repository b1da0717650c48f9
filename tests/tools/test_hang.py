"""Where a job hangs, from hand-made files whose answer is known."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.tools.events import US, event, write_rank_file
from tests.tools.jobs import begin, done, left, through, wait
from trine.core.tracing import TraceEvent
from trine.tools.analysis.hang import Hang, Stuck, find_hang
from trine.tools.cli import main
from trine.tools.reports.hang_table import print_hang
from trine.tools.tracing import RankTrace, environment


def only(hang: Hang) -> Stuck:
    """The one group that stands."""
    assert len(hang.stuck) == 1, hang
    return hang.stuck[0]


def shown(*traces: RankTrace) -> str:
    out = io.StringIO()
    print_hang(find_hang(traces), out)
    return out.getvalue()


def test_a_job_that_ended_well_does_not_hang() -> None:
    hang = find_hang([left(rank, 2, *done(1, rank, 20), end="closed") for rank in range(2)])

    assert not hang.hangs
    assert hang.under_way == []


def test_the_rank_that_did_not_come_is_named_with_what_it_did_last() -> None:
    load = event("load batch", 40, 90, category="io", step=3)
    hang = find_hang(
        [
            left(0, 3, *done(1, 10, 20), begin(2, 50, unit="layers.1"), end="signal"),
            left(1, 3, *done(1, 12, 20), load),
            left(2, 3, *done(1, 11, 20), begin(2, 45, unit="layers.1"), end="signal"),
        ]
    )

    stuck = only(hang)
    assert (stuck.group, stuck.number, stuck.kind) == ("0", 2, "absent")
    assert [(call.rank, call.unit) for call in stuck.calls] == [(2, "layers.1"), (0, "layers.1")]
    (seen,) = stuck.absent
    assert (seen.rank, seen.file, seen.step) == (1, "cut off", 3)
    assert seen.span is not None
    assert seen.span.name == "load batch"
    assert seen.call is not None
    assert (seen.call.number, seen.call.unit, seen.call.through) == (1, "layer", True)
    assert stuck.waited_ns == 45_000
    assert hang.cut_off == [1]


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (begin(2, 30, op="reduce_scatter"), ["operation"]),
        (begin(2, 30, op="reduce_scatter", elements=99), ["operation"]),
        (begin(2, 30, unit="head"), ["unit"]),
        (begin(2, 30, elements=66), ["elements"]),
        (begin(2, 30, dtype="bfloat16"), ["dtype"]),
        (begin(2, 30, unit="head", elements=66), ["unit", "elements"]),
    ],
)
def test_the_first_collective_on_which_ranks_disagree_is_named(
    other: TraceEvent, differs: list[str]
) -> None:
    later = begin(3, 60, unit="head")
    hang = find_hang(
        [left(0, 2, *done(1, 10, 20), begin(2, 30), later), left(1, 2, *done(1, 10, 20), other)]
    )

    stuck = only(hang)
    assert (stuck.number, stuck.kind, stuck.differs) == (2, "disagree", differs)
    assert [call.rank for call in stuck.calls] == [0, 1]


def test_ranks_that_disagreed_are_named_even_if_the_backend_let_them_go_on() -> None:
    first = [*done(1, 10, 20, unit="encoder"), *done(2, 30, 40)]
    second = [*done(1, 10, 20, unit="decoder"), *done(2, 30, 40)]

    hang = find_hang([left(0, 2, *first, end="closed"), left(1, 2, *second, end="closed")])

    assert only(hang).differs == ["unit"]
    assert only(hang).number == 1


def test_sizes_of_what_is_through_are_compared_by_bytes() -> None:
    hang = find_hang(
        [
            left(0, 2, through(1, 10, 20, nbytes=100), end="closed"),
            left(1, 2, through(1, 10, 20, nbytes=96), end="closed"),
        ]
    )

    assert only(hang).differs == ["elements"]


def test_operations_whose_ranks_bring_different_sizes_are_not_compared_by_size() -> None:
    hang = find_hang(
        [
            left(0, 2, through(1, 10, 20, op="broadcast", nbytes=100), end="closed"),
            left(1, 2, through(1, 10, 20, op="broadcast", nbytes=0), end="closed"),
        ]
    )

    assert not hang.hangs


def test_what_a_file_does_not_say_contradicts_nothing() -> None:
    hang = find_hang(
        [
            left(0, 2, *done(1, 10, 20), end="closed"),
            left(1, 2, through(1, 10, 20, unit="", dtype=""), end="closed"),
        ]
    )

    assert not hang.hangs


def test_a_rank_without_a_file_is_named_for_what_nobody_was_through_with() -> None:
    hang = find_hang([left(rank, 3, *done(1, 10, 20), begin(2, 30)) for rank in range(2)])

    stuck = only(hang)
    assert hang.no_file == [2]
    assert (stuck.number, stuck.kind, stuck.no_file, stuck.absent) == (2, "absent", [2], [])


def test_a_rank_that_made_no_collective_is_missing_in_the_first_one() -> None:
    hang = find_hang([left(0, 2, begin(1, 10)), left(1, 2, event("load batch", 0, 500))])

    stuck = only(hang)
    assert [seen.rank for seen in stuck.absent] == [1]
    assert stuck.absent[0].call is None


def test_a_group_that_lists_its_ranks_misses_the_one_that_only_used_others() -> None:
    pair = [0, 1]
    hang = find_hang(
        [
            left(0, 3, *done(1, 10, 20), begin(1, 30, group="pair", ranks=pair)),
            left(1, 3, *done(1, 10, 20)),
            left(2, 3, *done(1, 10, 20)),
        ]
    )

    stuck = only(hang)
    assert stuck.group == "pair"
    assert [seen.rank for seen in stuck.absent] == [1]


def test_the_ranks_of_a_group_are_found_where_a_step_begins_if_the_start_was_dropped() -> None:
    pair = [0, 1]
    hang = find_hang(
        [
            left(
                0,
                3,
                begin(6, 30, group="pair", step=4),
                begin(7, 40, group="pair", step=5, ranks=pair),
                dropped=9,
            ),
            left(1, 3, event("load batch", 0, 500)),
            left(2, 3, event("load batch", 0, 500)),
        ]
    )

    assert [seen.rank for seen in only(hang).absent] == [1]


def test_a_cut_off_file_does_not_count_against_a_rank_if_another_was_through() -> None:
    hang = find_hang(
        [
            left(0, 2, *done(1, 10, 20), *done(2, 30, 40), begin(3, 50)),
            left(1, 2, *done(1, 10, 20), begin(2, 30)),
        ]
    )

    assert only(hang).number == 3


def test_what_a_full_recorder_dropped_is_not_missing() -> None:
    hang = find_hang(
        [
            left(0, 2, begin(1, 10), *done(2, 30, 40), end="closed"),
            left(1, 2, through(2, 30, 40), dropped=3, end="closed"),
        ]
    )

    assert hang.stuck == []


def test_a_rank_killed_within_a_collective_to_which_all_came_is_named() -> None:
    hang = find_hang(
        [
            left(0, 2, begin(1, 10), wait(1, 12, 4_000), end="closed"),
            left(1, 2, begin(1, 11)),
        ]
    )

    stuck = only(hang)
    assert stuck.kind == "killed"
    assert [seen.rank for seen in stuck.absent] == [1]


def test_what_was_under_way_as_all_recordings_ended_is_no_hang() -> None:
    hang = find_hang([left(rank, 2, *done(1, 10, 20), begin(2, 30)) for rank in range(2)])

    assert not hang.hangs
    assert [each.number for each in hang.under_way] == [2]


def test_a_recording_that_stopped_while_training_went_on_is_no_hang() -> None:
    hang = find_hang(
        [
            left(0, 2, *done(1, 10, 20), begin(2, 30), end="closed"),
            left(1, 2, *done(1, 10, 20), end="closed"),
        ]
    )

    assert not hang.hangs


def test_all_came_and_it_did_not_end_is_a_hang_once_somebody_gave_up() -> None:
    hang = find_hang(
        [
            left(0, 2, begin(1, 10), wait(1, 12, 4_000), end="closed"),
            left(1, 2, begin(1, 11), end="closed"),
        ]
    )

    assert only(hang).kind == "unfinished"


def test_of_two_groups_the_one_that_keeps_the_other_waiting_is_the_cause() -> None:
    """Rank 2 did not come to "b"; rank 1 waits there, so rank 0 waits in vain in "a"."""
    a, b = done(1, 1, 2, group="a"), done(1, 3, 4, group="b")
    traces = [
        left(0, 3, *a, begin(2, 10, group="a")),
        left(1, 3, *a, *b, begin(2, 20, group="b")),
        left(2, 3, *b),
    ]

    hang = find_hang(traces)

    assert [(each.group, each.because_of) for each in hang.stuck] == [("b", []), ("a", ["b"])]
    assert hang.cycle == []
    assert "because rank 1 waits in #2 of group b, all_gather of layer" in shown(*traces)


def test_two_groups_that_wait_for_each_other_are_a_cycle() -> None:
    started = [*done(1, 1, 2, group="a"), *done(1, 3, 4, group="b")]
    traces = [
        left(0, 2, *started, begin(2, 10, group="a", op="all_reduce")),
        left(1, 2, *started, begin(2, 12, group="b")),
    ]

    hang = find_hang(traces)

    assert hang.cycle == ["a", "b"]
    assert [(each.group, each.because_of) for each in hang.stuck] == [("a", ["b"]), ("b", ["a"])]
    assert "group a, which waits for group b, which waits for group a." in shown(*traces)


def test_the_text_says_who_where_and_since_when() -> None:
    text = shown(
        left(0, 3, *done(1, 10, 20), begin(2, 50, unit="layers.1"), wait(2, 60, 5_000_050)),
        left(1, 3, *done(1, 12, 20), event("load batch", 40, 90, step=3)),
    )

    assert (
        text
        == """\
2 of 3 ranks, no file of rank 2
no end in the files of ranks 0, 1: killed, or still running

Ranks 1, 2 did not come to #2 of group 0, all_gather of layers.1 (72 elements of float32):
  rank 0 came 5.00 s before the recordings end; waiting failed
  rank 1 on host-a in step 3
    last finished 'load batch', 40.0 us after the first rank came
    last began #1 of group 0, all_gather of layer, which is through
    its file is cut off: it was killed, or still runs; its last moments may be missing
  rank 2: no file, so look at what was printed there

If the job still runs, ask again: the same answer means that it hangs.
"""
    )


def test_ranks_that_ask_for_the_same_share_a_line() -> None:
    text = shown(
        *(left(rank, 5, begin(1, 10 + rank, unit="a")) for rank in range(4)),
        left(4, 5, begin(1, 9, unit="b")),
    )

    assert text.splitlines()[-6:-3] == [
        "Ranks disagree at #1 of group 0, in unit:",
        "  rank 4: all_gather of b (72 elements of float32)",
        "  ranks 0-3: all_gather of a (72 elements of float32)",
    ]


def test_names_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\n\u202e"
    text = shown(
        left(0, 2, begin(1, 10, unit=evil, group=evil, op=evil, dtype=evil)),
        left(1, 2, event(evil, 0, 5, unit=evil)),
    )

    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\x1b[2J\n\u202e" in text


def run(*args: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["trace", "hang", *map(str, args)])
    return result.exit_code, result.output


def test_the_command_exits_with_1_if_something_hangs_and_0_if_not(tmp_path: Path) -> None:
    for rank in range(2):
        write_rank_file(tmp_path / "well", *done(1, 10, 20), rank=rank, world_size=2)
        second = begin(2, 30, unit=f"unit {rank}")
        write_rank_file(tmp_path / "stuck", *done(1, 10, 20), second, rank=rank, world_size=2)

    assert run(tmp_path / "well")[0] == 0
    status, output = run(tmp_path / "stuck")
    assert status == 1
    assert "Ranks disagree at #2 of group 0, in unit:" in output
    status, output = run(tmp_path / "stuck", "--json")
    data = json.loads(output)
    assert (status, data["format"], data["version"]) == (1, "trine-hang", 1)
    assert data["hangs"] is True
    assert data["stuck"][0]["differs"] == ["unit"]


def test_a_file_that_cannot_be_read_is_said_and_the_others_are_looked_at(tmp_path: Path) -> None:
    write_rank_file(tmp_path, begin(1, 10), rank=0, world_size=2)
    (tmp_path / "trace-rank00001.trine").touch()

    status, output = run(tmp_path)

    assert status == 1
    assert "trace-rank00001.trine is empty" in output
    assert "Rank 1 may have not come to #1 of group 0" in output


def test_the_file_of_an_earlier_run_is_not_taken_for_that_of_a_rank_that_died_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "perf_counter_ns", lambda: 1_000 * US)
    write_rank_file(tmp_path, *done(1, 1_010, 1_020), rank=1, world_size=2)
    monkeypatch.setattr(environment, "perf_counter_ns", lambda: 31_001_020 * US)
    write_rank_file(tmp_path, begin(1, 31_001_030), rank=0, world_size=2)

    _, output = run(tmp_path)

    assert "trace-rank00001.trine is of an earlier run: it ended 31.0 s before" in output
    assert "Rank 1 may have not come to #1 of group 0" in output


def test_nothing_to_read_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "trace-rank00001.trine").touch()

    status, output = run(tmp_path)

    assert status == 2
    assert output.startswith("Error: ")
    assert len(output.splitlines()) == 1
