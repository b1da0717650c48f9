"""Collectives that a user brings: the base classes to implement, and how the engine calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import Comm, Pending, PendingReduce, SummedElsewhere

__all__ = ["AllGather", "CommPrimitive", "CustomComm", "ReduceScatter", "check_custom"]


class CommPrimitive(ABC):
    """What both kinds have in common: where their buffers come from."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous buffer of that shape; the engine drops it when it is done with it."""


class AllGather(CommPrimitive):
    """An all-gather of one's own; see `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with the `input_tensor` of every rank, in their order.

        Args:
            output_tensor: 1-D, from `allocate`.
            input_tensor: 1-D; may be this rank's part of the output.
            group: the ranks.
            async_op: whether the caller waits on the returned work.
        """


class ReduceScatter(CommPrimitive):
    """A reduce-scatter of one's own; see `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write the reduction of this rank's part of every `input_tensor` into `output_tensor`.

        Args:
            output_tensor: 1-D, from `allocate`.
            input_tensor: 1-D, from `allocate`; one equal part for each rank, in their order.
            group: the ranks.
            op: how to reduce; the engine asks for sums.
            async_op: whether the caller waits on the returned work.
        """


def check_custom(given: object, kind: str) -> None:
    """Refuse what cannot be called as an `AllGather` or a `ReduceScatter`; torch's own can.

    Raises:
        TypeError: naming what is missing.
    """
    for method in ("__call__", "allocate"):
        if isinstance(given, type) or not callable(getattr(given, method, None)):
            raise TypeError(
                f"Expected an object of a class made from {kind} (ours or torch's), "
                f"with the methods __call__ and allocate; got {given!r}."
            )


class CustomComm(Comm):
    """Another Comm with one or both of its collectives exchanged for the user's.

    Args:
        inner: what to use for the rest.
        gather: the user's all-gather, if any.
        reduce: the user's reduce-scatter, if any.
    """

    def __init__(
        self,
        inner: Comm,
        gather: AllGather | None = None,
        reduce: ReduceScatter | None = None,
    ) -> None:
        super().__init__(inner.pool, inner.rank, inner.world_size, inner.backend)
        self._borrowed = inner._borrowed
        self.ledger = inner.ledger
        if isinstance(inner, CustomComm):
            gather, reduce = gather or inner._gather, reduce or inner._reduce
            inner = inner._inner
        # A rank on its own has nobody to communicate with, and no group to do it in.
        alone = inner.world_size == 1
        self._gather: AllGather | None = None if alone else gather
        self._reduce: ReduceScatter | None = None if alone else reduce
        self._inner: Comm = inner

    def use_pool(self, pool: BufferPool) -> None:
        """See `Comm.use_pool`."""
        super().use_pool(pool)
        self._inner.use_pool(pool)

    def separate(self, made: dict[dist.ProcessGroup, dist.ProcessGroup]) -> Comm:
        """See `Comm.separate`."""
        return CustomComm(self._inner.separate(made), self._gather, self._reduce)

    def gather_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer for `all_gather`."""
        if self._gather is None:
            return super().gather_buffer(shape, dtype, device)
        return self._gather.allocate(shape, dtype=dtype, device=device)

    def reduce_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer for `reduce_scatter`."""
        if self._reduce is None:
            return super().reduce_buffer(shape, dtype, device)
        return self._reduce.allocate(shape, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        """Drop a buffer of the user's, give back one of the pool's."""
        if self._gather is None:
            super().release(buffer)

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """The user's, or the other Comm's."""
        if self._gather is None:
            return self._inner.all_gather(out, shard)
        return Pending([self._gather(out.view(-1), shard, self.group, async_op=True)])

    def reduce_scatter(self, rows: Tensor) -> PendingReduce:
        """The user's, or the other Comm's."""
        if self._reduce is None:
            return self._inner.reduce_scatter(rows)
        result = self._reduce.allocate((rows.shape[1],), dtype=rows.dtype, device=rows.device)
        work = self._reduce(result, rows.view(-1), self.group, dist.ReduceOp.SUM, async_op=True)
        return SummedElsewhere(Pending([work]), result, rows, 1.0, None)
