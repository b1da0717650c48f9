"""What the wrapper's constructor is asked for, with torch's names, fields and defaults.

Unlike the policies of the engine these may be changed after they were made, as torch's may, so
they are checked where they are used. Torch's own are taken for ours: they are known by the name
of their class and the package that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

import torch
from torch import nn

from trine.distributed._fsdp.arguments import described, is_torchs, same_config

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "MixedPrecision",
    "ShardingStrategy",
    "as_backward_prefetch",
    "as_cpu_offload",
    "as_mixed_precision",
    "as_strategy",
    "same_member",
]

E = TypeVar("E", bound=Enum)

# What all batch norms are made from; it has no public name.
_BATCH_NORM = nn.BatchNorm1d.__bases__[0]


class ShardingStrategy(Enum):
    """What is cut over ranks, and what each rank keeps whole.

    Attributes:
        FULL_SHARD: parameters, gradients and optimizer state are sharded; parameters are whole
            only while their module computes.
        SHARD_GRAD_OP: the same, but parameters stay whole from forward until backward has ended
            (inside `no_sync`, beyond it).
        NO_SHARD: every rank keeps all of it, and gradients are averaged.
        HYBRID_SHARD: FULL_SHARD within a group of ranks, such as a host, copies between groups.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within a group of ranks, copies between groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether there are groups that hold copies of each other."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def keeps_until_backward(self) -> bool:
        """Whether parameters stay whole between forward and backward."""
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


class BackwardPrefetch(Enum):
    """When backward starts to gather the parameters that it needs next.

    Attributes:
        BACKWARD_PRE: before it computes with the current ones: most overlap, most memory.
        BACKWARD_POST: after it has computed with the current ones and freed them.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """The dtypes of computation, reduction and buffers.

    The sharded parameters, the optimizer and what is saved keep the dtype in which the model
    was made.

    Attributes:
        param_dtype: of the gathered parameters, so of the computation; None for their own.
        reduce_dtype: in which gradients are reduced; None for `param_dtype`.
        buffer_dtype: of floating-point buffers while their module computes; None for their own.
        keep_low_precision_grads: leave gradients in the dtype of the reduction, for optimizers
            that take them so.
        cast_forward_inputs: cast the floating-point inputs of every wrapped module to
            `param_dtype`, not only those of the root.
        cast_root_forward_inputs: cast those of the root.
        _module_classes_to_ignore: modules of these classes are wrapped on their own and compute
            in the dtype of their parameters.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BATCH_NORM,)


@dataclass
class CPUOffload:
    """Where sharded parameters live.

    Attributes:
        offload_params: in the memory of the host, with gradients and optimizer state. On a CPU
            they are there already.
    """

    offload_params: bool = False


def as_strategy(given: object) -> ShardingStrategy | None:
    """What `sharding_strategy` names; None for nothing chosen."""
    return None if given is None else same_member(ShardingStrategy, given, "sharding_strategy")


def as_backward_prefetch(given: object) -> BackwardPrefetch | None:
    """What `backward_prefetch` names; None for no prefetching."""
    return None if given is None else same_member(BackwardPrefetch, given, "backward_prefetch")


def as_mixed_precision(given: object) -> MixedPrecision:
    """What `mixed_precision` holds.

    Raises:
        TypeError: for another type, or a field of another type.
        ValueError: for a dtype that is not a floating-point one.
    """
    policy = MixedPrecision() if given is None else same_config(MixedPrecision, given)
    if policy is None:
        raise TypeError(
            f"mixed_precision must be a MixedPrecision or None, got {described(given)}. For "
            "example MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32); "
            "fully_shard takes a MixedPrecisionPolicy."
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(policy, name)
        if dtype is None:
            continue
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"MixedPrecision.{name} must be a torch.dtype or None, got {dtype!r}.")
        if not dtype.is_floating_point:
            raise ValueError(
                f"MixedPrecision.{name} must be a floating-point dtype, got {dtype}. Parameters "
                "and buffers of other dtypes are never cast."
            )
    return policy


def as_cpu_offload(given: object) -> CPUOffload:
    """What `cpu_offload` holds."""
    offload = CPUOffload() if given is None else same_config(CPUOffload, given)
    if offload is None:
        raise TypeError(
            f"cpu_offload must be a CPUOffload or None, got {described(given)}. For example "
            "CPUOffload(offload_params=True)."
        )
    return offload


def same_member(kind: type[E], given: object, name: str) -> E:
    """`given` if it is a member of `kind`, ours of the same name if it is torch's.

    Raises:
        TypeError: otherwise; `name` is the argument's.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, Enum) and is_torchs(given, kind.__name__):
        return kind[given.name]
    example = next(iter(kind))
    raise TypeError(
        f"{name} must be a {kind.__name__} or None, got {described(given)}. For example {example}."
    )
