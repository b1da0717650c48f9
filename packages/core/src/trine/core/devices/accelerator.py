"""Any accelerator that torch knows, through `torch.accelerator`, `torch.Stream` and `torch.Event`.

Kinds that torch treats alike need no more than this; CUDA, XPU and MPS say here and in
files of their own what they do another way. Making a device changes nothing: not the
current device, and it starts no driver that has not been started.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor

from trine.core.devices.device import Device
from trine.core.devices.streams import Event, Stream

__all__ = ["AcceleratorDevice", "AcceleratorEvent", "AcceleratorStream"]


class AcceleratorEvent:
    """A `torch.Event` behind the `Event` protocol."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
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
        return bool(self.raw.query())

    def elapsed_ms(self, end: Self) -> float:
        """Milliseconds of device time from this mark to `end`."""
        return float(self.raw.elapsed_time(end.raw))


class AcceleratorStream:
    """A `torch.Stream` behind the `Stream` protocol."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def wait_stream(self, other: Stream) -> None:
        """Make later work here wait for what is queued on `other` now."""
        self.raw.wait_stream(_raw(other))

    def wait_event(self, event: Event) -> None:
        """Make later work here wait for `event`."""
        event.wait(self)

    def record_event(self) -> Event:
        """Mark the work queued so far."""
        return AcceleratorEvent(self.raw.record_event())

    def hold(self, tensor: Tensor) -> None:
        """Let nobody have the memory of `tensor` before the work queued here is done.

        Memory of the host, or of another kind of device, is none that a stream gives away.
        """
        if tensor.device.type == self.raw.device.type:
            tensor.record_stream(self.raw)

    def synchronize(self) -> None:
        """Block the calling thread until all work here is done."""
        self.raw.synchronize()

    def use(self) -> AbstractContextManager[object]:
        """Queue the work of a `with` block here."""
        context: AbstractContextManager[object] = self.raw
        return context


def _raw(stream: Stream | None) -> Any:
    if stream is None:
        return None
    if not isinstance(stream, AcceleratorStream):
        raise TypeError(
            f"Expected a stream of an accelerator, got {type(stream).__name__}. "
            "Streams order work on one kind of device only."
        )
    return stream.raw


class AcceleratorDevice(Device):
    """One device of a kind that torch calls an accelerator.

    Args:
        kind: the name of the kind, as in `torch.device(...).type`.
        device_id: its number. None: the one that the launcher gave this rank, in
            `LOCAL_RANK`, if there are so many; otherwise the process's current device.
        dist_backend: the process group backend, where the choice shall not be ours.

    Raises:
        ValueError: if this machine has no such device.
    """

    def __init__(
        self, kind: str, device_id: int | None = None, *, dist_backend: str | None = None
    ) -> None:
        self.kind = kind
        count = self.count(kind)
        if device_id is None and count:
            device_id = self._local_id(count)
        if device_id is None or not 0 <= device_id < count:
            name = kind.upper()
            asked = f"A {name} device" if device_id is None else f"{kind}:{device_id}"
            have = f"{kind}:0 to {kind}:{count - 1}" if count else f"no {name} device"
            raise ValueError(f"{asked} was asked for, but this machine has {have}.")
        super().__init__(torch.device(kind, device_id), dist_backend=dist_backend)

    @staticmethod
    def count(kind: str) -> int:
        """How many devices of this kind this machine has."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != kind:
            return 0
        return torch.accelerator.device_count()

    def _local_id(self, count: int) -> int:
        local_rank = os.environ.get("LOCAL_RANK", "")
        # A launcher may show each rank its own device only, as number 0.
        if local_rank.isdecimal() and int(local_rank) < count:
            return int(local_rank)
        return self._current_id()

    def _current_id(self) -> int:
        return torch.accelerator.current_device_index()

    def initialize(self) -> None:
        """Make this the process's current device, and see that it works."""
        self.make_current()
        super().initialize()

    def make_current(self) -> None:
        """Let this be where the process computes when nobody names a device."""
        torch.accelerator.set_device_index(self.torch_device)

    def stream(self) -> Stream:
        """A new stream on this device."""
        return AcceleratorStream(torch.Stream(self.torch_device))

    def current_stream(self) -> Stream:
        """The stream on which work is queued now."""
        return AcceleratorStream(torch.accelerator.current_stream(self.torch_device))

    def event(self, *, timing: bool = False) -> Event:
        """A new event."""
        return AcceleratorEvent(torch.Event(self.torch_device, enable_timing=timing))

    def synchronize(self) -> None:
        """Block the calling thread until all work on this device is done."""
        torch.accelerator.synchronize(self.torch_device)
