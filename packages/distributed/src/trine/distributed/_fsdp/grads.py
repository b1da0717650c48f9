"""The gradients that the optimizer sees: DTensors over one flat buffer of a group.

Making a DTensor costs more than filling it, so a buffer and its DTensors are used again
in the next step, unless somebody still holds one of them: a user who keeps last step's
gradient keeps its values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trine.distributed._fsdp.layout import GroupLayout
from trine.distributed._fsdp.param import ShardedParam, as_dtensor
from trine.distributed._fsdp.torch_internals import local_tensor, storage_users

__all__ = ["ShardedGrads"]


class ShardedGrads:
    """One flat gradient buffer and the DTensors over it.

    Args:
        params: the parameters, in the order of `layout`.
        layout: where each one's rows lie; the extra elements follow them.
        extra: how many extra elements.
    """

    def __init__(self, params: Sequence[ShardedParam], layout: GroupLayout) -> None:
        first = params[0]
        with torch.inference_mode(False):
            self.flat = torch.empty(layout.part_numel, dtype=first.dtype, device=first.local.device)
        self.layout = layout
        rank = first.axes.shard_rank
        self.tensors: list[DTensor] = [
            as_dtensor(_rows(self.flat, offset, param, rank), param.layout, param.axes)
            for offset, param in zip(layout.offsets, params, strict=True)
        ]
        self._users = storage_users(self.flat)
        self._references = [sys.getrefcount(tensor) for tensor in self.tensors]

    @property
    def extra(self) -> Tensor:
        """The elements after the gradients."""
        return self.flat[self.layout.shard_numel :]

    def is_free(self) -> bool:
        """Whether nobody else can see this buffer, so that it may be overwritten.

        To be asked while no parameter holds one of its tensors as gradient.
        """
        return (
            self._users is not None
            and storage_users(self.flat) == self._users
            and [sys.getrefcount(tensor) for tensor in self.tensors] == self._references
        )

    def hand_out(self, params: Sequence[ShardedParam], used: Sequence[bool]) -> None:
        """Give each used parameter its gradient; add where one is there already."""
        for param, tensor, is_used in zip(params, self.tensors, used, strict=True):
            if not is_used:
                continue
            present = param.sharded.grad
            if present is None:
                param.sharded.grad = tensor
            else:
                assert isinstance(present, DTensor)
                with torch.no_grad():
                    local_tensor(present).add_(local_tensor(tensor))


def _rows(flat: Tensor, offset: int, param: ShardedParam, rank: int) -> Tensor:
    shape = param.layout.shape_of(rank)
    return flat[offset : offset + _numel(shape)].view(shape)


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
