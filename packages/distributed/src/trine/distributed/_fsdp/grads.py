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
from trine.distributed._fsdp.offload import HostMemory
from trine.distributed._fsdp.param import ShardedParam, rows_in
from trine.distributed._fsdp.torch_internals import (
    apply_grad_hooks,
    call_post_accumulate_hooks,
    hooked,
    local_tensor,
    storage_users,
)

__all__ = ["ShardedGrads"]


class ShardedGrads:
    """One flat gradient buffer and the DTensors over it.

    Args:
        params: the parameters, in the order of `layout`.
        layout: where each one's rows lie; the extra elements follow them.
        host: where gradients live, if not beside the whole parameters.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        layout: GroupLayout,
        host: HostMemory | None = None,
    ) -> None:
        first = params[0]
        with torch.inference_mode(False):
            if host is None:
                self.flat = torch.empty(layout.part_numel, dtype=first.dtype, device=first.device)
            else:
                self.flat = host.empty(layout.part_numel, first.dtype)
        self.layout = layout
        rank = first.axes.shard_rank
        self.tensors: list[DTensor] = [
            param.as_dtensor(rows_in(self.flat, offset, param.layout.shape_of(rank)))
            for offset, param in zip(layout.offsets, params, strict=True)
        ]
        self._locals = [local_tensor(tensor) for tensor in self.tensors]
        self._storages = [local.untyped_storage() for local in self._locals]
        self._owners = self._count_owners()

    @property
    def extra(self) -> Tensor:
        """The elements after the gradients."""
        return self.flat[self.layout.shard_numel :]

    def is_free(self) -> bool:
        """Whether nobody else can see this buffer, so that it may be overwritten.

        To be asked while no parameter holds one of its tensors as gradient.
        """
        return self._owners is not None and self._count_owners() == self._owners

    def _count_owners(self) -> list[int] | None:
        """Who holds the gradients: as views, as DTensors, or as the plain tensors inside."""
        owners = storage_users(self._storages)
        if owners is not None:
            owners += map(sys.getrefcount, self.tensors)
            owners += map(sys.getrefcount, self._locals)
        return owners

    def hand_out(self, params: Sequence[ShardedParam], used: Sequence[bool]) -> None:
        """Give each used parameter its gradient; add where one is there already."""
        any_hooks = hooked([param.sharded for param in params])
        for param, tensor, is_used in zip(params, self.tensors, used, strict=True):
            if not is_used:
                continue
            sharded = param.sharded
            grad = apply_grad_hooks(sharded, tensor) if any_hooks else tensor
            present = sharded.grad
            if present is None:
                sharded.grad = grad
            elif isinstance(present, DTensor) and isinstance(grad, DTensor):
                with torch.no_grad():
                    local_tensor(present).add_(local_tensor(grad))
            else:
                raise TypeError(
                    f"The gradient of {param.fqn} was set to a plain {type(present).__name__}; "
                    "expected a DTensor like the parameter, to which this backward can be added. "
                    "Set it to None, or to DTensor.from_local(...) on the parameter's mesh."
                )
            if any_hooks:
                call_post_accumulate_hooks(sharded)
