"""HostMemory: shards and gradients that live on the host, and their way to the device and back.

Note [Copies beside the computation]
    Copies to the device and copies to the host have a stream each, so that they run beside
    the computation and beside each other. Three edges order them.

    A stream of copies first waits for the stream of the caller, where the buffer that it
    writes was last used and the sums that it reads are formed. What reads a shard on the
    device, the collective and the copy out of it, waits for the event behind its copy. The
    host, which knows no streams, is held up until the event has fired: before a sharded
    parameter is shown to whoever may write to it (`ParamGroup.reshard`), and before a
    gradient is handed out (`GradReducer.advance`). Both come a unit after the copy was
    queued, so the host seldom waits and the device always has work queued.

    Parameters that stay whole after a forward without a backward have not been shown: whoever
    wants to write to them by hand calls `reshard()` first, as loading a state dict does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from trine.core import Device
from trine.core.devices import Event, Stream

__all__ = ["HostMemory"]

T = TypeVar("T")


class HostMemory:
    """Where shards live under `CPUOffloadPolicy`.

    Args:
        device: which computes.
        pin: whether to pin what is copied, if that is of use to the device.
    """

    home = torch.device("cpu")

    def __init__(self, device: Device, *, pin: bool) -> None:
        self.device = device
        self._pin = pin

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D buffer on the host, of undefined content."""
        return self.device.host_buffer(numel, dtype, pinned=self._pin)

    def fetch(self, shard: Tensor, into: Tensor, then: Callable[[], T]) -> tuple[T, Event]:
        """Copy a shard to the device, and start what reads it there.

        Args:
            shard: on the host; not to be written to before the event has fired.
            into: on the device, of any floating dtype.
            then: called with its work queued behind the copy.

        Returns:
            What `then` returned, and the event behind the copy.
        """
        copies, _ = _streams(self.device)
        copies.wait_stream(self.device.current_stream())
        with copies.use():
            self.device.copy(shard, into)
            copied = copies.record_event()
            return then(), copied

    def await_fetched(self, copied: Event) -> None:
        """Let later work of the caller read on the device what was copied there."""
        self.device.current_stream().wait_event(copied)

    def store(self, grads: Tensor, into: Tensor) -> Event:
        """Copy gradients to the host.

        Args:
            grads: on the device; not to be used otherwise before the event has fired.
            into: on the host, from `empty`; not to be read before that either.
        """
        _, copies = _streams(self.device)
        copies.wait_stream(self.device.current_stream())
        with copies.use():
            self.device.copy(grads, into)
            return copies.record_event()


@cache
def _streams(device: Device) -> tuple[Stream, Stream]:
    """The streams of copies to a device and from it; all models there share them."""
    return device.stream(), device.stream()
