"""The job that mpiexec started: where its ranks meet, and that all of it ends if one fails.

MPI itself waits for ever for a rank that has gone. So a rank that raises ends the job, as does
one whose neighbour has ended without a word; a rank that leaves says goodbye to the others and
waits for them, within the timeout; and whatever is left of the job in shared memory is nobody's
any more once all have mapped it.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType

from mpi4py import MPI
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # torch's stubs

from trine.core import TrineError
from trine.distributed.mpi.neighbour import Neighbour
from trine.distributed.mpi.progress import Progress
from trine.distributed.uncaught import uncaught

__all__ = ["Job", "job"]

_ABORTED = os.EX_SOFTWARE  # a status that is not a rank's own
_SEGMENT = re.compile(r" (/dev/shm/(?:mpich|sm_segment)[^ ]*)$", re.MULTILINE)


class Job:
    """This process's part of the job.

    Attributes:
        progress: drives this process's operations.
        timeout: how long to wait for other ranks, also at the end.
    """

    def __init__(self, timeout: timedelta) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise TrineError(
                "This MPI was started without thread support (MPI_THREAD_MULTIPLE), which moving "
                "data behind the computation needs. Leave mpi4py.rc.thread_level as it is, or "
                "take an MPI that was built with it."
            )
        self.timeout = timeout
        self.progress = Progress()
        self._world = MPI.COMM_WORLD.Dup()
        self._left = False
        self._process = os.getpid()
        self._disown_shared_memory()
        self._hook = sys.excepthook
        self._neighbour = Neighbour(self._world, self._is_gone)
        atexit.register(self.leave)

    def _disown_shared_memory(self) -> None:
        """Take the names of shared memory away, so that it goes when the last process does.

        MPICH leaves its segments behind when it is aborted or a rank is killed, Open MPI when
        its mpiexec is.
        """
        self._world.Barrier()
        with suppress(OSError):
            for name in set(_SEGMENT.findall(Path("/proc/self/maps").read_text())):
                with suppress(OSError):
                    Path(name).unlink()

    def end_if_raised(self) -> None:
        """Let an exception that nobody catches end the whole job, after it was printed."""
        if self._world.size > 1 and sys.excepthook != self._raised:
            self._hook = sys.excepthook
            sys.excepthook = self._raised

    def meeting_point(self, timeout: timedelta) -> Store:
        """A store for all ranks, on a port that rank 0 finds; nothing has to be configured."""
        world = self._world
        if world.size == 1:
            return HashStore()
        one_host = world.Split_type(MPI.COMM_TYPE_SHARED)
        local = one_host.size == world.size
        one_host.Free()
        if world.rank == 0:
            host = "127.0.0.1" if local else socket.getfqdn()
            store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            world.bcast((host, store.port))
            return store
        host, port = world.bcast(None)
        return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)

    def leave(self) -> None:
        """Say goodbye: returns when every rank has, or ends the job if one does not come."""
        if self._left or os.getpid() != self._process:  # a fork is no rank
            return
        self._left = True
        unfinished = self.progress.drain(self.timeout.total_seconds())
        why = self.progress.broken
        if unfinished:
            why = f"{', '.join(unfinished)} was still under way when the program ended."
        if why is None and self._world.size > 1:
            why = self._await_the_others()
        if why is not None:
            self._end_all(f"{why} Ending the job.", _ABORTED)
        self._neighbour.leave()

    def end_is_reported(self) -> None:
        """Let no other rank end the job, or say anything, because this one ends."""
        self._neighbour.job_ends()

    def _await_the_others(self) -> str | None:
        request = self._world.Ibarrier()
        deadline = time.monotonic() + self.timeout.total_seconds()
        pause_s = 1e-5
        while not request.Test():
            if time.monotonic() > deadline:
                return (
                    f"Rank {self._world.rank} of {self._world.size} has ended, and another has "
                    f"not after {self.timeout.total_seconds():g} s: it was stopped, or waits."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-2)
        return None

    def _is_gone(self, rank: int) -> None:
        waits = " and ".join(self.progress.under_way()[:2])
        self._end_all(
            f"Rank {rank} of {self._world.size} has ended before its program did, and without a "
            "word: it was killed, or called os._exit. "
            + (f"{waits} waits for it. " if waits else "")
            + "Ending the job.",
            _ABORTED,
        )

    def _raised(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._hook(kind, error, traceback)
        if os.getpid() != self._process or not uncaught(error):
            return
        where = f"Rank {self._world.rank} of {self._world.size}"
        self._end_all(f"{where} raised {kind.__name__}. Ending the job.", 1)

    def _end_all(self, message: str, status: int) -> None:
        self._neighbour.job_ends()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            print(f"trine mpi: {message}", file=sys.stderr, flush=True)
        # mpiexec forwards what was written, if it is given the time.
        time.sleep(0.1)
        MPI.COMM_WORLD.Abort(status)
        os._exit(status)


@cache
def job() -> Job:
    """The one of this process; its timeout is set by whoever starts the process group."""
    return Job(timedelta(minutes=30))
