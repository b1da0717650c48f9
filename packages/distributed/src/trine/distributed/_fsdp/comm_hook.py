"""A function of the user's in the place of the collective that adds gradients up.

It may average, compress, or speak to some ranks only, and it owns the division. It sees gradients
and nothing else: what the engine sends beside them would mislead one that looks for the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trine.distributed._fsdp.collectives import Comm, Pending, PendingReduce

__all__ = ["CommHook"]


@dataclass(frozen=True, eq=False)
class CommHook:
    """A function and its state.

    The marks behind the gradients (Note [Used somewhere] of the reducer) travel by themselves.

    Attributes:
        state: handed to the function.
        function: called with the state and the flat gradients of a group, which it may change.
            Where these are sharded also with a tensor for what this rank keeps of them.
    """

    state: object
    function: Callable[..., object]

    def reduce_scatter(self, rows: Tensor, marks: int, comm: Comm) -> PendingReduce:
        """Let the function reduce rows, of which this rank keeps its own.

        Args:
            rows: shape (ranks, n), from the pool of `comm`; given up by the caller.
            marks: how many elements at the end of each row are marks, the same in all rows.
            comm: over the ranks.
        """
        ranks, numel = rows.shape[0], rows.shape[1] - marks
        grads = rows.new_empty(ranks * numel)
        grads.view(ranks, numel).copy_(rows[:, :numel])
        used = rows[0, numel:].to(torch.float32, copy=True)
        comm.pool.release(rows)
        works: list[dist.Work | None] = []
        if ranks > 1:
            works.append(dist.all_reduce(used, group=comm.group, async_op=True))
        output = grads.new_empty(numel)
        self.function(self.state, grads, output)
        return _ReducedByHook(Pending(works), output, used)

    def all_reduce(self, flat: Tensor, marks: int, group: dist.ProcessGroup) -> Pending:
        """Let the function reduce what all ranks keep.

        Args:
            flat: 1-D; overwritten.
            marks: how many of its last elements are marks.
            group: the ranks.
        """
        numel = flat.numel() - marks
        work = dist.all_reduce(flat[numel:], group=group, async_op=True)
        grads = flat[:numel].detach()
        self.function(self.state, grads)
        # A function that compresses may have given the tensor other memory.
        if grads.data_ptr() != flat.data_ptr():
            flat[:numel].copy_(grads)
        return Pending([work])


class _ReducedByHook(PendingReduce):
    """The function has returned; marks may be under way."""

    def __init__(self, pending: Pending, output: Tensor, used: Tensor) -> None:
        self.pending = pending
        self._output = output
        self._used = used

    def sum_into(self, out: Tensor, scale: float) -> None:
        self.wait()
        numel = self._output.numel()
        out[:numel].copy_(self._output)
        out[numel:].copy_(self._used)
        if scale != 1.0:
            out.mul_(scale)
