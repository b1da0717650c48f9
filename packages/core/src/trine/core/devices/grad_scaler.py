"""Scaling of the loss for fp16, in agreement with the ranks that hold the other shards."""

from __future__ import annotations

import sys

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
    found: one all-reduce of one number, which every rank has to join.

    Args:
        device_type: where the scale lives.
        init_scale: the first factor of the loss.
        process_group: the ranks that agree. None: all of them for an optimizer with
            sharded parameters (DTensors), this rank alone for any other.
        half_gradients: whether gradients may be in fp16, because parameters are.
    """

    def __init__(
        self,
        device_type: str,
        *,
        init_scale: float = 2.0**16,
        process_group: dist.ProcessGroup | None = None,
        half_gradients: bool = False,
    ) -> None:
        super().__init__(device_type, init_scale=init_scale)
        self._process_group = process_group
        self._half_gradients = half_gradients

    # torch's own method, which unscale_() and step() call to unscale and to look for
    # infinities at once; there is no public place between looking and deciding.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16 or self._half_gradients
        )
        if self._process_group is None and not _is_sharded(optimizer):
            return found
        # A rank may have found nothing because it had no gradient at all. It joins with
        # what it was given, and has a verdict to step by afterwards.
        verdicts = list(found.values()) or [found_inf]
        verdict = torch.stack([one.to(found_inf.device) for one in verdicts]).amax()
        dist.all_reduce(verdict, dist.ReduceOp.MAX, group=self._process_group)
        return {device: verdict.to(device) for device in found} or {verdict.device: verdict}


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
