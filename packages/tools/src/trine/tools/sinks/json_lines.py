"""Write each event as a line of JSON the moment it is reported, for another program to read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TextIO

from trine.core.tracing import TraceEvent
from trine.tools.tracing.attributes import encode_attributes
from trine.tools.tracing.schema import WELL_KNOWN

__all__ = ["JsonLines"]


class JsonLines:
    """A sink that writes one JSON object for each event.

    Its names are the fields of the recordings' schema: kind, name, category, thread, step,
    start_ns, end_ns, and, where there is something to say, unit, group, sequence, operation,
    dtype, backend, stream, nbytes, enqueue_ns, value and args.

    An event takes about 20 us on the thread that reports it. To keep all events of a long
    run, use a `trine.tools.tracing.Recorder`.

    Args:
        out: an open text file, which stays open and is flushed after each line; or the name
            of a file, which is replaced.

    Raises:
        OSError: if the file cannot be opened.
    """

    def __init__(self, out: TextIO | str | Path) -> None:
        self._owns = isinstance(out, str | Path)
        # Open until `close`, beyond this call.
        self._out = Path(out).open("w", encoding="ascii") if isinstance(out, str | Path) else out  # noqa: SIM115
        self._lock = threading.Lock()

    def record(self, event: TraceEvent) -> None:
        """Write one event."""
        line = encode_attributes(_fields(event)) + "\n"
        with self._lock:
            self._out.write(line)
            self._out.flush()

    def close(self) -> None:
        """Close the file, if it was opened here. Call `remove_sink` first."""
        with self._lock:
            if self._owns:
                self._out.close()


def _fields(event: TraceEvent) -> dict[object, object]:
    fields: dict[object, object] = {
        "kind": event.kind,
        "name": event.name,
        "category": event.category,
        "thread": event.thread,
        "step": event.step,
        "start_ns": event.start_ns,
        "end_ns": event.end_ns,
    }
    if event.unit:
        fields["unit"] = event.unit
    if event.nbytes:
        fields["nbytes"] = event.nbytes
    if event.kind == "counter":
        fields["value"] = event.value
    others = {}
    for name, value in (event.args or {}).items():
        if name in WELL_KNOWN:
            fields[WELL_KNOWN[name]] = value
        else:
            others[name] = value
    if others:
        fields["args"] = others
    return fields
