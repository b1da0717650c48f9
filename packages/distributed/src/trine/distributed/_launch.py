"""Start ranks as processes of this machine, hear from each, and leave none behind.

The launching process hosts the store in which the ranks meet, on a port that the
system chooses, so that launches never compete for one. It must never wait without a
bound for a rank that was told to stop, and never hide the first failure behind the
ones that followed from it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess, current_process
from typing import Any

import torch.distributed as dist

from trine.core import CUDADevice, TrineError
from trine.distributed._mpiexec import mpiexec
from trine.distributed._rank_main import (
    ENDED_FROM_OUTSIDE,
    STACKS_SIGNAL,
    Assignment,
    BodyReference,
    Failed,
    Finished,
    failure,
    rank_main,
)
from trine.distributed.process_groups import check_backend

__all__ = ["RanksFailed", "check_world_size", "launch", "most_ranks"]

# The fork server imports this once (seconds), each rank is then a fork of it (50 ms). torch
# imports its compiler at the first DTensor or optimizer step; a name that is missing in
# some torch is skipped by the server.
_PRELOAD = ["trine.distributed._rank_main", "trine.distributed.fsdp", "torch._dynamo"]
_START_S = 0.5  # for the start of a rank to end once it is no longer wanted
_GRACE_S = 3.0  # for the ranks that fail because another one did; they ask each other who
_STOP_S = 1.0  # between asking a rank to end and killing it
_STACKS_S = 1.0  # for a rank to write where it stands
_LEAVE_S = 3.0  # for a rank that has reported to leave by itself
_LEAVE_MPI_S = 15.0  # the same, where ranks say goodbye to each other
_MEMORY_PER_RANK = 256 * 2**20  # a process that has imported torch, before any model
_RANKS_PER_CORE = 16


class RanksFailed(TrineError):
    """At least one rank gave no result; reading the message from its top finds the cause.

    Attributes:
        rank: the rank that failed first.
        reason: what happened to it, in one line.
        traceback: its traceback, or its stacks when it ran out of time; may be empty.
        others: what happened to the other ranks, one line each.
        explanation: what the rank said if it raised a `TrineError`, which can be acted on
            without the rest; empty otherwise.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        reason: str,
        traceback: str,
        others: dict[int, str],
        explanation: str = "",
    ) -> None:
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        self.others = others
        self.explanation = explanation
        lines = [f"Rank {rank} of {world_size} {reason}"]
        if traceback:
            lines += ["", traceback.rstrip(), ""]
        lines += [f"Rank {other} {what}" for other, what in sorted(others.items())]
        super().__init__("\n".join(lines))


