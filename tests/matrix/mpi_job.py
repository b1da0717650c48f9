"""For tests that are run by every rank of a job: `mpiexec -n 3 python -m pytest --with-mpi`.

A conftest.py imports the names below. Without `--with-mpi` the tests skip. MPI would wait for
ever for a rank that has failed, so that every test ends in a barrier, and a rank that fails
ends the job. Only the first rank writes what pytest writes; what the first rank to fail has
to report comes before anything that follows from it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.matrix.plugin import note_launch
from trine.distributed import destroy_process_group, init_process_group
from trine.distributed.launchers import read_launch

__all__ = ["in_step", "job", "pytest_configure", "pytest_runtest_logreport"]

TIMEOUT_S = 30
GRACE_S = 2.0  # for ranks that fail for the same reason to say so
_folders: list[Path] = []  # of the job that runs, which all of its ranks see


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let one rank speak."""
    launch = read_launch() if config.getoption("with_mpi", default=False) else None
    if launch is not None and launch.rank:
        plugins = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        nowhere = Path(os.devnull).open("w")  # noqa: SIM115  # open until this process ends
        plugins.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest) -> Iterator[None]:
    """The process group of all ranks, over MPI."""
    if not request.config.getoption("with_mpi", default=False):
        pytest.skip("run by the ranks of a job: nox -s tests_mpi")
    init_process_group("mpi", timeout=timedelta(seconds=TIMEOUT_S))
    shared = [tempfile.mkdtemp(prefix="trine-job-")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(shared)
    _folders.append(Path(shared[0]))
    yield
    destroy_process_group()
    shutil.rmtree(_folders.pop(), ignore_errors=True)


@pytest.fixture(autouse=True)
def in_step(job: None) -> Iterator[None]:
    """No rank begins another test before all have ended this one."""
    note_launch("mpi", dist.get_world_size())
    yield
    dist.barrier()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End the job when a test fails on this rank."""
    if report.outcome != "failed" or not _folders:
        return
    from mpi4py import MPI

    who = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    try:
        (_folders[0] / "failed").touch(exist_ok=False)
    except OSError:  # another rank was first, has the word, and ends the job
        time.sleep(GRACE_S / 2)
        print(f"{who} failed as well: {report.nodeid}", file=sys.stderr, flush=True)
        time.sleep(10 * GRACE_S)
    else:
        head = f" {report.nodeid} failed first on {who} "
        print(f"\n{head:=^100}\n{report.longreprtext}\n", file=sys.stderr, flush=True)
        time.sleep(GRACE_S)
        shutil.rmtree(_folders[0], ignore_errors=True)
    MPI.COMM_WORLD.Abort(1)
