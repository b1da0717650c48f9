"""One CUDA device. Making it touches neither the current device nor any other setting."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Self

import torch

from trine.core.devices.device import Device
from trine.core.devices.streams import Event, Stream

__all__ = ["CUDADevice", "CUDAEvent", "CUDAStream"]


class CUDAEvent:
    """A `torch.cuda.Event` behind the `Event` protocol."""

    __slots__ = ("raw",)

    def __init__(self, raw: torch.cuda.Event) -> None:
        self.raw = raw

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work queued so far on `stream`, or on the current stream."""
        self.raw.record(_raw(stream))

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work on `stream`, or on the current stream, wait for the mark."""
        self.raw.wait(_raw(stream))

    def synchronize(self) -> None:
        """Block the calling thread until the marked work is done."""
        self.raw.synchronize()

    def query(self) -> bool:
        """Whether the marked work is done."""
        return bool(self.raw.query())  # type: ignore[no-untyped-call]  # torch has no types here

    def elapsed_ms(self, end: Self) -> float:
        """Milliseconds of device time from this mark to `end`."""
        return float(self.raw.elapsed_time(end.raw))


class CUDAStream:
    """A `torch.cuda.Stream` behind the `Stream` protocol."""

    __slots__ = ("raw",)

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw

    def wait_stream(self, other: Stream) -> None:
        """Make later work here wait for what is queued on `other` now."""
        raw = _raw(other)
        assert raw is not None
        self.raw.wait_stream(raw)

    def wait_event(self, event: Event) -> None:
        """Make later work here wait for `event`."""
        event.wait(self)

    def record_event(self) -> Event:
        """Mark the work queued so far."""
        return CUDAEvent(self.raw.record_event())

    def synchronize(self) -> None:
        """Block the calling thread until all work here is done."""
        self.raw.synchronize()

    def use(self) -> AbstractContextManager[object]:
        """Queue the work of a `with` block here."""
        return torch.cuda.stream(self.raw)


def _raw(stream: Stream | None) -> torch.cuda.Stream | None:
    if stream is None:
        return None
    if not isinstance(stream, CUDAStream):
        raise TypeError(
            f"Expected a stream of a CUDADevice, got {type(stream).__name__}. "
            "Streams order work on one kind of device only."
        )
    return stream.raw


class CUDADevice(Device):
    """One CUDA device.

    Args:
        index: its number; None for the process's current device at the time of making.
    """

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        count = torch.cuda.device_count()
        if index is None and count > 0:
            index = torch.cuda.current_device()
        if index is None or not 0 <= index < count:
            asked = "A CUDA device" if index is None else f"cuda:{index}"
            have = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise ValueError(f"{asked} was asked for, but this machine has {have}.")
        super().__init__(torch.device("cuda", index))

    @property
    def dist_backend(self) -> str:
        """Always `nccl`."""
        return "nccl"

    def stream(self) -> Stream:
        """A new stream on this device."""
        raw = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # as above
        return CUDAStream(raw)

    def current_stream(self) -> Stream:
        """The stream on which work is queued now."""
        return CUDAStream(torch.cuda.current_stream(self.torch_device))

    def event(self, *, timing: bool = False) -> Event:
        """A new event."""
        raw = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]  # as above
        return CUDAEvent(raw)

    def synchronize(self) -> None:
        """Block the calling thread until all work on this device is done."""
        torch.cuda.synchronize(self.torch_device)
