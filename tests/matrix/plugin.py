"""A pytest plugin that counts what really ran on ranks, and writes it down for the table.

Loaded with `-p tests.matrix.plugin`. A run in which no test had ranks on its backend
(`TRINE_TEST_BACKEND`) fails: tests that skip themselves must not pass for a backend that
works. With `--results FILE` every test appends lines to that file as it starts and as it ends,
so that nothing is lost when the process is ended in the middle. With `-n` (pytest-xdist) the
workers write, and hand their counts to the process that started them, which judges.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.matrix.records import append

__all__ = ["note_launch"]

_launches: list[tuple[str, int]] = []  # of the test that runs now


def note_launch(backend: str, world_size: int) -> None:
    """Say that the test that runs now had ranks; what `run_on_ranks` starts is known without.

    Args:
        backend: `gloo`, `mpi` or `nccl`.
        world_size: how many ranks there were.
    """
    _launches.append((backend, world_size))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--results`."""
    parser.getgroup("ranks").addoption(
        "--results", type=Path, metavar="FILE", help="append what each test did to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start to count."""
    # An option of pytest-mpi, where that is installed: this process is a rank itself.
    is_rank = config.getoption("with_mpi", default=False)
    backend = os.environ.get("TRINE_TEST_BACKEND", "gloo")
    counter = _Counter(config, backend, is_rank=is_rank)
    config.pluginmanager.register(counter, "tests-on-ranks")


class _Counter:
    """Counts the tests with ranks on a backend.

    Args:
        config: of this process.
        backend: the one that the run is about.
        is_rank: whether this process is one rank of a job. The first rank then writes for
            all, and the others only what fails on them.
    """

    def __init__(self, config: pytest.Config, backend: str, *, is_rank: bool) -> None:
        self._backend, self._file = backend, config.getoption("--results")
        # What pytest-xdist gives to its workers, and to nobody else.
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._worker = "" if worker is None else worker["workerid"]
        self._has_workers = worker is None and bool(config.getoption("numprocesses", default=None))
        self._executed = 0
        self._outcome, self._seconds = "passed", 0.0
        self._patch = pytest.MonkeyPatch()
        self._is_rank = is_rank
        self._writes_all = True

    def pytest_sessionstart(self) -> None:
        """Listen to launches."""
        from trine.distributed import testing
        from trine.distributed.launchers import read_launch

        if self._is_rank:
            launch = read_launch()
            self._writes_all = launch is None or launch.rank == 0
        start = vars(testing)["launch"]

        def start_and_note(
            body: Any, world_size: int, args: Any, *, backend: str, **others: Any
        ) -> Any:
            try:
                results = start(body, world_size, args, backend=backend, **others)
            except testing.RanksFailed:  # they ran; other errors come before they do
                note_launch(backend, world_size)
                raise
            note_launch(backend, world_size)
            return results

        # Below run_on_ranks, which test modules have imported by its name.
        self._patch.setattr(testing, "launch", start_and_note)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note how many tests there will be."""
        if self._writes_all and self._worker in ("", "gw0"):  # each worker collects all
            self._write(collected=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        if self._has_workers:
            return
        _launches.clear()
        self._outcome, self._seconds = "passed", 0.0
        if self._writes_all:
            self._write(test=nodeid, outcome="started")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has ended: its setup, its call or its teardown."""
        if self._has_workers:
            return
        self._seconds += report.duration
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome = report.outcome
        ended = report.when == "teardown"
        if ended and self._outcome != "skipped" and self._ranks():
            self._executed += 1
        # A failure at once: a rank of a job does not outlive its report.
        if report.outcome == "failed" or (ended and self._writes_all):
            self._write(
                test=report.nodeid,
                outcome=self._outcome,
                ranks=self._ranks(),
                seconds=round(self._seconds, 3),
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that proves nothing."""
        self._patch.undo()
        if self._worker:
            vars(session.config)["workeroutput"]["executed"] = self._executed
        elif not self._executed and not session.config.option.collectonly:
            self._write(error=self._nothing())
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended; one that was killed has counted for nothing."""
        self._executed += getattr(node, "workeroutput", {}).get("executed", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was counted."""
        if self._executed:
            terminalreporter.line(f"{self._executed} tests had ranks on {self._backend}.")
        elif not terminalreporter.config.option.collectonly:
            terminalreporter.line(self._nothing(), red=True)

    def _nothing(self) -> str:
        return f"no test had ranks on {self._backend}, so this run shows nothing of it and fails"

    def _ranks(self) -> int:
        return max((size for backend, size in _launches if backend == self._backend), default=0)

    def _write(self, **record: object) -> None:
        if self._file is not None:
            append(self._file, **record)
