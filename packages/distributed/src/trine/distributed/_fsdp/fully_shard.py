"""fully_shard: the recipe. What it does step by step is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trine.distributed._fsdp import hooks
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import comm_for
from trine.distributed._fsdp.managed import ManagedParam, managed_params, note_sharded
from trine.distributed._fsdp.module import sharded_class
from trine.distributed._fsdp.param import ShardedParam
from trine.distributed._fsdp.param_group import ParamGroup
from trine.distributed._fsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from trine.distributed._fsdp.schedule import UnitSettings
from trine.distributed._fsdp.state import FSDPState, set_state, state_of
from trine.distributed.mesh import init_mesh

__all__ = ["fully_shard"]

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Shard a module's parameters over ranks, in place; train it as if it were not.

    Call it bottom-up, on each block and then on the model: each call makes one unit whose
    parameters are gathered together before the module computes, freed after it, gathered
    again for its backward, and whose gradients are averaged over the ranks and sharded.
    Parameters become DTensors, cut along dim 0; make the optimizer afterwards. Every rank
    must make the same calls and hold the same initial values.

    Args:
        module: changed in place: its class becomes `FSDP<name>` with the methods of
            `FSDPModule`, and its parameters, except those of modules sharded before, are
            replaced by sharded ones. Buffers are left as they are.
        mesh: a 1-D mesh of the ranks to shard over; None for all ranks.
        reshard_after_forward: free the gathered parameters after forward (True) or keep
            them until backward (False); None: True, but False for the root, whose backward
            comes first.
        shard_placement_fn: not implemented yet.
        mp_policy: dtypes of computation, reduction and output; None for the parameters' own.
        offload_policy: not implemented yet, except for the base class, which does nothing.
        ignored_params: not implemented yet.
        dp_mesh_dims: not implemented yet.

    Returns:
        `module` itself.

    Raises:
        ValueError: if the module is sharded already, has no parameters, has a 0-dim
            parameter, or shares one with a module that another call has sharded.
        TypeError: if `module` is not a module.
        NotImplementedError: for an argument that is not implemented yet, naming it.
    """
    _refuse_unimplemented(
        shard_placement_fn=shard_placement_fn is not None,
        offload_policy=offload_policy is not None and type(offload_policy) is not OffloadPolicy,
        ignored_params=bool(ignored_params),
        dp_mesh_dims=dp_mesh_dims is not None,
        module=isinstance(module, (list, tuple)),
        reshard_after_forward=type(reshard_after_forward) is int,
        mesh=mesh is not None and mesh.ndim != 1,
    )
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard shards an nn.Module, got {type(module).__name__}.")
    if state_of(module) is not None:
        raise ValueError(
            f"fully_shard was called on this {type(module).__name__} before. One call per module."
        )
    if type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward of its own, so nothing would ever gather "
            "its parameters. Call fully_shard on the modules inside it instead."
        )
    params = managed_params(module)
    if mesh is None:
        mesh = init_mesh()
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    settings = UnitSettings(None if reshard_after_forward is None else bool(reshard_after_forward))
    groups = _make_groups(params, mesh, policy, type(module).__name__)
    state = FSDPState(module, mesh, policy, groups, settings)
    set_state(module, state)
    module.__class__ = sharded_class(type(module))  # type: ignore[assignment]  # a subclass
    hooks.install(state)
    return module


_NOT_YET = {
    "module": "a list of modules as one unit",
    "mesh": "a mesh of more than one axis",
    "reshard_after_forward": "resharding to a smaller world size (an integer)",
}


def _refuse_unimplemented(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            what = f": {_NOT_YET[name]}" if name in _NOT_YET else ""
            raise NotImplementedError(f"fully_shard does not implement {name} yet{what}.")


def _make_groups(
    params: list[ManagedParam], mesh: DeviceMesh, policy: MixedPrecisionPolicy, owner: str
) -> list[ParamGroup]:
    """One group for each dtype, in the order in which the dtypes occur."""
    by_dtype: dict[Any, list[ShardedParam]] = {}
    for each in params:
        sharded = ShardedParam(each.param, each.slots, mesh, each.fqn)
        by_dtype.setdefault(each.param.dtype, []).append(sharded)
        note_sharded(each.param, f"{owner}.{each.fqn}")
    process_group = mesh.get_group()
    return [
        # Each with a pool of its own until the root lets them share one.
        ParamGroup(members, mesh, comm_for(process_group, BufferPool()), policy)
        for members in by_dtype.values()
    ]