def most_ranks(backend: str = "gloo") -> int:
    """How many ranks this machine can run at most, by its cores, memory and, for nccl, GPUs."""
    if backend == dist.Backend.NCCL:
        return CUDADevice.count()  # nccl refuses two ranks on one GPU
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min((os.cpu_count() or 1) * _RANKS_PER_CORE, memory // _MEMORY_PER_RANK))


def check_world_size(world_size: int, backend: str) -> None:
    """Refuse a number of ranks that this machine cannot run.

    Raises:
        ValueError: with the most it can run.
    """
    most = most_ranks(backend)
    if not 1 <= world_size <= most:
        has = f"{os.cpu_count()} cores, {CUDADevice.count()} GPUs"
        raise ValueError(
            f"{world_size} ranks were asked for, but this machine ({has}) can run 1 to {most} with "
            f"{backend}. Ask for a number in between, or spread them over machines with torchrun."
        )


def launch(
    body: Callable[..., Any],
    world_size: int,
    args: Sequence[object],
    *,
    backend: str,
    timeout_s: float | None,
) -> list[Any]:
    """Run `body(*args)` on every rank; see `trine.distributed.testing.run_on_ranks`."""
    check_backend(backend)
    check_world_size(world_size, backend)
    if getattr(current_process(), "_inheriting", False):
        raise RuntimeError(
            "A rank reached the launch of its own ranks while it imported the main script. "
            'Put the launch under `if __name__ == "__main__":`.'
        )
    reference = BodyReference.to(body)
    pickled = pickle.dumps(tuple(args))
    if backend == "mpi":
        with mpiexec(world_size) as stand_ins:
            return _run(
                [Assignment(reference, pickled, backend, each.environ, each) for each in stand_ins],
                timeout_s,
            )
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch's stubs miss it
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    assignments = [
        Assignment(reference, pickled, backend, _environ(rank, world_size, store.port))
        for rank in range(world_size)
    ]
    return _run(assignments, timeout_s)


def _run(assignments: Sequence[Assignment], timeout_s: float | None) -> list[Any]:
    """What the ranks return; when this returns or raises, none of them is left."""
    ranks: list[_Rank] = []
    try:
        _start(assignments, ranks)
        _hear(ranks, timeout_s)
        _raise_failures(ranks, timeout_s)
        return _results(ranks)
    finally:
        with _interrupts_held():
            _end(ranks)


class _Rank:
    """One rank, seen from the launching process.

    Args:
        rank: its number.
        process: in which it runs.
        leave_s: how long it may take to leave once it has reported.
        reports: where its outcome comes from.
        stacks: where it writes where it stands.
    """

    def __init__(
        self,
        rank: int,
        process: BaseProcess,
        leave_s: float,
        reports: connection.Connection,
        stacks: connection.Connection,
    ) -> None:
        self.rank = rank
        self.process = process
        self.leave_s = leave_s
        self.outcome: Finished | Failed | None = None
        self._reports, self._stacks = reports, stacks

    @classmethod
    def fork(cls, rank: int, context: BaseContext, assignment: Assignment) -> _Rank:
        """Start one in a new process."""
        heard, reports = context.Pipe(duplex=False)
        read, stacks = context.Pipe(duplex=False)
        # Not a daemon: bodies may start processes of their own, such as data loaders.
        process = context.Process(  # type: ignore[attr-defined]  # each kind of context has it
            target=rank_main, args=(assignment, reports, stacks), name=f"rank {rank}"
        )
        process.start()
        reports.close()
        stacks.close()
        leave_s = _LEAVE_S if assignment.stand_in is None else _LEAVE_MPI_S
        return cls(rank, process, leave_s, heard, read)

    def waitables(self) -> list[Any]:
        """What becomes ready when there is news of a rank that has no outcome yet."""
        return [self.process.sentinel, self._reports] if not self._reports.closed else []

    def hear(self) -> None:
        """Take the report if there is one; note the end of a rank that left without."""
        try:
            # The end is looked at first: a report sent before it is then surely here.
            ended = not self.process.is_alive()
            if self._reports.poll():
                self.outcome = self._reports.recv()
            elif not ended:
                return
        except (EOFError, ConnectionError):
            self.process.join(_STOP_S)
        if self.outcome is None:
            at_ns = time.monotonic_ns()
            if self.process.exitcode not in (ENDED_FROM_OUTSIDE, os.EX_SOFTWARE):
                # Others fail because this one is gone, and may say so before it is noticed.
                at_ns -= 200_000_000
            self.outcome = Failed(at_ns, _how_it_ended(self.process.exitcode), "")
        self._reports.close()

    def result(self) -> Any:
        """What the body returned."""
        assert isinstance(self.outcome, Finished)
        return pickle.loads(self.outcome.result)

    def ask_for_stacks(self) -> None:
        """Make the rank write where it stands."""
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, STACKS_SIGNAL)

    def read_stacks(self) -> str:
        """What it wrote, without the thread that only watches this process."""
        text = b""
        while self._stacks.poll(0.0 if text else _STACKS_S):
            chunk = os.read(self._stacks.fileno(), 2**16)
            if not chunk:
                break
            text += chunk
            time.sleep(0.02)  # faulthandler writes line by line
        blocks = text.decode(errors="replace").split("\n\n")
        return "\n\n".join(b for b in blocks if "_end_with_launching_process" not in b)

    def close(self) -> None:
        """Give the descriptors back."""
        self._reports.close()
        self._stacks.close()
        self.process.close()


def _start(assignments: Sequence[Assignment], ranks: list[_Rank]) -> None:
    """Start one process per assignment and add each to `ranks`.

    The first start waits until the fork server has imported torch: seconds, which Ctrl-C
    must not have to wait for, nor may it leave a rank half started. So a thread starts
    them, undisturbed, and this one can be interrupted.
    """
    failures: list[BaseException] = []
    interrupted = threading.Event()
    done = threading.Event()  # an interrupted join() takes a thread for ended

    def start() -> None:
        try:
            context = _context()
            for rank, assignment in enumerate(assignments):
                if interrupted.is_set():
                    break
                ranks.append(_Rank.fork(rank, context, assignment))
        except BaseException as error:  # for the thread that waits
            failures.append(error)
        finally:
            done.set()

    starter = threading.Thread(target=start, name="starts ranks", daemon=True)
    with _interrupts_held():
        # The thread, and what is started from it, inherit this: no process is hit by a
        # Ctrl-C before it has said how to take it.
        starter.start()
    try:
        done.wait()
    except BaseException:
        with _interrupts_held():
            interrupted.set()
            while not done.wait(_START_S):
                _stop_fork_server()
        raise
    if failures:
        raise failures[0]


