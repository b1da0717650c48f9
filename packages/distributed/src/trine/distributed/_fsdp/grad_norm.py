"""Clip gradients by their true norm, over all shards of all parameters.

The p-norm of the whole is the p-th root of the sum of p-th powers of the norms of its
parts; for p = inf it is their maximum. A part counts once: powers are added up over the
mesh axes along which a gradient is sharded, and not over those that hold copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from trine.core import get_device
from trine.distributed._fsdp.labels import check_label, debugging

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`.

    Works on sharded parameters on any mesh, on plain ones, and on both together; plain
    gradients must be equal on all ranks. Every rank must call it.

    Args:
        parameters: whose gradients; those without one are passed over. Changed in place.
        max_norm: the most that the norm may be.
        norm_type: p of the norm; `math.inf` for the greatest magnitude.
        error_if_nonfinite: raise if the norm is NaN or infinite, instead of scaling by it.

    Returns:
        The norm before clipping, as a plain scalar tensor, the same on every rank, at least
        fp32.

    Raises:
        ValueError: if `norm_type` is not positive, or a gradient is a partial sum.
        RuntimeError: for a norm that is not finite, if asked for.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be positive or math.inf, got {norm_type!r}.")
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in given if param.grad is not None]
    if not grads:
        return torch.zeros(())
    by_axes: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for grad in grads:
        by_axes.setdefault(_sharded_over(grad), []).append(_local(grad))
    powers = [_power(locals_, mesh, axes, p) for (mesh, axes), locals_ in by_axes.items()]
    together = torch.stack([power.to(powers[0].device) for power in powers])
    norm = together.max() if math.isinf(p) else together.sum() ** (1 / p)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The gradient norm (p = {p:g}) over all ranks is {norm.item()}; no gradient was "
            "changed. Look for NaN in the losses, or lower the learning rate."
        )
    # The small addend is torch's: it keeps a norm of zero from dividing.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for locals_ in by_axes.values():
        for local in locals_:
            local.mul_(factor.to(local.device))
    return norm


def _sharded_over(grad: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh and those of its axes over which the parts of a gradient are dealt."""
    if not isinstance(grad, DTensor):
        return None, ()
    if any(isinstance(placement, Partial) for placement in grad.placements):
        raise ValueError(
            f"A gradient of shape {tuple(grad.shape)} is a partial sum {grad.placements}: reduce "
            "it before clipping."
        )
    axes = (i for i, placement in enumerate(grad.placements) if not placement.is_replicate())
    return grad.device_mesh, tuple(axes)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _power(
    locals_: list[Tensor], mesh: DeviceMesh | None, axes: tuple[int, ...], p: float
) -> Tensor:
    """The p-th power of the norm of some gradients over all ranks; for inf, the norm."""
    held = [local for local in locals_ if local.numel()]
    dtype = torch.float32
    for local in locals_:
        dtype = torch.promote_types(dtype, local.dtype)
    if dtype.is_complex:
        dtype = torch.float64 if dtype is torch.complex128 else torch.float32
    power = torch.zeros((), dtype=dtype, device=locals_[0].device)
    if held:
        norm = torch.nn.utils.get_total_norm(held, p).to(dtype)
        power = norm if math.isinf(p) else norm**p
    if mesh is not None:
        op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
        for axis in axes:
            if mesh.size(axis) > 1:
                group = mesh.get_group(axis)
                # Gradients may live on the host, whose memory the backend need not reach.
                power = get_device(mesh.device_type).tensor_to_device(power)
                if debugging():
                    check_label(group, "all_reduce of the gradient norm", power)
                dist.all_reduce(power, op=op, group=group)
    return power.to(locals_[0].device)
