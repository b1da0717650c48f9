"""Tensors as MPI sees them: an address and a number of bytes, without a copy.

MPI moves bytes here, whatever the dtype, so every dtype that torch has can travel. What
has to be contiguous is; what is not travels through a buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from mpi4py import MPI
from torch import Tensor

__all__ = [
    "MOST_BYTES",
    "Landing",
    "Scratch",
    "as_bytes",
    "check_on_cpu",
    "pieces",
    "written_back",
]

Spec = list[Any]  # what mpi4py takes for a buffer
_KINDS = 64  # of small landings, at most

# MPI counts are C ints where the library lacks MPI 4; a call moves less than that.
MOST_BYTES = 2**30


def check_on_cpu(*tensors: Tensor) -> None:
    """Refuse tensors that MPI cannot reach.

    Raises:
        ValueError: naming the device and the way out.
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(
                f"The backend mpi moves tensors of the CPU, and this one is on {tensor.device}. "
                "Move it with .cpu() first, or start the process group with a backend of that "
                "device, such as nccl."
            )


def as_bytes(tensor: Tensor) -> Spec:
    """A contiguous tensor as a buffer of MPI; memory is shared."""
    return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.nbytes, MPI.BYTE]


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A contiguous tensor as 1-D pieces that one call of MPI can move; at least one."""
    flat = tensor.view(-1)
    step = max(1, MOST_BYTES // flat.element_size())
    for start in range(0, max(1, flat.numel()), step):
        yield flat[start : start + step]


def written_back(tensor: Tensor) -> tuple[Tensor, bool]:
    """A contiguous tensor to fill for `tensor`, and whether it has to be copied back."""
    if tensor.is_contiguous():
        return tensor, False
    return torch.empty(tensor.shape, dtype=tensor.dtype), True


class Scratch:
    """Memory for what arrives before it is summed, kept for the next operation.

    The first touch of fresh memory costs more than the transfer that fills it.

    Args:
        keep_nbytes: how much idle memory to keep at most.
    """

    def __init__(self, keep_nbytes: int = 2**30) -> None:
        self._idle: list[Tensor] = []
        self._keep_nbytes = keep_nbytes
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """A 1-D tensor of undefined content."""
        nbytes = max(1, numel * dtype.itemsize)
        block = self._take(nbytes)
        try:
            yield block[: numel * dtype.itemsize].view(dtype)
        finally:
            self._give(block)

    def _take(self, nbytes: int) -> Tensor:
        with self._lock:
            for position, block in enumerate(self._idle):
                if nbytes <= block.nbytes <= 4 * nbytes + 4096:
                    return self._idle.pop(position)
        return torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)

    def _give(self, block: Tensor) -> None:
        with self._lock:
            self._idle.append(block)
            self._idle.sort(key=lambda each: each.nbytes)
            while sum(each.nbytes for each in self._idle) > self._keep_nbytes:
                self._idle.pop(0)


class Landing:
    """Where a small tensor of each rank arrives, kept with its views for the next of its kind.

    Making views takes longer than moving a few bytes.

    Attributes:
        rows: one for each rank, 1-D, of undefined content.
        memory: all of them, to be received into.
    """

    _idle: ClassVar[dict[tuple[int, int, torch.dtype], list[Landing]]] = {}

    def __init__(self, ranks: int, numel: int, dtype: torch.dtype) -> None:
        whole = torch.empty((ranks, numel), dtype=dtype)
        self.rows = whole.unbind()
        nbytes = numel * dtype.itemsize
        self.memory = [MPI.memory.fromaddress(whole.data_ptr(), whole.nbytes), nbytes, MPI.BYTE]
        self._kind = (ranks, numel, dtype)

    @classmethod
    def lend(cls, ranks: int, numel: int, dtype: torch.dtype) -> Landing:
        """One that nobody else uses; never to be seen again, unless it is given back."""
        try:
            return cls._idle[ranks, numel, dtype].pop()
        except LookupError:
            return cls(ranks, numel, dtype)

    def give_back(self) -> None:
        """Let others have it."""
        if len(self._idle) > _KINDS:
            self._idle.clear()
        self._idle.setdefault(self._kind, []).append(self)
