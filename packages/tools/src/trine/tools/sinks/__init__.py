"""Sinks: where events can go while training runs, beside a `trine.tools.tracing.Recorder`.

Each is a `trine.core.tracing.TraceSink`: make one, `add_sink` it, `remove_sink` it.
"""

from trine.tools.sinks.in_memory import InMemory
from trine.tools.sinks.itt import itt_sink
from trine.tools.sinks.json_lines import JsonLines
from trine.tools.sinks.memory import ResidentMemory
from trine.tools.sinks.nvtx import nvtx_sink
from trine.tools.sinks.registry import SinkError, get_sink, known_sinks

__all__ = [
    "InMemory",
    "JsonLines",
    "ResidentMemory",
    "SinkError",
    "get_sink",
    "itt_sink",
    "known_sinks",
    "nvtx_sink",
]
