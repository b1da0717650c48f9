"""fully_shard: the recipe. What it does step by step is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from trine.distributed._fsdp import arguments, hooks
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import comm_for
from trine.distributed._fsdp.managed import ManagedParam, managed_params
from trine.distributed._fsdp.module import sharded_class
from trine.distributed._fsdp.offload import HostMemory
from trine.distributed._fsdp.param import ShardedParam
from trine.distributed._fsdp.param_group import ParamGroup
from trine.distributed._fsdp.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacement,
)
from trine.distributed._fsdp.reducer import ReduceSettings
from trine.distributed._fsdp.root import share_buffers
from trine.distributed._fsdp.schedule import UnitSettings
from trine.distributed._fsdp.state import FSDPState, set_state, state_of
from trine.distributed._fsdp.subgroup import SubgroupGather
from trine.distributed._fsdp.successors import note_successor
from trine.distributed.mesh import DataParallelMeshDims, MeshAxes, init_mesh
from trine.distributed.process_groups import leave_at_exit

__all__ = ["fully_shard", "register_fsdp_forward_method", "shard_unit", "share_comm_ctx"]

M = TypeVar("M")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | ShardPlacement | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shard a module's parameters over ranks, in place; train it as if it were not.

    Call it bottom-up, on each block and then on the model: each call makes one unit whose
    parameters are gathered together before the module computes, freed after it, gathered
    again for its backward, and whose gradients are averaged over the ranks and sharded.
    Parameters become DTensors, cut along dim 0 unless `shard_placement_fn` says otherwise; make
    the optimizer afterwards. Every rank must make the same calls and hold the same initial
    values. A parameter that is a DTensor already, over tensor-parallel ranks, is cut once more
    and is that DTensor again while the module computes; call `parallelize_module` first.

    Args:
        module: changed in place: its class becomes `FSDP<name>` with the methods of
            `FSDPModule`, and its parameters, except those of modules sharded before, are
            replaced by sharded ones. Buffers are left as they are. A list of modules makes
            one unit: gathered when the first of them runs, freed when all have run.
        mesh: the ranks. 1-D: shard over it. 2-D: hold copies along the first axis and
            shard each over the second (hybrid sharding). None: shard over all ranks.
        reshard_after_forward: free the gathered parameters after forward (True) or keep
            them until backward (False); None: True, but False for the root, whose backward
            comes first. A number n, which must divide the ranks that parameters are sharded
            over: keep 1/n of them, and gather for backward among n neighbouring ranks, such
            as those of one machine; 1 means False, and all ranks mean True. Between forward
            and backward the module shows the sharded parameters, as after True.
        shard_placement_fn: called with each whole parameter; returns the dim to cut as
            `Shard(dim)`, a `ShardPlacement` for a mesh of its own too, or None for dim 0.
        mp_policy: dtypes of computation, reduction and output; None for the parameters' own.
        offload_policy: `CPUOffloadPolicy` keeps shards, gradients and so the optimizer's
            state in host memory; on a mesh of CPUs they are there already.
        ignored_params: left as they are: not sharded, not gathered, not reduced. One set may
            serve all calls: those that are not in the module are passed over.
        dp_mesh_dims: which axes of `mesh` to shard and replicate over, by name. Parameters
            may be DTensors over the whole of `mesh`, replicated along these axes.

    Objects that programs made with torch's FSDP2 (policies, `DataParallelMeshDims`, results of
    `shard_placement_fn`) are taken for ours.

    Returns:
        `module` itself.

    Raises:
        ValueError: if a module is sharded already, or shares a parameter with a
            module that another call has sharded; if a parameter is distributed already over
            the ranks that it would be cut over.
        TypeError: for an argument of another type, naming it.
    """
    modules = _modules(module)
    dims = arguments.as_dims(dp_mesh_dims)
    state = shard_unit(
        modules,
        lambda: MeshAxes.of(arguments.as_mesh(mesh) or init_mesh(), dims),
        reshard_after_forward=reshard_after_forward,
        place=arguments.as_placement_fn(shard_placement_fn),
        policy=arguments.as_precision_policy(mp_policy),
        offload=arguments.as_offload_policy(offload_policy),
        ignored=arguments.as_ignored(ignored_params),
    )
    for each in modules:
        each.__class__ = sharded_class(type(each))
    hooks.install(state)
    return module


def shard_unit(
    modules: Sequence[nn.Module],
    axes_of: Callable[[], MeshAxes],
    *,
    reshard_after_forward: bool | int | None,
    place: Callable[[nn.Parameter], object] | None,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter],
) -> FSDPState:
    """Make one unit of modules: its parameters are sharded, and nothing watches them run yet.

    Args:
        modules: beside each other; sharded ones below them keep their parameters.
        axes_of: the ranks; asked for when the parameters were found to be free.
        reshard_after_forward: see `fully_shard`, as are the others.
        place: which dim of a parameter to cut, and over which mesh.
        policy: dtypes.
        offload: where shards live.
        ignored: parameters to leave as they are.
    """
    params = managed_params(modules, ignored)
    axes = axes_of()
    placed = [_placed(each, place, axes) for each in params]
    sizes = {each[2].shard_size: f"{each[0].fqn} is sharded over" for each in placed}
    sizes[axes.shard_size] = "parameters are sharded over"
    reshards, again_among = arguments.as_reshard(reshard_after_forward, sizes)
    settings = UnitSettings(reshard_after_forward=reshards)
    reduce_settings = ReduceSettings()
    groups = _make_groups(placed, policy, reduce_settings, again_among, offload)
    state = FSDPState(tuple(modules), axes, policy, groups, settings, reduce_settings)
    for each in modules:
        set_state(each, state)
        for below in each.modules():
            # dynamo treats parameters of marked modules as exchangeable; so does generate()
            # of transformers decide that all ranks must go on together.
            below._is_fsdp_managed_module = True  # type: ignore[assignment]
    leave_at_exit()
    return state


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a sharded module compute as `forward` does.

    Its parameters are gathered before the method runs and freed after it, and gradients
    are reduced. On a module that is not sharded this does nothing, so that a program can
    call it either way.

    Args:
        module: changed in place.
        method_name: a method, such as `"encode"`.

    Raises:
        AttributeError: if the module has no such method.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__} has no method {method_name!r}.")
    state = state_of(module)
    if state is not None:
        setattr(module, method_name, hooks.as_forward(state, module, method))


