"""The recorder that `trine.core.recording.find_recorder` finds when trine-tools is installed.

The module is the plug-in: it has the two functions of `trine.core.recording.Recorder`.
"""

from __future__ import annotations

from pathlib import Path

from trine.core.recording import Report
from trine.tools.reports import print_summary, summarize
from trine.tools.tracing import Recorder, merge
from trine.tools.tracing.run_folder import remove_other_worlds

__all__ = ["finish", "open"]


def open(directory: Path, *, rank: int, world_size: int) -> Recorder:
    """Start the recording of one rank; install what is returned with `add_sink`.

    What an earlier run left in the folder under this rank's name is replaced, and rank 0
    deletes what a larger world left: `finish` must not mix two runs.

    Raises:
        TraceFileError: if the folder cannot be made or written to.
    """
    recorder = Recorder(directory, rank=rank, world_size=world_size)
    if rank == 0:
        remove_other_worlds(directory, world_size)
    return recorder


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
