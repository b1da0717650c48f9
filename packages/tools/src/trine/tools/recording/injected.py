"""Record a program that does not know of us; loaded under `trine trace run` after torch.

Nothing here may break the program: what fails is said once, and recording ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final, ParamSpec

from torch.utils.data import get_worker_info

from trine.core import tracing
from trine.core.tracing import TraceEvent
from trine.tools.recording import torch_collectives, torch_compute
from trine.tools.recording.launch import find_rank
from trine.tools.recording.profiler import Profile, profile
from trine.tools.recording.window import Window

__all__ = ["MEMORY", "OUT", "STEPS", "Session", "start"]

P = ParamSpec("P")

OUT: Final = "TRINE_TRACE_OUT"
STEPS: Final = "TRINE_TRACE_STEPS"
MEMORY: Final = "TRINE_TRACE_MEMORY"
_TAKEN: Final = "TRINE_TRACE_TAKEN"


def start() -> None:
    """Have this process recorded from the first thing it does."""
    steps = os.environ.get(STEPS)
    window = Window.parse(steps) if steps else None
    session = Session(Path(os.environ[OUT]), window, memory=bool(os.environ.get(MEMORY)))
    tracing.add_sink(session)
    torch_compute.install(session)
    torch_collectives.install(session)


class Session:
    """The recording of this process, which begins with the first event.

    A process that only starts others, such as one that spawns the ranks, has none. That is
    also how late the rank must be known.
    """

    def __init__(self, directory: Path, schedule: Window | None, *, memory: bool = False) -> None:
        self._directory = directory
        self._schedule = schedule
        self._memory = memory
        self._profile: Profile | None = None
        self._rank = (0, 1)
        self._pid = 0
        self._failed = False
        self.compute = torch_compute.OwnSpans(self)

    def record(self, event: TraceEvent) -> None:
        """What the program reports itself, by Trine's own spans."""
        began = self._pid != os.getpid()
        running = self.running()
        if began and running is not None:
            running.report(event)  # the sink that will take the next ones came too late for it
        # The engine tells in instants what its units do, and times no computation.
        if event.kind == "span" and event.category == "compute":
            self.compute.leave_to_program()

    def running(self) -> Profile | None:
        """The recording, begun if it was not; None where there is none."""
        if self._pid != os.getpid():  # the first event, or the first one in a forked process
            self._pid = os.getpid()
            self._profile = None if self._failed else self._begin()
        return self._profile

    def watch_no_more(self) -> None:
        """The program's own spans are known by now; the recorder takes them itself."""
        tracing.remove_sink(self)

    def begin(self) -> None:
        """Begin the recording, if it was not begun: something is about to happen."""
        self.running()

    def rank_is_known(self) -> None:
        """Called when a process group was made. A rank that was thought another starts anew."""
        if self._pid != os.getpid() or self._rank == find_rank():
            return
        before = self._profile
        if before is not None:
            before.__exit__(None, None, None)
            if before.path is not None:
                before.path.unlink(missing_ok=True)
        self._profile = self._begin()

    def guarded(self, function: Callable[P, None]) -> Callable[P, None]:
        """The function, which ends the recording instead of raising."""

        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            if self._failed:
                return
            try:
                function(*args, **kwargs)
            except Exception as error:
                self.fail(error)

        return call

    def fail(self, error: Exception) -> None:
        """Record no more, and say why."""
        self._failed = True
        self._profile = None
        print(f"trine: recording ends: {type(error).__name__}: {error}", file=sys.stderr)

    def _begin(self) -> Profile | None:
        self._rank = rank, world_size = find_rank()
        if get_worker_info() is not None:
            return None
        # A program that a rank starts has the same variables: it is no rank.
        taken = os.environ.get(_TAKEN, "").split("/")
        if taken[:2] == [str(rank), str(world_size)] and taken[2] != str(os.getpid()):
            return None
        os.environ[_TAKEN] = f"{rank}/{world_size}/{os.getpid()}"
        asked = profile(self._directory, schedule=self._schedule, memory=self._memory)
        begun = asked.__enter__()
        if begun.path is None:
            return None
        # Before the recorder's own, which knows nothing of clocks.
        Finalize(None, self.finish, exitpriority=10)
        return begun

    def finish(self) -> None:
        """End the recording with the process."""
        if self._profile is not None:
            self.compute.flush()
            self._profile.__exit__(None, None, None)
            self._profile = None
