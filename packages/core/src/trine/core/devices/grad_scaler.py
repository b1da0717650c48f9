"""Scaling of the loss for fp16, in agreement with the ranks that hold the other shards."""

from __future__ import annotations

import sys
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that skips a step on every rank or on none.

    A rank sees the gradients of its own shards. If one of them overflowed, each rank has
    to skip the step and lower the scale, or the ranks train different models from there
    on. Whenever gradients are unscaled, the ranks therefore take the maximum of what they
    found: one all-reduce of one number, which every rank joins, with or without gradients.

    Args:
        device_type: where the scale lives.
        init_scale: the first factor of the loss.
        process_group: the ranks that agree; among them has to be every rank that holds a
            shard. None: all ranks for an optimizer with sharded parameters (DTensors),
            this rank alone for any other.
        half_gradients: whether gradients may be in fp16, because parameters are.
        growth_factor: what the scale is multiplied by after `growth_interval` steps in a row.
        backoff_factor: what it is multiplied by after a step that was skipped.
        growth_interval: see `growth_factor`.
        enabled: if not, nothing is scaled and no step is skipped.
    """

    def __init__(
        self,
        device_type: str,
        *,
        init_scale: float = 2.0**16,
        process_group: dist.ProcessGroup | None = None,
        half_gradients: bool = False,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            device_type, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._process_group = process_group
        self._half_gradients = half_gradients

    def agrees(self, *, sharded: bool) -> bool:
        """Whether ranks compare what they found.

        Args:
            sharded: whether the optimizer has DTensors.
        """
        return sharded or self._process_group is not None

    # torch's own method, which unscale_() and step() call to unscale and to look for
    # infinities at once; there is no public place between looking and deciding.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        sharded = _is_sharded(optimizer)
        grads = cast(Optimizer, _OfThisRank(optimizer)) if sharded else optimizer
        found = super()._unscale_grads_(
            grads, inv_scale, found_inf, allow_fp16 or self._half_gradients
        )
        if not self.agrees(sharded=sharded):
            return found
        # A rank may have found nothing because it had no gradient at all. It joins with
        # what it was given, and has a verdict to step by afterwards.
        verdicts = list(found.values()) or [found_inf]
        verdict = torch.stack([one.to(found_inf.device) for one in verdicts]).amax()
        dist.all_reduce(verdict, dist.ReduceOp.MAX, group=self._process_group)
        return {device: verdict.to(device) for device in found} or {verdict.device: verdict}


class _OfThisRank:
    """An optimizer as `_unscale_grads_` sees it, with this rank's part of each DTensor.

    Given DTensors themselves, torch reduces over their mesh while it looks, and a rank that
    has no gradient to look at would not be there.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        self.param_groups = [{"params": [_local(param) for param in params]}]


def _local(param: Tensor) -> Tensor:
    """A tensor whose gradient shares memory with this rank's part of the parameter's."""
    grad = param.grad
    to_local = getattr(grad, "to_local", None)
    if grad is None or to_local is None:
        return param
    with torch.no_grad():
        part: Tensor = to_local()
        stand_in = part.detach()
        stand_in.grad = part
    return stand_in


def _is_sharded(optimizer: Optimizer) -> bool:
    # Importing DTensor takes its time, and where nobody has there is none.
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not dist.is_initialized():
        return False
    return any(
        isinstance(param, tensors.DTensor)
        for group in optimizer.param_groups
        for param in group["params"]
    )
