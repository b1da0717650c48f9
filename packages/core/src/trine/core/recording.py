"""Find whoever can write a run's events to files, without knowing who that is.

`trine-tools` provides a recorder through an entry point. Programs that want a timeline
when it is installed, and run just as well when it is not, ask `find_recorder`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from trine.core.tracing import TraceSink

__all__ = ["ENTRY_POINT_GROUP", "Recorder", "Recording", "Report", "find_recorder"]

ENTRY_POINT_GROUP = "trine.recorder"

_log = logging.getLogger(__name__)


class Recording(TraceSink, Protocol):
    """A sink with a file behind it."""

    def close(self) -> Path:
        """Write what is left and return the file's path. A second call changes nothing."""


@dataclass(frozen=True)
class Report:
    """What a finished recording has to show.

    Attributes:
        files: what each written file is, and where: `{"timeline": Path(...)}`.
        dropped: events that did not fit into the recorders' bounds.
    """

    files: dict[str, Path] = field(default_factory=dict)
    dropped: int = 0


class Recorder(Protocol):
    """What an entry point of the group `trine.recorder` must be: an object or module."""

    def open(self, directory: Path, *, rank: int, world_size: int) -> Recording:
        """Start the recording of one rank; the caller installs it with `add_sink`."""

    def finish(self, directory: Path) -> Report:
        """Merge the closed recordings of a directory, print their summary to stdout."""


def find_recorder() -> Recorder | None:
    """The installed recorder, or None if there is none.

    One that is installed but cannot be imported is reported in the log and treated as
    absent: a run must not fail because of a recorder.
    """
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        try:
            found: Recorder = entry.load()
        except Exception:
            _log.exception("recorder %r (%s) cannot be used", entry.name, entry.value)
            continue
        return found
    return None
