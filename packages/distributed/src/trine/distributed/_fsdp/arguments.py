"""The arguments of `fully_shard` and of methods: checked by type, torch's objects made ours.

The engine does not import torch's FSDP. An object of it is known by the name of its class and
the package that made it, and is taken apart by its fields.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from trine.distributed._fsdp.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacement,
)
from trine.distributed._fsdp.torch_internals import of_class
from trine.distributed.mesh import DataParallelMeshDims, MeshAxes

__all__ = [
    "as_dims",
    "as_flag",
    "as_hook",
    "as_ignored",
    "as_mesh",
    "as_number",
    "as_offload_policy",
    "as_placement",
    "as_placement_fn",
    "as_precision_policy",
    "as_reshard",
    "described",
    "is_torchs",
    "same_config",
]

T = TypeVar("T")


def as_precision_policy(given: object) -> MixedPrecisionPolicy:
    """The policy of `mp_policy`."""
    policy = MixedPrecisionPolicy() if given is None else same_config(MixedPrecisionPolicy, given)
    if policy is None:
        example = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        raise _wrong_type("a MixedPrecisionPolicy", "mp_policy", given, example)
    return policy


def as_offload_policy(given: object) -> OffloadPolicy:
    """The policy of `offload_policy`."""
    if given is None:
        return OffloadPolicy()
    policy = same_config(CPUOffloadPolicy, given) or same_config(OffloadPolicy, given)
    if policy is None:
        expected = "an OffloadPolicy, such as a CPUOffloadPolicy,"
        raise _wrong_type(expected, "offload_policy", given, "CPUOffloadPolicy()")
    return policy


def as_mesh(given: object) -> DeviceMesh | None:
    """What `mesh` holds."""
    if given is None or isinstance(given, DeviceMesh):
        return given
    raise _wrong_type("a DeviceMesh", "mesh", given, "init_mesh({'replicate': 2, 'shard': 4})")


def as_dims(given: object) -> DataParallelMeshDims | None:
    """What `dp_mesh_dims` names."""
    dims = None if given is None else same_config(DataParallelMeshDims, given)
    if given is not None and dims is None:
        example = "DataParallelMeshDims(shard='fsdp', replicate='ddp')"
        raise _wrong_type("a DataParallelMeshDims", "dp_mesh_dims", given, example)
    return dims


def as_placement_fn(given: object) -> Callable[[nn.Parameter], object] | None:
    """The function of `shard_placement_fn`."""
    if given is None or (callable(given) and not isinstance(given, type)):
        return given
    raise _wrong_type("a function", "shard_placement_fn", given, "lambda param: Shard(0)")


def as_ignored(given: object) -> set[nn.Parameter]:
    """The parameters of `ignored_params`."""
    if given is None:
        return set()
    if not isinstance(given, (set, frozenset, list, tuple)):
        raise _wrong_type("a set of parameters", "ignored_params", given, "{model.head.bias}")
    for param in given:
        if not isinstance(param, Tensor):
            raise TypeError(
                f"ignored_params holds parameters, got {type(param).__name__}: pass the tensors "
                "themselves, such as {model.head.bias}."
            )
    return set(given)


def as_flag(given: object, name: str) -> bool:
    """What a switch is set to: a bool, or what Python takes for one, such as a number."""
    # None and strings would pass for a decision that nobody made.
    if given is None or not hasattr(given, "__bool__"):
        raise TypeError(f"{name} must be True or False, got {described(given)}.")
    return bool(given)


def as_number(given: object, name: str) -> float:
    """A number, also one that is written out, such as "inf"."""
    try:
        return float(given)  # type: ignore[arg-type]  # raises for what is no number
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {described(given)}.") from None


def as_hook(given: object, name: str) -> Callable[[Tensor], None] | None:
    """What is called with reduced gradients; None for nothing."""
    if given is None or (callable(given) and not isinstance(given, type)):
        return given
    raise TypeError(
        f"{name} must be a function of one tensor or None, got {described(given)}. For example "
        "lambda grads: grads.clamp_(-1, 1)."
    )


def as_reshard(given: object, sizes: Mapping[int, str]) -> tuple[bool | None, int | None]:
    """What `reshard_after_forward` asks for.

    Args:
        given: by the user.
        sizes: the numbers of ranks that parameters are sharded over, with words for which.

    Returns:
        Whether to free after forward, None to leave that to the schedule; and among how many
        ranks to gather for backward, None for all.
    """
    if given is None or isinstance(given, bool):
        return given, None
    if not isinstance(given, int):
        raise TypeError(
            "reshard_after_forward must be True, False, None or a number of ranks, got "
            f"{described(given)}."
        )
    for size, which in sizes.items():
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        if given not in divisors:
            raise ValueError(
                f"reshard_after_forward={given} was given, but the {size} rank(s) that {which} "
                f"cannot be taken {given} at a time. Expected a divisor of {size} "
                f"({', '.join(map(str, divisors))}), True, False or None."
            )
    return (False, None) if given == 1 else (True, given)


def as_placement(given: object, fqn: str) -> tuple[Shard | None, MeshAxes | None]:
    """What `shard_placement_fn` returned for a parameter.

    Returns:
        How to cut it, and over which axes; None for the default.
    """
    if given is None or isinstance(given, Shard):
        return given, None
    if isinstance(given, ShardPlacement):
        return given.placement, MeshAxes.of(given.mesh)
    if is_torchs(given, "ShardPlacementResult"):
        result: Any = given
        placement: Shard | None = result.placement
        return placement, _axes_of(result.mesh_info, fqn)
    raise TypeError(
        f"shard_placement_fn returned {described(given)} for {fqn}; expected Shard(dim), a "
        "ShardPlacement, or None."
    )


def _axes_of(info: Any, fqn: str) -> MeshAxes:
    """The axes that torch's description of a mesh means."""
    mesh: DeviceMesh = info.mesh
    shard, replicate = info.shard_mesh_dim, info.replicate_mesh_dim
    if (mesh.ndim, replicate, shard) in ((1, None, 0), (2, 0, 1)):
        return MeshAxes.of(mesh)
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"shard_placement_fn returned a mesh of {mesh.ndim} axes without names for {fqn}, to "
            f"be sharded over axis {shard} and replicated over axis {replicate}. Name the axes "
            "when the mesh is made: init_mesh({'replicate': 2, 'shard': 4})."
        )
    return MeshAxes.of(
        mesh,
        DataParallelMeshDims(
            shard=None if shard is None else names[shard],
            replicate=None if replicate is None else names[replicate],
        ),
    )


def same_config(kind: type[T], given: object) -> T | None:
    """`given` if it is of `kind`, its counterpart if it is torch's of that name, else None."""
    if isinstance(given, kind):
        return given
    if not is_torchs(given, kind.__name__):
        return None
    # A field that this torch does not have yet keeps our default.
    names = [field.name for field in fields(kind) if hasattr(given, field.name)]  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: getattr(given, name) for name in names})


def is_torchs(given: object, name: str) -> bool:
    """Whether `given` is of the class of this name in torch's FSDP, or of one made from it."""
    return of_class(given, name, "torch.distributed.")


def _wrong_type(expected: str, name: str, given: object, example: str) -> TypeError:
    return TypeError(
        f"{name} must be {expected} or None, got {described(given)}. For example {name}={example}."
    )


def described(given: object) -> str:
    """An object for a message: what it looks like, and its class."""
    kind = type(given)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{reprlib.repr(given)} ({module}{kind.__qualname__})"
