"""Sinks by name: ours, and those that other packages bring by an entry point."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from trine.core.errors import TrineError
from trine.core.tracing import TraceSink
from trine.tools.text import printable

__all__ = ["ENTRY_POINT_GROUP", "SinkError", "get_sink", "known_sinks"]

ENTRY_POINT_GROUP: Final = "trine.sinks"

_OURS: Final = {
    "in_memory": (
        "trine.tools.sinks.in_memory:InMemory",
        "keeps events in a list, for tests",
    ),
    "itt": (
        "trine.tools.sinks.itt:itt_sink",
        "shows spans to Intel VTune and other collectors of ITT",
    ),
    "json_lines": (
        "trine.tools.sinks.json_lines:JsonLines",
        "writes a line of JSON for each event; out= is a file or its name",
    ),
    "memory": (
        "trine.tools.sinks.memory:ResidentMemory",
        "reports how much of the host's memory the process uses",
    ),
    "nvtx": (
        "trine.tools.sinks.nvtx:nvtx_sink",
        "shows spans to Nsight Systems and other collectors of NVTX",
    ),
}


class SinkError(TrineError):
    """A sink cannot be made; the message says which one and why."""


def get_sink(name: str, **options: object) -> TraceSink:
    """A new sink by its name, to be given to `trine.core.tracing.add_sink`.

    Args:
        name: one of `known_sinks`. Other packages add names by entry points of the group
            `trine.sinks`, each a function or class that makes a sink.
        **options: what to make it with.

    Raises:
        SinkError: if there is none of that name, or it cannot be made.
    """
    try:
        if name in _OURS:
            module, _, attribute = _OURS[name][0].partition(":")
            make = getattr(import_module(module), attribute)
        elif (entry := _others().get(name)) is not None:
            make = entry.load()
        else:
            raise SinkError(
                f"There is no sink {name!r}. Known are: {', '.join(known_sinks())}. Packages add "
                f"sinks by entry points of the group {ENTRY_POINT_GROUP}."
            )
        sink = make(**options)
    except SinkError:
        raise
    except Exception as error:  # whatever somebody else's package does
        raise SinkError(
            f"The sink {name!r} cannot be made. {type(error).__name__}: {error}."
        ) from error
    if not isinstance(sink, TraceSink):
        raise SinkError(
            f"The sink {name!r} is a {type(sink).__name__}, which has no method record(event)."
        )
    return sink


def known_sinks() -> dict[str, str]:
    """The names of all sinks, and in a few words what each does; nothing is loaded."""
    known = {name: words for name, (_, words) in _OURS.items()}
    for name, entry in _others().items():
        origin = entry.dist.name if entry.dist is not None else entry.value
        known.setdefault(name, f"from {printable(origin)}")
    return dict(sorted(known.items()))


def _others() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
