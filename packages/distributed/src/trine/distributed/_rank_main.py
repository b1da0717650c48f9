"""What runs in a process that `run_on_ranks` started: one rank, from environment to report.

It must always end: by reporting, by being stopped, or because the launching process is
gone. It must never print; what went wrong travels in the report.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trine.core import TrineError
from trine.distributed._mpiexec import StandIn
from trine.distributed.process_groups import destroy_process_group, init_process_group
from trine.distributed.watch import current_watch

__all__ = [
    "ENDED_FROM_OUTSIDE",
    "STACKS_SIGNAL",
    "Assignment",
    "BodyReference",
    "Failed",
    "Finished",
    "failure",
    "rank_main",
]

STACKS_SIGNAL = signal.SIGUSR1
"""Asks a rank to write where each of its threads stands."""

ENDED_FROM_OUTSIDE = 113
"""Exit code of a rank that ends because mpiexec or the launching process has ended it."""


@dataclass(frozen=True)
class BodyReference:
    """Where a function is written, so that a fresh process can find it again.

    Attributes:
        module: the name its module has in the launching process.
        qualname: the function's name inside the module.
        file: the module's file, for modules that cannot be imported by name, such as
            the test modules that pytest loads with `--import-mode=importlib`.
    """

    module: str
    qualname: str
    file: str | None

    @classmethod
    def to(cls, body: Callable[..., object]) -> BodyReference:
        """The reference to `body`.

        Raises:
            TypeError: if it cannot be called.
            ValueError: if another process could not find it under its name.
        """
        if not callable(body):
            raise TypeError(f"The body must be a function, got {type(body).__name__}.")
        name, qualname = getattr(body, "__module__", None), getattr(body, "__qualname__", None)
        module = sys.modules.get(name) if name else None
        if name is None or module is None or qualname is None or _look_up(module, qualname) != body:
            raise ValueError(
                f"{qualname or body!r} cannot be found by name in another process. The body must "
                "be a function at the top level of a module, not a lambda, a nested function or a "
                "bound method; hand what it needs to run_on_ranks as arguments."
            )
        file = getattr(module, "__file__", None)
        if name == "__main__" and file is None:
            raise ValueError(
                f"{qualname} was defined interactively, so another process cannot read it. "
                "Put it into a file and import it from there."
            )
        return cls(name, qualname, None if file is None else str(Path(file).resolve()))

    def load(self) -> Callable[..., Any]:
        """The function, from its module in this process."""
        found: Callable[..., Any] = _look_up(self._module(), self.qualname)
        return found

    def _module(self) -> ModuleType:
        try:
            module = importlib.import_module(self.module)
        except ImportError:
            if self.file is None:
                raise
        else:
            # An unrelated module may own the name here: a folder of tests on sys.path.
            file = getattr(module, "__file__", None)
            if self.file is None or (file and str(Path(file).resolve()) == self.file):
                return module
        # The launching process's script must not run as one again: it would launch.
        name = "__mp_main__" if self.module == "__main__" else self.module
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # The module's classes pickle by this name, which takes the parents as well.
        for parent in _parents(self.module):
            sys.modules.setdefault(parent, ModuleType(parent))
        sys.modules[self.module] = sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def _parents(module: str) -> list[str]:
    names = module.split(".")
    return [".".join(names[:n]) for n in range(1, len(names))]


def _look_up(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


@dataclass(frozen=True)
class Assignment:
    """What one rank is to do.

    Attributes:
        body: the function to run.
        args: its arguments, pickled; they may need the body's module to unpickle.
        backend: of the process group that runs around it.
        environ: the whole environment, the launcher's variables included. A process made
            by a fork server would otherwise see the one the server started with.
        stand_in: of the rank, if mpiexec has started one.
    """

    body: BodyReference
    args: bytes
    backend: str
    environ: dict[str, str]
    stand_in: StandIn | None = None


@dataclass(frozen=True)
class Finished:
    """The body returned; its result, pickled."""

    result: bytes


@dataclass(frozen=True)
class Failed:
    """The body, or the way to it or from it, raised.

    Attributes:
        at_ns: when, on the monotonic clock that all processes of a machine share.
        summary: the exception in one line.
        traceback: the traceback, as it would be printed.
        explanation: the message of a `TrineError`, which can be acted on without the
            traceback; empty for other exceptions.
    """

    at_ns: int
    summary: str
    traceback: str
    explanation: str = ""


def rank_main(
    assignment: Assignment, reports: connection.Connection, stacks: connection.Connection
) -> None:
    """Be one rank: join the world, run the body, leave, report.

    Args:
        assignment: what to do.
        reports: where one `Finished` or `Failed` goes.
        stacks: where the stacks go when `STACKS_SIGNAL` arrives.
    """
    # Ctrl-C reaches every process of a terminal; the launching process decides for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=stacks.fileno(), all_threads=True)
    watcher = threading.Thread(
        target=_end_with_launching_process, args=(assignment.stand_in,), daemon=True
    )
    watcher.start()
    os.environ.clear()
    os.environ.update(assignment.environ)
    if assignment.stand_in is not None:
        os.environ.update(assignment.stand_in.variables())
    try:
        body = assignment.body.load()
        args = pickle.loads(assignment.args)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        # Ranks share the cores already; more threads each would only fight over them.
        torch.set_num_threads(int(threads) if threads.isdecimal() else 1)
        init_process_group(assignment.backend)
        result = pickle.dumps(body(*args))
        # Now, while it can be told that a pipe is closed or a disk full.
        _flush()
        destroy_process_group()
    except BaseException as error:  # sys.exit() in a body is a rank that gave no result
        reports.send(failure(error))
        watch = current_watch()
        if watch is not None:
            watch.tell(error)
        _excuse()
        with suppress(OSError, ValueError):
            _flush()
        os._exit(1)  # destroying the group could wait for ranks that will never come
    reports.send(Finished(result))
    if assignment.stand_in is not None:
        _leave_mpi()


def _excuse() -> None:
    """Let ranks that watch this one over MPI know that its end has been reported."""
    mpi = sys.modules.get("trine.distributed.mpi")
    if mpi is not None:
        mpi.end_is_reported()


def _leave_mpi() -> None:
    """Do what MPI does when a program ends, which a process of multiprocessing skips."""
    mpi = sys.modules.get("trine.distributed.mpi")
    if mpi is None:  # torch's own MPI, which ends in C's exit()
        ctypes.pythonapi.Py_Exit(0)
    else:
        # Not the same way: to take down an interpreter with torch in it costs a second.
        mpi.leave()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def failure(error: BaseException) -> Failed:
    """What an exception that was just caught has to tell in another process."""
    at_ns = time.monotonic_ns()
    below = error.__traceback__.tb_next if error.__traceback__ else None
    lines = traceback.format_exception(type(error), error, below or error.__traceback__)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    explanation = str(error) if isinstance(error, TrineError) else ""
    return Failed(at_ns, summary, "".join(lines), explanation)


def _end_with_launching_process(stand_in: StandIn | None) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    lifelines = [] if stand_in is None else [stand_in.lifeline]
    connection.wait([parent.sentinel, *lifelines])
    os._exit(ENDED_FROM_OUTSIDE)
