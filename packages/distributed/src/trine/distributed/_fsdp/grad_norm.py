"""Clip gradients by their true norm, over all shards of all parameters.

The p-norm of the whole is the p-th root of the sum of p-th powers of the norms of its
parts; for p = inf it is their maximum. A part counts once: powers are added up over the
mesh axes along which a gradient is sharded, and not over those that hold copies. All of it
is computed in fp32 at least, whatever the dtype of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from trine.core import get_device
from trine.distributed._fsdp.arguments import as_number
from trine.distributed._fsdp.labels import all_reduce

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
        max_norm: the most that the norm may be; 0 makes all gradients zero.
        norm_type: p of the norm; `math.inf` or "inf" for the greatest magnitude.
        error_if_nonfinite: raise if the norm is NaN or infinite, instead of scaling by it.

    Returns:
        The norm before clipping, as a plain scalar tensor, the same on every rank, in fp32, or
        fp64 if a gradient is. NaN if a gradient holds NaN on any rank.

    Raises:
        ValueError: if `norm_type` is not positive, `max_norm` is negative or NaN, or a gradient
            is a partial sum.
        TypeError: for an argument of another type, naming it.
        RuntimeError: for a norm that is not finite, if asked for.
        CommError: if another rank has gone, or does not come.
    """
    p = as_number(norm_type, "norm_type")
    if not p > 0:
        raise ValueError(f"norm_type must be positive or math.inf, got {norm_type!r}.")
    limit = as_number(max_norm, "max_norm")
    if not limit >= 0:
        raise ValueError(f"max_norm must be zero or positive, got {max_norm!r}.")
    grads = [param.grad for param in _params(parameters) if param.grad is not None]
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
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for locals_ in by_axes.values():
        for local in locals_:
            local.mul_(factor.to(local.device))
    return norm


def _params(given: object) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    wanted = "parameters must be a tensor or an iterable of tensors, such as model.parameters()"
    if isinstance(given, nn.Module | str) or not isinstance(given, Iterable):
        raise TypeError(f"{wanted}; got {type(given).__name__}.")
    found = list(given)
    for position, each in enumerate(found):
        if not isinstance(each, Tensor):
            raise TypeError(f"{wanted}; its element {position} is of type {type(each).__name__}.")
    return found


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
    device = locals_[0].device
    norm = _local_norm(locals_, p)
    power = norm if math.isinf(p) else norm**p
    axes = tuple(axis for axis in axes if mesh is not None and mesh.size(axis) > 1)
    if mesh is None or not axes:
        return power
    op = dist.ReduceOp.SUM
    if math.isinf(p):
        # gloo's maximum, and perhaps others, loses NaN: whether there is one travels beside.
        is_nan = power.isnan()
        power = torch.stack([power.masked_fill(is_nan, 0.0), is_nan.to(power.dtype)])
        op = dist.ReduceOp.MAX
    # Gradients may live on the host, whose memory the backend need not reach.
    power = get_device(mesh.device_type).tensor_to_device(power)
    for axis in axes:
        all_reduce("the gradient norm", power, op, mesh.get_group(axis))
    power = power.to(device)
    return power[0].masked_fill(power[1] > 0, math.nan) if math.isinf(p) else power


def _local_norm(locals_: list[Tensor], p: float) -> Tensor:
    """The norm of what this rank holds of some gradients, in fp32 or, if one is, fp64."""
    dtype = torch.float32
    for local in locals_:
        dtype = torch.promote_types(dtype, local.dtype)
    if dtype.is_complex:
        dtype = torch.float64 if dtype is torch.complex128 else torch.float32
    held = [local for local in locals_ if local.numel()]
    # torch's own is faster for many tensors, but computes in their dtype.
    exact = [local for local in held if local.dtype not in (torch.float16, torch.bfloat16)]
    norms = [
        torch.linalg.vector_norm(local, p, dtype=torch.float32)
        for local in held
        if local.dtype in (torch.float16, torch.bfloat16)
    ]
    if exact:
        norms.append(torch.nn.utils.get_total_norm(exact, p))
    if not norms:
        return torch.zeros((), dtype=dtype, device=locals_[0].device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(dtype) for each in norms]), p)
    return norm
