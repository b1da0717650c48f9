"""Over which ranks, and on which device: the strategy and the groups or mesh as `MeshAxes`."""

from __future__ import annotations

import socket
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trine.core import Device, get_device
from trine.distributed._wrapper.options import ShardingStrategy
from trine.distributed.mesh import DataParallelMeshDims, MeshAxes, init_mesh, mesh_of_groups
from trine.distributed.process_groups import CPU_BACKENDS, init_process_group

__all__ = ["axes_for", "compute_device", "default_strategy"]

_HYBRID = (
    "give process_group=(the group to shard over, the group that holds copies), or a 2-D "
    "device_mesh with the axis of copies first, init_mesh({'replicate': 2, 'shard': 4})"
)


def compute_device(device_id: object, device_mesh: DeviceMesh | None, module: nn.Module) -> Device:
    """The device that a wrapped module computes on.

    Args:
        device_id: of the constructor: a device, its name, the number of a GPU, or None for
            where the module is, or what the backend moves.
        device_mesh: of the constructor, whose kind of device counts then.
        module: to wrap.

    Raises:
        TypeError: for another type.
        ValueError: for a device that is not there, or not of the mesh's kind.
    """
    if device_id is None:
        found = _where(module) if device_mesh is None else get_device(device_mesh.device_type)
        found.make_current()
        return found
    if isinstance(device_id, bool) or not isinstance(device_id, int | str | torch.device):
        raise TypeError(
            "device_id must be a torch.device, its name, the number of a GPU, or None, got "
            f"{device_id!r}. For example torch.device('cpu')."
        )
    named = f"cuda:{device_id}" if isinstance(device_id, int) else str(device_id)
    if torch.device(named).type == "cpu":
        named = "cpu"  # cpu:0 is the same
    device = get_device(named)
    if device_mesh is not None and device.kind != device_mesh.device_type:
        raise ValueError(
            f"device_id={device_id!r} is a {device.kind}, but device_mesh is over "
            f"{device_mesh.device_type} devices. Leave device_id out, or make the mesh for it."
        )
    device.make_current()
    return device


def _where(module: nn.Module) -> Device:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            return get_device(tensor.device)
    if not dist.is_initialized():
        return init_process_group()
    return get_device("cpu" if dist.get_backend() in CPU_BACKENDS else "auto")


def default_strategy(
    strategy: ShardingStrategy | None, device_mesh: DeviceMesh | None
) -> ShardingStrategy:
    """What is meant where none is chosen: what the axes of the mesh say, or FULL_SHARD."""
    if strategy is not None:
        return strategy
    hybrid = device_mesh is not None and device_mesh.ndim == 2
    return ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD


def axes_for(
    strategy: ShardingStrategy,
    process_group: object,
    device_mesh: DeviceMesh | None,
    device: Device,
) -> MeshAxes:
    """The ranks to shard over, and those that hold copies.

    Args:
        strategy: of the constructor.
        process_group: of the constructor: one, a pair, or None for all ranks.
        device_mesh: of the constructor; not both.
        device: that this rank computes on.

    Raises:
        TypeError: for another type.
        ValueError: if they do not suit the strategy, saying what would.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("Give process_group or device_mesh, not both: each says which ranks.")
    if device_mesh is not None:
        return _axes_of_mesh(strategy, device_mesh)
    if not dist.is_initialized():
        init_process_group(device=device.torch_device)
    if strategy.is_hybrid:
        return MeshAxes.of(_hybrid_mesh(process_group, device))
    return MeshAxes.of(*_flat(strategy, _one_group(strategy, process_group), device))


def _axes_of_mesh(strategy: ShardingStrategy, mesh: object) -> MeshAxes:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a DeviceMesh or None, got {type(mesh).__name__}.")
    if strategy.is_hybrid != (mesh.ndim == 2) or mesh.ndim > 2:
        expected = (
            f"needs two axes: {_HYBRID}"
            if strategy.is_hybrid
            else (
                "takes one axis: pass one, such as mesh['shard'], or, to hold copies along the "
                "first and shard over the second, sharding_strategy=ShardingStrategy.HYBRID_SHARD"
            )
        )
        raise ValueError(
            f"{strategy.name} on a device_mesh of {mesh.ndim} axes {mesh.mesh_dim_names} of "
            f"{tuple(mesh.shape)} ranks: it {expected}."
        )
    if strategy is ShardingStrategy.NO_SHARD:
        return MeshAxes.of(*_flat(strategy, mesh.get_group(0), get_device(mesh.device_type)))
    return MeshAxes.of(mesh)


def _flat(
    strategy: ShardingStrategy, group: dist.ProcessGroup | None, device: Device
) -> tuple[DeviceMesh, DataParallelMeshDims | None]:
    name = "replicate" if strategy is ShardingStrategy.NO_SHARD else "shard"
    dims = DataParallelMeshDims(replicate=name) if name == "replicate" else None
    if group is None:
        return init_mesh({name: dist.get_world_size()}, device=device.torch_device), dims
    return DeviceMesh.from_group(group, device.kind, mesh_dim_names=(name,)), dims


def _one_group(strategy: ShardingStrategy, given: object) -> dist.ProcessGroup | None:
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(given, (list, tuple)):
        raise ValueError(
            f"{strategy.name} takes one process_group, got {len(given)}. A pair is for "
            "HYBRID_SHARD, which shards over the first and holds copies over the second."
        )
    raise TypeError(f"process_group must be a ProcessGroup or None, got {type(given).__name__}.")


def _hybrid_mesh(given: object, device: Device) -> DeviceMesh:
    if given is None:
        return _mesh_of_hosts(device)
    groups = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if len(groups) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        kinds = ", ".join(type(group).__name__ for group in groups)
        raise ValueError(
            f"HYBRID_SHARD got process_group=({kinds}): {_HYBRID}, or "
            "neither, and each host holds a copy."
        )
    shard, replicate = groups
    return mesh_of_groups([("replicate", replicate), ("shard", shard)], device.kind)


_hosts: tuple[weakref.ref[dist.ProcessGroup], DeviceMesh] | None = None


def _mesh_of_hosts(device: Device) -> DeviceMesh:
    """One copy on each host; asked for by every rank together. Made once for a world."""
    global _hosts
    world = dist.group.WORLD
    assert world is not None
    if _hosts is not None and _hosts[0]() is world and _hosts[1].device_type == device.kind:
        return _hosts[1]
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    hosts = list(dict.fromkeys(names))
    on_each = {names.count(host) for host in hosts}
    size = len(names) // len(hosts)
    if on_each != {size} or names != [host for host in hosts for _ in range(size)]:
        counts = ", ".join(f"{host}: {names.count(host)}" for host in hosts)
        raise ValueError(
            f"HYBRID_SHARD cannot make one copy on each host: the ranks are not spread evenly, or "
            f"not in order ({counts}). Say which ranks: {_HYBRID}."
        )
    mesh = init_mesh({"replicate": len(hosts), "shard": size}, device=device.torch_device)
    _hosts = weakref.ref(world), mesh
    return mesh
