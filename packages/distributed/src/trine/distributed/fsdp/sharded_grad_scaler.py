"""Gradient scaling for fp16 on sharded parameters, under the name that torch gives it."""

from trine.distributed._wrapper.grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
