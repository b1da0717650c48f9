"""The GPU of an Apple machine: one device, with one queue of work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from trine.core.devices.accelerator import AcceleratorDevice
from trine.core.devices.streams import Event, Stream

__all__ = ["MPSDevice"]


class MPSEvent:
    """A `torch.mps.Event` behind the `Event` protocol; there is one stream, so it names none."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work queued so far."""
        self.raw.record()

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work wait for the mark."""
        self.raw.wait()

    def synchronize(self) -> None:
        """Block the calling thread until the marked work is done."""
        self.raw.synchronize()

    def query(self) -> bool:
        """Whether the marked work is done."""
        return bool(self.raw.query())

    def elapsed_ms(self, end: Self) -> float:
        """Milliseconds of device time from this mark to `end`."""
        return float(self.raw.elapsed_time(end.raw))


class MPSStream:
    """The one queue: what is queued later runs later, so there is nothing to order."""

    __slots__ = ()

    def wait_stream(self, other: Stream) -> None:
        """Nothing to order."""

    def wait_event(self, event: Event) -> None:
        """Nothing to order."""

    def record_event(self) -> Event:
        """Mark the work queued so far."""
        event = MPSEvent(torch.mps.Event())
        event.record()
        return event

    def hold(self, tensor: Tensor) -> None:
        """Nothing to order."""

    def synchronize(self) -> None:
        """Block the calling thread until all work is done."""
        torch.mps.synchronize()

    def use(self) -> AbstractContextManager[object]:
        """A block like any other."""
        return nullcontext()


class MPSDevice(AcceleratorDevice):
    """The GPU of an Apple machine.

    Args:
        device_id: 0 or None.
        dist_backend: the process group backend, where the choice shall not be ours.

    Raises:
        ValueError: if this machine has no such device.
    """

    kind = "mps"

    def __init__(self, device_id: int | None = None, *, dist_backend: str | None = None) -> None:
        super().__init__(self.kind, device_id, dist_backend=dist_backend)

    @staticmethod
    def count(kind: str = "mps") -> int:
        """1 on a machine that has it, otherwise 0."""
        return int(torch.backends.mps.is_available())

    def _current_id(self) -> int:
        return 0

    def make_current(self) -> None:
        """There is no other."""

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on this device, complete when this returns."""
        # Copies that do not block have handed out wrong bytes here.
        return tensor.to(self.torch_device)

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Copy between the host and this device; done when this returns, as above."""
        into.copy_(source)

    def _half_dtypes(self) -> tuple[torch.dtype, ...]:
        if torch.backends.mps.is_macos_or_newer(14, 0):
            return (torch.float16, torch.bfloat16)
        return (torch.float16,)

    def _rng_state(self) -> Tensor:
        return torch.mps.get_rng_state()

    def _set_rng_state(self, rng: Tensor) -> None:
        torch.mps.set_rng_state(rng)

    def stream(self) -> Stream:
        """The one stream there is."""
        return MPSStream()

    def current_stream(self) -> Stream:
        """The one stream there is."""
        return MPSStream()

    def event(self, *, timing: bool = False) -> Event:
        """A new event."""
        return MPSEvent(torch.mps.Event(enable_timing=timing))

    def synchronize(self) -> None:
        """Block the calling thread until all work on this device is done."""
        torch.mps.synchronize()
