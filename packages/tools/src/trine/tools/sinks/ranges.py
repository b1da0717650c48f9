"""Show spans in a profiler that wants to be told where they begin and where they end."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from trine.core.tracing import TraceEvent, TraceSink

__all__ = ["RangeSink", "RangeTool", "unavailable"]

_log = logging.getLogger(__name__)
_said: set[str] = set()


class RangeTool(Protocol):
    """A profiler whose ranges nest on each thread."""

    def push(self, label: str, category: str) -> None:
        """Open a range on this thread."""

    def pop(self) -> None:
        """Close the one that this thread opened last."""

    def mark(self, label: str, category: str) -> None:
        """Show that something happened now."""


class RangeSink:
    """A sink that shows spans as ranges, and instants as marks, with the unit's name.

    Asynchronous work is seen as the mark at its start and the range of the wait for it.

    Args:
        tool: the profiler.
    """

    def __init__(self, tool: RangeTool) -> None:
        self._tool = tool
        self._open = threading.local()

    def begin_span(self, event: TraceEvent) -> None:
        """Open a range."""
        self._tool.push(_label(event), event.category)
        self._stack().append(event)

    def record(self, event: TraceEvent) -> None:
        """Close the range of a span; mark an instant."""
        if event.kind == "instant":
            self._tool.mark(_label(event), event.category)
        elif event.kind == "span":
            stack = self._stack()
            # One that began before this sink was added is in nobody's stack, and one whose
            # end went by while the sink was away lies above.
            if any(event is each for each in stack):
                while stack:
                    self._tool.pop()
                    if stack.pop() is event:
                        break

    def _stack(self) -> list[TraceEvent]:
        stack: list[TraceEvent] | None = getattr(self._open, "stack", None)
        if stack is None:
            stack = self._open.stack = []
        return stack


class _Nothing:
    def record(self, event: TraceEvent) -> None:
        pass


def unavailable(what: str, mend: str) -> TraceSink:
    """A sink that does nothing, for a machine that lacks what one needs; says so once.

    Args:
        what: is not there.
        mend: what to install.
    """
    if what not in _said:
        _said.add(what)
        _log.warning("%s is not available here, so it is sent nothing. %s", what, mend)
    return _Nothing()


def _label(event: TraceEvent) -> str:
    return f"{event.name} {event.unit}" if event.unit else event.name