def share_comm_ctx(modules: list[nn.Module]) -> None:
    """Let several roots share their communication buffers.

    For models that are used in one step but not inside each other: encoders beside a
    backbone, or the stages of a pipeline on one rank.

    Args:
        modules: sharded modules, each a root of its own.

    Raises:
        ValueError: if one of them is not sharded.
    """
    states = []
    for module in modules:
        state = state_of(module)
        if state is None:
            raise ValueError(
                f"share_comm_ctx takes modules that fully_shard was called on, got a plain "
                f"{type(module).__name__}."
            )
        states.append(state)
    share_buffers(states)


def _modules(given: object) -> tuple[nn.Module, ...]:
    """The modules of a call, once all of them can be sharded."""
    several = isinstance(given, (list, tuple))
    modules = tuple(cast(Sequence[nn.Module], given)) if several else (cast(nn.Module, given),)
    if not modules:
        raise ValueError("fully_shard got an empty list. Give it at least one module.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"fully_shard shards an nn.Module or a list of them, got {type(module).__name__}."
            )
        name = type(module).__name__
        if state_of(module) is not None:
            raise ValueError(f"fully_shard was called on this {name} before. One call per module.")
        # Asked of the object: a compiled module has its forward there.
        if getattr(module.forward, "__func__", None) is nn.Module.forward:
            raise ValueError(
                f"{name} has no forward of its own, so nothing would ever gather its parameters. "
                "Call fully_shard on the modules inside it instead."
            )
    if len(set(map(id, modules))) < len(modules):
        raise ValueError("fully_shard got a list that holds one module twice.")
    for module in modules:
        inside = set(map(id, module.modules())) - {id(module)}
        for other in modules:
            if id(other) in inside:
                raise ValueError(
                    f"fully_shard got a list in which the {type(module).__name__} contains the "
                    f"{type(other).__name__}. One unit is made of modules beside each other."
                )
    return modules


_Placed = tuple[ManagedParam, int, MeshAxes]


def _placed(
    each: ManagedParam,
    place: Callable[[nn.Parameter], object] | None,
    axes: MeshAxes,
) -> _Placed:
    """The parameter with the dim to cut and the axes to cut it over."""
    returned = None if place is None else place(each.param)
    asked, of_its_own = arguments.as_placement(returned, each.fqn)
    axes = of_its_own or axes
    if asked is None:
        return each, 0, axes
    dims = each.param.dim()
    if not -dims <= asked.dim < dims:
        raise ValueError(
            f"shard_placement_fn returned {asked!r} for {each.fqn}, which has {dims} dims: "
            f"expected one from {-dims} to {dims - 1}, or None for a 0-dim parameter."
        )
    return each, asked.dim % dims, axes


def _make_groups(
    placed: list[_Placed],
    policy: MixedPrecisionPolicy,
    settings: ReduceSettings,
    again_among: int | None,
    offload: OffloadPolicy,
) -> list[ParamGroup]:
    """One group for each dtype and mesh, in the order in which they occur."""
    members: dict[tuple[object, ...], list[ShardedParam]] = {}
    for each, dim, axes in placed:
        host = _host_memory(axes, offload)
        home = axes.device.torch_device if host is None else host.home
        sharded = ShardedParam(each.param, each.slots, axes, each.fqn, dim, home=home)
        key = (each.param.dtype, id(axes.mesh), axes.shard_group, axes.replicate_group)
        members.setdefault(key, []).append(sharded)
        note_successor(each.param, sharded)
    groups = []
    for params in members.values():
        axes = params[0].axes
        # Each with a pool of its own until the root lets them share one.
        comm = comm_for(axes.shard_group, BufferPool(), axes.device_type)
        again = None
        if again_among is not None and again_among < axes.shard_size:
            few = axes.shard_subgroup(again_among)
            again = SubgroupGather(comm_for(few, comm.pool, axes.device_type))
        host = _host_memory(axes, offload)
        groups.append(ParamGroup(params, axes, comm, policy, settings, again, host))
    return groups


def _host_memory(axes: MeshAxes, offload: OffloadPolicy) -> HostMemory | None:
    """The host's memory for shards, if it is asked for and is not the device's own."""
    if not isinstance(offload, CPUOffloadPolicy) or axes.device.kind == "cpu":
        return None
    return HostMemory(axes.device, pin=offload.pin_memory)
