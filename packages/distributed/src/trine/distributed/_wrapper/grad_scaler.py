"""The gradient scaler of core with the arguments of torch's for its wrapper."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trine.core import CUDADevice, get_device
from trine.core.devices import GradScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """Scale the loss for fp16 so that all ranks skip a step, or none does.

    Used as `torch.amp.GradScaler` is. Whenever gradients are unscaled the ranks of
    `process_group` compare what they found, so each of them must unscale or step.

    Args:
        device: where the scale lives. On a machine without CUDA "cuda", the default, means the
            device there is, and the scaler stays enabled.
        init_scale: the first factor of the loss.
        backoff_factor: what the scale is multiplied by after a step that was skipped.
        growth_factor: what it is multiplied by after `growth_interval` steps in a row.
        growth_interval: see `growth_factor`.
        enabled: if not, nothing is scaled and no step is skipped.
        process_group: every rank that holds a shard, or a copy; None for all ranks.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        kind = torch.device(device).type
        if kind == "cuda" and CUDADevice.count() == 0:
            kind = get_device("auto").kind
        super().__init__(
            kind,
            init_scale=init_scale,
            process_group=process_group,
            half_gradients=True,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )

    def agrees(self, *, sharded: bool) -> bool:
        """Always, where there are other ranks: plain parameters are the same on all of them."""
        return dist.is_initialized()