def _context() -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    try:
        forkserver.ensure_running()
    except OSError:
        # It listens at a path in the temporary folder, and such paths must be short (about
        # 100 characters). Without it every rank imports torch by itself.
        return multiprocessing.get_context("spawn")
    return context


def _stop_fork_server() -> None:
    """End a fork server that is busy with its imports; the next launch starts a new one."""
    # Nothing public knows its process or ends it before it is done.
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def _environ(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set, a network interface that is always there, and a barrier."""
    environ = dict(os.environ)
    environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: rank 0 opens none
    }
    # No group is returned before all of its ranks are connected. Otherwise a rank with
    # little to do may be gone before another one has reached it, which then fails.
    environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    return environ


def _loopback() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo0" if "lo0" in names else "lo"


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait until the block is over.

    This holds for the calling thread and for the processes that it starts meanwhile.
    """
    resource_tracker.ensure_running()  # starting it later would release the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hear(ranks: list[_Rank], timeout_s: float | None) -> None:
    """Wait until every rank has an outcome, time is up, or a failure has had its grace."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    failed = False
    while waiting := [rank for rank in ranks if rank.outcome is None]:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return
        connection.wait([w for rank in waiting for w in rank.waitables()], left)
        for rank in waiting:
            rank.hear()
        if not failed and any(isinstance(rank.outcome, Failed) for rank in ranks):
            failed = True
            grace_ends = time.monotonic() + _GRACE_S
            deadline = grace_ends if deadline is None else min(deadline, grace_ends)


def _raise_failures(ranks: list[_Rank], timeout_s: float | None) -> None:
    failures = {r.rank: r.outcome for r in ranks if isinstance(r.outcome, Failed)}
    running = [rank for rank in ranks if rank.outcome is None]
    others = {r.rank: "finished." for r in ranks if isinstance(r.outcome, Finished)}
    if failures:
        others |= {rank.rank: "was still running and was stopped." for rank in running}
        order = sorted(failures, key=lambda rank: failures[rank].at_ns)
        others |= {rank: f"failed later: {failures[rank].summary}" for rank in order[1:]}
        first = failures[order[0]]
        reason = f"failed: {first.summary}" if first.traceback else first.summary
        raise RanksFailed(order[0], len(ranks), reason, first.traceback, others, first.explanation)
    if running:
        for rank in running:
            rank.ask_for_stacks()
        stacks = {rank.rank: rank.read_stacks() for rank in running}
        others |= {r.rank: f"had not finished either.\n\n{stacks[r.rank]}" for r in running[1:]}
        first_rank = running[0].rank
        raise RanksFailed(
            first_rank,
            len(ranks),
            f"had not finished after {timeout_s:g} s. Where it stood:",
            stacks[first_rank],
            others,
        )


def _results(ranks: list[_Rank]) -> list[Any]:
    results = []
    for rank in ranks:
        try:
            results.append(rank.result())
        except Exception as error:
            failed = failure(error)
            raise RanksFailed(
                rank.rank,
                len(ranks),
                f"returned what cannot be unpickled in the launching process: {failed.summary}",
                failed.traceback,
                {other.rank: "finished." for other in ranks if other is not rank},
            ) from error
    return results


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}."
    if exitcode == ENDED_FROM_OUTSIDE:
        return "was stopped by mpiexec, as when another rank has ended."
    if exitcode == os.EX_SOFTWARE:  # what a rank ends the job of MPI with
        return "ended the job because of another rank; see what it printed."
    if exitcode is None:
        return "ended before its body returned; see what it printed."
    return f"ended with exit code {exitcode} before its body returned; see what it printed."


def _end(ranks: list[_Rank]) -> None:
    leaving = [r for r in ranks if isinstance(r.outcome, Finished)]
    stopping = [r for r in ranks if not isinstance(r.outcome, Finished)]
    # With one failure, those that have finished may be unable to leave in peace.
    _join(leaving, _STOP_S if stopping else max((r.leave_s for r in leaving), default=0.0))
    for rank in ranks:
        rank.process.terminate()
    _join(ranks, _STOP_S)
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.close()


def _join(ranks: list[_Rank], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
