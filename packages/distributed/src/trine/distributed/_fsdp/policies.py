"""What a user asks for: precision and offload policies. Frozen, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "ShardPlacement"]


@dataclass(frozen=True)
class ShardPlacement:
    """What a `shard_placement_fn` may return to put a parameter on a mesh of its own.

    Attributes:
        placement: which dim to cut.
        mesh: the ranks to cut it over, 1-D or 2-D as in `fully_shard`.
    """

    placement: Shard
    mesh: DeviceMesh

    def __post_init__(self) -> None:
        for name, kind in (("placement", Shard), ("mesh", DeviceMesh)):
            given = getattr(self, name)
            if not isinstance(given, kind):
                raise TypeError(f"ShardPlacement.{name} must be a {kind.__name__}, got {given!r}.")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a sharded module computes and reduces.

    The sharded parameters, their gradients and the optimizer keep the dtype in which the
    model was made.

    Attributes:
        param_dtype: dtype of the gathered parameters, so of the computation and of the
            all-gather; None for the parameters' own.
        reduce_dtype: dtype in which gradients are sent for the reduction; None for
            `param_dtype`. Sums of half types are formed in fp32.
        output_dtype: dtype to which floating-point outputs of the module are cast; None
            to leave them.
        cast_forward_inputs: whether floating-point inputs of the module are cast to
            `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(
                    f"MixedPrecisionPolicy.{name} must be a torch.dtype or None, got {dtype!r}."
                )
            if not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point dtype, got {dtype}. "
                    "Parameters of other dtypes are never cast."
                )


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards live between uses. This base class: on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and optimizer state in host memory.

    The optimizer then computes on the host. Shards are copied to the device before each
    all-gather and gradients back after each reduction, beside the computation. Buffers of
    modules are left where they are: move them to the device.

    Operations of DTensor that communicate such parameters (`full_tensor`, torch's own
    `clip_grad_norm_`) need a process group that moves host memory too: start it with the
    backend `"cpu:gloo,cuda:nccl"`. Training needs none, nor does our `clip_grad_norm_`.

    Attributes:
        pin_memory: whether that memory is page-locked, where the device gains from it: copies
            then need not be waited for. Leave it off if the host is short of memory.
    """

    pin_memory: bool = True
