"""Record a training loop: all of it, or the steps that a schedule chooses."""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import ClassVar, Self

from trine.core import tracing
from trine.core.tracing import TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.recording.clock_exchange import ClockClient, ClockServer, exchange_clocks
from trine.tools.recording.launch import find_rank
from trine.tools.recording.memory import MemorySampler
from trine.tools.recording.window import Phase, Window
from trine.tools.tracing.recorder import DEFAULT_CAPACITY, DEFAULT_MAX_BYTES, Recorder
from trine.tools.tracing.run_folder import remove_other_worlds

__all__ = ["Profile", "profile"]

_log = logging.getLogger(__name__)


def profile(
    directory: str | Path,
    *,
    schedule: Window | None = None,
    memory: bool = False,
    capacity: int = DEFAULT_CAPACITY,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Profile:
    """Record what this rank does in a `with` block.

    To be entered by every rank alike; each writes its own file into the folder. Which rank
    this is comes from `torch.distributed`, else from the variables of torchrun or mpiexec;
    ranks that a program spawns itself enter it after `init_process_group`.
    No rank waits for another, and where a file cannot be written training goes on without.

    Args:
        directory: the folder of the run. What an earlier run left there is replaced.
        schedule: which steps to record; all that happens, if None.
        memory: whether to record activations too, and what else of memory the engine does not
            know of; it costs a few microseconds for each module and each saved tensor. To be
            entered by the thread that trains.
        capacity: see `trine.tools.tracing.Recorder`.
        max_bytes: likewise.

    Raises:
        TypeError: if the schedule is something else.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from trine.tools import Window, profile
        >>> from trine.tools.tracing import read_traces
        >>> with TemporaryDirectory() as folder:
        ...     with profile(folder, schedule=Window(skip=1, record=2)) as running:
        ...         for batch in range(10):
        ...             pass  # train
        ...             running.step()
        ...     (trace,) = read_traces(Path(folder))
        ...     [event.name for event in trace.events]
        ['step', 'step']
    """
    if schedule is not None and not isinstance(schedule, Window):
        raise TypeError(
            f"schedule is {type(schedule).__name__}; expected a trine.tools.Window, such as "
            "Window(skip=10, record=20)."
        )
    return Profile(Path(directory), schedule, memory, capacity, max_bytes)


class Profile:
    """A recording that is under way; made by `profile`.

    Steps begin where `trine.core.tracing.set_step` is called, as `trine.core.training` does.
    A loop that does not calls `step` at the end of each. Several may be under way, as where
    a program that records itself is run by `trine trace run`: the first one that is told of
    the end of a step counts it for all.
    """

    _telling: ClassVar[bool] = False  # one of them gives the step its number

    def __init__(
        self,
        directory: Path,
        schedule: Window | None,
        memory: bool,
        capacity: int,
        max_bytes: int,
    ) -> None:
        self._directory = directory
        self._schedule = schedule
        self._memory = MemorySampler() if memory else None
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._recorder: Recorder | None = None
        self._clock: ClockServer | ClockClient | None = None
        self._sink: tracing.TraceSink | None = None
        self._nowhere = _Nowhere()
        self._under_way = False
        self._steps = 0  # that have begun before the present one
        self._told: int | None = None  # the step that somebody gave to set_step last
        self._number = 0  # of the present step, as long as nobody tells
        self._began_ns = 0

    def __enter__(self) -> Self:
        if self._under_way:
            raise RuntimeError(
                f"The recording to {self._directory} is under way already. Enter it once; give a "
                "block within it a trine.tools.profile of its own, with another folder."
            )
        rank, world_size = find_rank()
        try:
            self._recorder = Recorder(
                self._directory,
                rank=rank,
                world_size=world_size,
                capacity=self._capacity,
                max_bytes=self._max_bytes,
            )
            if rank == 0:
                remove_other_worlds(self._directory, world_size)
        except (TraceFileError, RuntimeError) as error:  # no file, or no thread to be had
            _log.warning("%s Training goes on without it.", error)
            return self
        self._under_way = True
        self._clock = exchange_clocks(self._directory, rank, world_size, self._recorder.add_reading)
        tracing.add_step_listener(self._on_step)
        if tracing.current_step() < 0:
            self._set_step(0)
        self._number = tracing.current_step()
        if self._memory is not None:
            self._memory.install()
        self._began_ns = perf_counter_ns()
        self._listen()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._recorder is None:
            return
        self._under_way = False
        tracing.remove_step_listener(self._on_step)
        if self._memory is not None:
            self._memory.remove()
        self._put_in_place(None)
        if self._clock is not None:
            self._clock.close()
        self._recorder.close()

    def step(self) -> None:
        """Say that a step has ended and the next one begins.

        Where somebody else says so by `set_step`, this does nothing.
        """
        if self._recorder is None or self._told is not None:
            return
        now = perf_counter_ns()
        step = TraceEvent("span", "step", "step", "", 0, None, self._began_ns, now)
        step.step = self._number
        self.report(step)
        self._began_ns = now
        if tracing.current_step() == self._number:  # else another recording has counted it
            self._set_step(self._number + 1)
        self._number = tracing.current_step()
        self._steps += 1
        self._listen()

    @property
    def recording(self) -> bool:
        """Whether the present step is recorded."""
        return self._recorder is not None and self._sink is self._recorder

    def report(self, event: TraceEvent) -> None:
        """Record an event that was made elsewhere, if the present step is recorded."""
        if self._recorder is not None and self._sink is self._recorder:
            self._recorder.record(event)

    @property
    def path(self) -> Path | None:
        """The file of this rank; None where it cannot be written."""
        return None if self._recorder is None else self._recorder.path

    def _set_step(self, number: int) -> None:
        Profile._telling = True
        tracing.set_step(number)
        Profile._telling = False

    def _on_step(self, number: int) -> None:
        if Profile._telling or number == self._told:
            return
        # The first step has begun when the block was entered, and is only given its number.
        if self._told is not None:
            self._steps += 1
        self._told = number
        self._listen()

    def _phase(self) -> Phase:
        return "record" if self._schedule is None else self._schedule.phase(self._steps)

    def _listen(self) -> None:
        """Have events go where they belong in this step."""
        phase = self._phase()
        self._put_in_place(
            None if phase == "idle" else self._nowhere if phase == "warmup" else self._recorder
        )

    def _put_in_place(self, sink: tracing.TraceSink | None) -> None:
        if sink is self._sink:
            return
        if sink is not None:
            tracing.add_sink(sink)
        if self._sink is not None:
            tracing.remove_sink(self._sink)
        self._sink = sink


class _Nowhere:
    """A sink that costs what a recorder costs and keeps nothing."""

    def record(self, event: TraceEvent) -> None:
        """Let one event go."""
