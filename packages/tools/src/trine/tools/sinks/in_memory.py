"""Keep events in a list: for tests, and for looking at a few steps by hand."""

from __future__ import annotations

from types import TracebackType

from trine.core.tracing import TraceEvent, add_sink, remove_sink

__all__ = ["InMemory"]


class InMemory:
    """A sink that keeps all events, in the order in which they are reported.

    Attributes:
        events: what was reported so far.

    Example:
        >>> from trine.core.tracing import span
        >>> from trine.tools.sinks import InMemory
        >>> with InMemory() as events:
        ...     with span("load batch", category="io"):
        ...         pass
        >>> [event.name for event in events]
        ['load batch']
    """

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self.record = self.events.append

    def __enter__(self) -> list[TraceEvent]:
        add_sink(self)
        return self.events

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        remove_sink(self)
