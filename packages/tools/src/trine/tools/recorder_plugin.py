"""The recorder that `trine.core.recording.find_recorder` finds when trine-tools is installed.

The module is the plug-in: it has the two functions of `trine.core.recording.Recorder`.
"""

from __future__ import annotations

from pathlib import Path

from trine.core.recording import Recording, Report
from trine.tools.recording.clock_exchange import ClockClient, ClockServer, exchange_clocks
from trine.tools.reports import print_summary, summarize
from trine.tools.tracing import Recorder, merge
from trine.tools.tracing.run_folder import remove_other_worlds

__all__ = ["finish", "open"]


def open(directory: Path, *, rank: int, world_size: int) -> Recording:
    """Start the recording of one rank; install what is returned with `add_sink`.

    What an earlier run left in the folder under this rank's name is replaced, and rank 0
    deletes what a larger world left: `finish` must not mix two runs.

    Raises:
        TraceFileError: if the folder cannot be made or written to.
    """
    recorder = Recorder(directory, rank=rank, world_size=world_size)
    if rank == 0:
        remove_other_worlds(directory, world_size)
    return _Recording(recorder, exchange_clocks(directory, rank, world_size, recorder.add_reading))


class _Recording:
    """A recorder, and the comparison of clocks that goes with it."""

    def __init__(self, recorder: Recorder, clock: ClockServer | ClockClient | None) -> None:
        self._recorder = recorder
        self._clock = clock
        self.record = recorder.record

    def close(self) -> Path:
        """Write what is left and return the file's path. A second call changes nothing."""
        if self._clock is not None:
            self._clock.close()
            self._clock = None
        return self._recorder.close()


def finish(directory: Path) -> Report:
    """Merge the closed recordings of a folder and print their summary.

    Raises:
        TraceFileError: if a recording is missing or damaged.
    """
    timeline = directory / "timeline.json"
    traces = merge(directory, timeline)
    print_summary(summarize(traces))
    return Report(
        files={"timeline": timeline},
        dropped=sum(trace.dropped for trace in traces),
    )
