"""Communication buffers, kept for the next collective of the same size.

Note [Buffers outlive the call that made them]
    A buffer handed to an asynchronous collective belongs to it until its `wait` has
    returned. Whoever acquires a buffer releases it after the wait and after the last
    copy out of it has been issued, never before. On a device with streams all these are
    issued on the current stream, and a later collective on the buffer waits for that
    stream first, so the release needs no event of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from trine.core import tracing

__all__ = ["BufferPool"]


@dataclass(eq=False, slots=True)
class _Idle:
    buffer: Tensor
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int


class BufferPool:
    """Lends flat buffers and keeps a bounded amount of returned ones.

    First touch of fresh memory costs about as much as a transfer, so equal layers should
    take turns on the same buffers. What does not fit the bound is freed, oldest first.

    Args:
        keep_nbytes: how many bytes of idle buffers to keep; None for twice the larger of the
            last two that were returned, which lets gathering and reducing of equal layers
            overlap without a fresh allocation, and does not keep the one of a large layer
            for all of the small ones that follow.

    Attributes:
        lent_nbytes: bytes of the buffers that somebody has borrowed.
        told_lent_nbytes: of these, so many were reported when somebody reported last.
    """

    def __init__(self, keep_nbytes: int | None = None) -> None:
        self._keep_nbytes = keep_nbytes
        self._last_nbytes = 0
        self._idle: list[_Idle] = []
        self._idle_nbytes = 0
        self._told_nbytes = 0
        self.lent_nbytes = 0
        self.told_lent_nbytes = 0

    def acquire(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of undefined content, the caller's until `release`."""
        numel = prod(shape)
        self.lent_nbytes += numel * dtype.itemsize
        for position in range(len(self._idle) - 1, -1, -1):
            idle = self._idle[position]
            if idle.numel == numel and idle.dtype is dtype and idle.device == device:
                del self._idle[position]
                self._idle_nbytes -= idle.nbytes
                return idle.buffer if idle.shape == shape else idle.buffer.view(shape)
        self._make_room(numel * dtype.itemsize)
        # Not an inference tensor, even if the first forward is one: it outlives it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=device)

    def _make_room(self, nbytes: int) -> None:
        """Free so much of smaller buffers, oldest first, if there is; layers have grown larger.

        Not of larger ones: were each kind to free the other, layers that take turns would
        find none.
        """
        freed = 0
        for idle in [idle for idle in self._idle if idle.nbytes < nbytes]:
            if freed >= nbytes:
                break
            self._idle.remove(idle)
            self._idle_nbytes -= idle.nbytes
            freed += idle.nbytes

    def release(self, buffer: Tensor) -> None:
        """Take a buffer back. The caller must not use it, nor a view of it, afterwards."""
        shape, numel, nbytes = buffer.shape, buffer.numel(), buffer.nbytes
        self.lent_nbytes -= nbytes
        keep = self._keep_nbytes
        if keep is None:
            keep = 2 * max(nbytes, self._last_nbytes)
        self._last_nbytes = nbytes
        self._idle.append(_Idle(buffer, shape, numel, buffer.dtype, buffer.device, nbytes))
        self._idle_nbytes += nbytes
        while self._idle_nbytes > keep:
            self._idle_nbytes -= self._idle.pop(0).nbytes

    @property
    def idle_nbytes(self) -> int:
        """Bytes of the buffers that nobody has borrowed."""
        return self._idle_nbytes

    def free_idle(self) -> None:
        """Free what nobody has borrowed."""
        self._idle.clear()
        self._idle_nbytes = 0
        if tracing.enabled:
            self.tell_idle()

    def tell_idle(self) -> None:
        """Report the bytes of idle buffers, if they have changed."""
        if self._idle_nbytes != self._told_nbytes:
            self._told_nbytes = self._idle_nbytes
            tracing.counter("memory.communication", self._idle_nbytes, "mem")
