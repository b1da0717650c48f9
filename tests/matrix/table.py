"""One table of a run of the matrix: backend x torch x ranks, with what passed and what did not.

    python -m tests.matrix.table FOLDER

Reads what the sessions of nox wrote into FOLDER, one file each (see `tests.matrix.records`),
prints the table and writes it there as `table.md`. Nothing is left out: a session that did not
run, or skipped itself, has a row that says so, and a test that started and did not end counts
as failed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.matrix.records import read

__all__ = ["Session", "Sums", "render", "write_table"]

HEAD = ("backend", "torch", "ranks", "passed", "failed", "skipped", "time", "remark")


@dataclass
class Sums:
    """What tests came to.

    Attributes:
        passed: how many did.
        failed: the same.
        skipped: the same.
        seconds: how long they took together.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.seconds + other.seconds,
        )

    def cells(self) -> tuple[str, ...]:
        """As the table shows them."""
        minutes, seconds = divmod(round(self.seconds), 60)
        return str(self.passed), str(self.failed), str(self.skipped), f"{minutes}:{seconds:02}"


@dataclass
class Session:
    """What a session of nox did.

    Attributes:
        backend: on which its tests ran.
        torch: the version.
        by_ranks: sums over the tests that had so many ranks at most on the backend; 0 for those
            that had none.
        remark: what the numbers do not tell; may be empty.
    """

    backend: str
    torch: str
    by_ranks: dict[int, Sums] = field(default_factory=dict)
    remark: str = ""

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]]) -> Session:
        """Understand the lines of its file; the first was written before the session began."""
        session = cls(records[0]["backend"], records[0]["torch"])
        tests: dict[tuple[int, str], dict[str, Any]] = {}
        runs = collected = 0
        told: dict[str, Any] = {}
        for record in records[1:]:
            told |= record
            if "collected" in record:  # a run of pytest begins; it may hold tests of the last one
                runs += 1
                collected += record["collected"]
            elif "test" in record:
                key = runs, record["test"]
                # Several ranks report one test, and one failure is enough.
                if key not in tests or tests[key]["outcome"] != "failed":
                    tests[key] = record
        by_ranks: defaultdict[int, Sums] = defaultdict(Sums)
        for record in tests.values():
            outcome = "failed" if record["outcome"] == "started" else record["outcome"]
            by_ranks[record.get("ranks", 0)] += Sums(
                **{outcome: 1}, seconds=record.get("seconds", 0.0)
            )
        session.by_ranks = dict(sorted(by_ranks.items()))
        unended = [key[1] for key, record in tests.items() if record["outcome"] == "started"]
        session.remark = _remark(told, unended, collected - len(tests))
        return session

    def rows(self) -> list[tuple[str, ...]]:
        """Its part of the table."""
        if not self.by_ranks:
            return [(self.backend, self.torch, "", "", "", "", "", self.remark)]
        rows = [
            (self.backend, self.torch, str(ranks or "none"), *sums.cells(), "")
            for ranks, sums in self.by_ranks.items()
        ]
        return [*rows, (self.backend, self.torch, "all", *self.sums().cells(), self.remark)]

    def sums(self) -> Sums:
        """Over all of its tests."""
        return sum(self.by_ranks.values(), Sums())


def _remark(told: dict[str, Any], unended: Sequence[str], missing: int) -> str:
    """In words, what the counts of a session leave open."""
    if "started" not in told:
        return "did not run"
    said = [f"did not end: {test}" for test in unended]
    if missing > 0:
        said.append(f"{missing} tests not reached")
    if "skipped" in told:
        said.append(f"skipped: {told['skipped']}")
    elif "error" in told:
        said.append(told["error"])
    elif "ended" not in told:
        said.append("stopped before its end")
    elif told["ended"] != "passed":
        said.append("session failed")
    return "; ".join(said)


def render(sessions: Iterable[Session]) -> str:
    """The table, in Markdown that can be read as it is."""
    sessions = list(sessions)
    whole = sum((session.sums() for session in sessions), Sums())
    rows = [row for session in sessions for row in session.rows()]
    rows.append(("all", "", "", *whole.cells(), ""))
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    widths[-1] = len(HEAD[-1])  # remarks can be long, and nothing stands behind them
    numbers = range(2, 7)

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(widths[n]) if n in numbers else cell.ljust(widths[n])
            for n, cell in enumerate(cells)
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - 1) + ":" if n in numbers else "-" * w for n, w in enumerate(widths)]
    return "\n".join(map(line, (HEAD, rule, *rows))) + "\n"


def write_table(folder: Path) -> str:
    """The table of the files in a folder, which is also written there."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"Nothing was written to {folder}: run nox -t matrix first.")
    table = render(Session.of(read(file)) for file in files)
    (folder / "table.md").write_text(table, encoding="utf-8")
    return table


if __name__ == "__main__":
    print(write_table(Path(sys.argv[1])))
