"""What the engine asks of streams and events, and the versions that do nothing.

A device whose work is done when a call returns (the CPU) has one stream that is always
idle. Handing out `HostStream` and `HostEvent` there lets callers order their work the
same way everywhere and never ask what device they are on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Protocol, Self

from torch import Tensor

__all__ = ["Event", "HostEvent", "HostStream", "Stream"]


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work queued so far on `stream`, or on the current stream."""

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work on `stream`, or on the current stream, wait for the mark."""

    def synchronize(self) -> None:
        """Block the calling thread until the marked work is done."""

    def query(self) -> bool:
        """Whether the marked work is done."""

    def elapsed_ms(self, end: Self) -> float:
        """Milliseconds of device time from this mark to `end`; both made with timing."""


class Stream(Protocol):
    """A queue of device work."""

    def wait_stream(self, other: Stream) -> None:
        """Make later work here wait for what is queued on `other` now."""

    def wait_event(self, event: Event) -> None:
        """Make later work here wait for `event`."""

    def record_event(self) -> Event:
        """Mark the work queued so far."""

    def hold(self, tensor: Tensor) -> None:
        """Let nobody have the memory of `tensor` before the work queued here is done.

        For a tensor made on one stream and used on another; it may be dropped after that.
        """

    def synchronize(self) -> None:
        """Block the calling thread until all work here is done."""

    def use(self) -> AbstractContextManager[object]:
        """Queue the work of a `with` block here."""


class HostEvent:
    """An event on a device that has finished whenever it is asked. It knows host time only."""

    __slots__ = ("_recorded_ns",)

    def __init__(self) -> None:
        self._recorded_ns = 0

    def record(self, stream: Stream | None = None) -> None:
        """Remember the host time, for `elapsed_ms`."""
        self._recorded_ns = perf_counter_ns()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True

    def elapsed_ms(self, end: Self) -> float:
        """Milliseconds of host time between the two `record` calls."""
        return (end._recorded_ns - self._recorded_ns) / 1e6


class HostStream:
    """The one stream of a device whose work is done when a call returns."""

    __slots__ = ()

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def record_event(self) -> Event:
        """An event that is done."""
        event = HostEvent()
        event.record()
        return event

    def hold(self, tensor: Tensor) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def use(self) -> AbstractContextManager[object]:
        """A block like any other."""
        return nullcontext()
