"""The table of a run of the matrix, from files written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.matrix.records import append
from tests.matrix.table import HEAD, write_table


def write(file: Path, backend: str, *records: dict[str, Any]) -> None:
    for record in ({"backend": backend, "torch": "2.13.0"}, *records):
        append(file, **record)


def of_test(name: str, outcome: str, ranks: int = 0, seconds: float = 1.0) -> list[dict[str, Any]]:
    """What the plugin writes about a test that begins and ends."""
    ended = {"test": name, "outcome": outcome, "ranks": ranks, "seconds": seconds}
    return [{"test": name, "outcome": "started"}, ended]


def rows(folder: Path) -> list[tuple[str, ...]]:
    """The table's cells, without its head and the torch of each row."""
    head, _, *lines = write_table(folder).splitlines()
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in (head, *lines)]
    assert cells[0] == HEAD
    return [(backend, *others) for backend, _, *others in cells[1:]]


def test_tests_are_summed_by_backend_and_ranks(tmp_path: Path) -> None:
    write(
        tmp_path / "0.jsonl",
        "gloo",
        {"started": True},
        {"collected": 5},
        *of_test("a", "passed", 2, 30.0),
        *of_test("b", "failed", 2, 31.4),
        *of_test("c", "passed", 4),
        *of_test("d", "passed"),
        *of_test("e", "skipped", 0, 0.0),
        {"ended": "failed"},
    )
    write(
        tmp_path / "1.jsonl",
        "mpi (MPICH)",
        {"started": True},
        {"collected": 1},
        *of_test("a", "passed", 2, 3700.0),
        {"ended": "passed"},
    )

    assert rows(tmp_path) == [
        ("gloo", "none", "1", "0", "1", "0:01", ""),
        ("gloo", "2", "1", "1", "0", "1:01", ""),
        ("gloo", "4", "1", "0", "0", "0:01", ""),
        ("gloo", "all", "3", "1", "1", "1:03", "session failed"),
        ("mpi (MPICH)", "2", "1", "0", "0", "61:40", ""),
        ("mpi (MPICH)", "all", "1", "0", "0", "61:40", ""),
        ("all", "", "4", "1", "1", "62:43", ""),
    ]
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == write_table(tmp_path)


@pytest.mark.parametrize(
    ("records", "remark"),
    [
        ([], "did not run"),
        ([{"started": True}, {"skipped": "no GPU"}], "skipped: no GPU"),
        ([{"started": True}], "stopped before its end"),
        (
            [{"started": True}, {"collected": 0}, {"error": "no test had ranks"}],
            "no test had ranks",
        ),
    ],
)
def test_a_session_without_tests_is_not_left_out(
    tmp_path: Path, records: list[dict[str, Any]], remark: str
) -> None:
    write(tmp_path / "0.jsonl", "nccl", *records)

    assert rows(tmp_path)[0] == ("nccl", "", "", "", "", "", remark)


def test_a_test_that_does_not_end_has_failed_and_those_after_it_are_missed(tmp_path: Path) -> None:
    started = {"test": "b", "outcome": "started"}
    write(
        tmp_path / "0.jsonl",
        "gloo",
        {"started": True},
        {"collected": 4},
        *of_test("a", "passed", 2),
        started,
        {"ended": "failed"},
    )

    *_, of_session, _ = rows(tmp_path)
    assert of_session[1:5] == ("all", "1", "1", "0")
    assert of_session[-1] == "did not end: b; 2 tests not reached; session failed"


def test_a_test_is_counted_once_for_each_run_and_fails_if_it_does_on_any_rank(
    tmp_path: Path,
) -> None:
    start, passed = of_test("a", "passed", 2)
    failed = passed | {"outcome": "failed"}
    runs = [{"collected": 1}, start, passed, {"collected": 1}, start, failed, passed]
    write(tmp_path / "0.jsonl", "mpi", {"started": True}, *runs, {"ended": "failed"})

    assert rows(tmp_path)[0][:4] == ("mpi", "2", "1", "1")


def test_without_a_run_there_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run nox -t matrix first"):
        write_table(tmp_path)
