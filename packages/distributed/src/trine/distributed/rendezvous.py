"""Where the ranks of a job find each other, and what is said when they do not.

At the address that the launcher gives; or, where it gives none and all ranks are on one host,
at a port that rank 0 finds and writes into a file that only this job knows.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch's stubs

from trine.core import TrineError
from trine.distributed.launchers import Launch

__all__ = ["join"]

_ANSWER_S = 1.0  # for a store to answer, beyond the time it may take to appear
_LOOK_S = 0.02  # between looks for the file

_worlds = itertools.count()  # that this process has joined


def join(launch: Launch, backend: str, timeout: timedelta | None) -> None:
    """Make the ranks of the job torch's default process group.

    Raises:
        TrineError: if the port is taken, or nobody answers in time.
        ValueError: if nothing says where to meet.
    """
    limit = timeout or dist.default_pg_timeout
    if launch.by_variables:
        _join_as_torch_does(launch, backend, timeout, limit)
        return
    if launch.address is not None and launch.port is not None:
        store = _meet_at(launch, launch.address, launch.port, limit)
    elif launch.job is not None:
        store = _meet_on_this_host(launch, launch.job, limit)
    else:
        raise ValueError(
            f"{launch.launcher} started ranks on several hosts and does not say where they meet. "
            "Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, or "
            "install mpi4py (trine-distributed[mpi]) and ask for backend='mpi'."
        )
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )


def _join_as_torch_does(
    launch: Launch, backend: str, timeout: timedelta | None, limit: timedelta
) -> None:
    assert launch.address is not None
    assert launch.port is not None
    try:
        if not _opens(launch):
            _await_answer(launch, launch.address, launch.port, limit)
        meeting = dist.rendezvous("env://", timeout=limit)  # type: ignore[attr-defined]  # torch's stubs
        store, rank, size = next(iter(meeting))
        store.set_timeout(limit)
        # A store that outlives a world still knows where its ranks listened, and gloo would
        # call them there. torch itself puts all worlds of a process into one drawer.
        if world := next(_worlds):
            store = dist.PrefixStore(f"world {world}", store)  # type: ignore[attr-defined]  # torch's stubs
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except dist.DistNetworkError as error:
        raise _explained(launch, launch.address, launch.port, error) from error


def _meet_at(launch: Launch, address: str, port: int, timeout: timedelta) -> Store:
    try:
        if not _opens(launch):
            _await_answer(launch, address, port, timeout)
        store: Store = TCPStore(
            address, port, launch.world_size, is_master=_opens(launch), timeout=timeout
        )
    except dist.DistNetworkError as error:
        raise _explained(launch, address, port, error) from error
    return store


def _explained(launch: Launch, address: str, port: int, error: dist.DistNetworkError) -> TrineError:
    if "EADDRINUSE" in str(error):
        return TrineError(
            f"Port {port} (MASTER_PORT) is taken by another program, so rank {launch.rank} cannot "
            f"open the meeting point of the ranks at {address}:{port}. Set MASTER_PORT to a free "
            "port, or use torchrun --standalone, which picks one."
        )
    return _unreachable(launch, f"{address}:{port}", f"torch said: {str(error).splitlines()[0]}")


def _opens(launch: Launch) -> bool:
    # Where a launcher hosts the store, rank 0 is a guest as well.
    return launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _unreachable(launch: Launch, where: str, why: str) -> TrineError:
    return TrineError(
        f"Rank {launch.rank} of {launch.world_size} could not reach the meeting point of the "
        f"ranks at {where} (MASTER_ADDR, MASTER_PORT): is rank 0 running "
        f"there, is the port its own, and may this machine connect to it? {why}"
    )


def _await_answer(launch: Launch, address: str, port: int, timeout: timedelta) -> None:
    """Return once a store answers where the ranks meet, and never wait longer than allowed.

    torch limits the time until somebody listens there, but then waits without a limit
    for the first answer, which a program of another kind may never give.
    """
    failures: list[Exception] = []

    def greet() -> None:
        try:
            TCPStore(address, port, wait_for_workers=False, timeout=timeout)
        except Exception as error:  # for the thread that waits
            failures.append(error)

    greeter = threading.Thread(target=greet, name="greets the meeting point", daemon=True)
    greeter.start()
    greeter.join(timeout.total_seconds() + _ANSWER_S)
    if greeter.is_alive():
        raise _unreachable(
            launch,
            f"{address}:{port}",
            f"No answer came within {timeout.total_seconds():g} s, as when another program "
            "holds the port. Give rank 0 a free one.",
        )
    if failures:
        raise failures[0]


def _meet_on_this_host(launch: Launch, job: str, timeout: timedelta) -> Store:
    name = hashlib.sha256(job.encode()).hexdigest()[:16]
    file = Path(tempfile.gettempdir()) / f"trine-{os.getuid()}-{name}"
    store: Store
    if launch.rank == 0:
        host = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(f"{host.port}", encoding="ascii")
        beside.replace(file)
        try:
            _wait_for_all(host, launch, timeout)
        finally:
            file.unlink(missing_ok=True)
        store = host
    else:
        store = _join_by(file, launch, timeout)
    return store


def _join_by(file: Path, launch: Launch, timeout: timedelta) -> Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        # A file that a job of the same name has left behind leads nowhere: look again.
        with suppress(OSError, ValueError, dist.DistError):
            port = int(file.read_text(encoding="ascii"))
            store = TCPStore(
                "127.0.0.1",
                port,
                is_master=False,
                timeout=timedelta(seconds=_ANSWER_S),
                wait_for_workers=False,
            )
            store.set_timeout(timeout)
            store.add("trine/joined", 1)
            return store
        time.sleep(_LOOK_S)
    raise TrineError(
        f"Rank {launch.rank} of {launch.world_size} waited {timeout.total_seconds():g} s for rank "
        f"0 of this job ({launch.launcher}) to say where the ranks meet: did rank 0 start, and "
        "does it call init_process_group?"
    )


def _wait_for_all(store: Store, launch: Launch, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while (joined := store.add("trine/joined", 0)) < launch.world_size - 1:
        if time.monotonic() > deadline:
            raise TrineError(
                f"Only {joined + 1} of {launch.world_size} ranks of this job ({launch.launcher}) "
                f"have come within {timeout.total_seconds():g} s. Does every rank call "
                "init_process_group?"
            )
        time.sleep(_LOOK_S)
