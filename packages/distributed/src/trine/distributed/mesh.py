"""Meshes: the axes along which the ranks of the world are laid out, and what each is for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from trine.core import Device, get_device
from trine.distributed.process_groups import (
    CPU_BACKENDS,
    BorrowedGroup,
    init_process_group,
    timeout_of_groups,
)

__all__ = ["DataParallelMeshDims", "MeshAxes", "init_mesh", "mesh_of_groups"]


def init_mesh(
    axes: Mapping[str, int] | None = None,
    *,
    device: str | torch.device | Device | None = None,
) -> DeviceMesh:
    """Lay the ranks of the world out along named axes, ready for `fully_shard`.

    Starts the process group if none is running.

    Args:
        axes: the size of each axis by its name, outermost first, such as
            `{"replicate": 2, "shard": 4}`. None puts every rank on one axis, `shard`.
        device: the kind of device that the ranks compute on; None takes the one that
            the backend of the running process group moves.

    Raises:
        ValueError: if the axes do not hold exactly the ranks of the world.
    """
    if not dist.is_initialized():
        found = init_process_group(device="auto" if device is None else device)
    elif device is None:
        found = get_device("cpu" if dist.get_backend() in CPU_BACKENDS else "auto")
    else:
        found = get_device(device)
    world_size = dist.get_world_size()
    if axes is None:
        axes = {"shard": world_size}
    _check(axes, world_size)
    mesh = init_device_mesh(found.kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    timeout = timeout_of_groups()
    if timeout is not None:
        for axis in range(mesh.ndim):
            mesh.get_group(axis).set_timeout(timeout)
    return mesh


def _check(axes: Mapping[str, int], world_size: int) -> None:
    shape = " x ".join(f"{name}={size}" for name, size in axes.items())
    if not axes or any(size < 1 for size in axes.values()):
        raise ValueError(
            f"The mesh ({shape}) is empty: it needs at least one axis, each of at least one rank."
        )
    needed = prod(axes.values())
    if needed != world_size:
        raise ValueError(
            f"The mesh ({shape}) holds {needed} rank{'s' * (needed != 1)}, but the world has "
            f"{world_size}. Start {needed} (torchrun --nproc-per-node {needed}), or choose axes "
            f"whose sizes multiply to {world_size}."
        )


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a mesh are for data parallelism, by name.

    Attributes:
        shard: axis, or axes taken as one, over which parameters are sharded.
        replicate: axis, or axes taken as one, over which they are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field, given in (("shard", self.shard), ("replicate", self.replicate)):
            names = given if isinstance(given, tuple) else (given,)
            if given is not None and not all(isinstance(name, str) for name in names):
                raise TypeError(
                    f"DataParallelMeshDims.{field} must be the name of an axis or a tuple of "
                    f"names, got {given!r}. Name the axes when the mesh is made: "
                    "init_mesh({'replicate': 2, 'shard': 4})."
                )
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "DataParallelMeshDims names no axis. Give shard, replicate, or both: "
                "DataParallelMeshDims(shard='fsdp', replicate='ddp')."
            )
        both = set(self.shard_names) & set(self.replicate_names)
        if both:
            raise ValueError(
                f"DataParallelMeshDims names {sorted(both)} for sharding and for replicating. "
                "An axis can do one of the two."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes to shard over, none, one or more."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes to replicate over, none, one or more."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


class MeshAxes:
    """A mesh resolved into what sharding needs: a group to shard over, one to replicate over.

    Args:
        mesh: 1-D: sharded over; 2-D: replicated over the first axis and sharded over the
            second, unless `dims` says otherwise.
        dims: names the axes. Parameters are replicated over axes that it does not name.

    Attributes:
        shard_size: how many.
        shard_rank: which of them this rank is.
        replicate_size: how many.
        peers: all ranks that hold a part of the same parameters or of a copy, sorted.
    """

    def __init__(self, mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> None:
        if dims is None:
            if mesh.ndim > 2:
                raise ValueError(
                    f"The mesh has {mesh.ndim} axes {mesh.mesh_dim_names}: say which of them are "
                    "for data parallelism with dp_mesh_dims=DataParallelMeshDims(shard=..., "
                    "replicate=...), or pass a 1-D or 2-D part of it such as mesh['fsdp']."
                )
            shard_axes, replicate_axes = [mesh.ndim - 1], list(range(mesh.ndim - 1))
        else:
            shard_axes = [_axis(mesh, name) for name in dims.shard_names]
            replicate_axes = [_axis(mesh, name) for name in dims.replicate_names]
        shard_group, self.shard_size, self.shard_rank = _group(mesh, shard_axes)
        replicate_group, self.replicate_size, _ = _group(mesh, replicate_axes)
        self._shard_group = None if shard_group is None else BorrowedGroup(shard_group)
        self._replicate_group = None if replicate_group is None else BorrowedGroup(replicate_group)
        self.mesh = mesh
        self._given = mesh
        self._data_axes = sorted(shard_axes + replicate_axes)
        self._joined: dict[tuple[DeviceMesh, tuple[int, ...]], DeviceMesh] = {}
        self._shard_axes = shard_axes
        others = [axis for axis in range(mesh.ndim) if axis not in self._data_axes]
        planes = mesh.mesh.permute(*others, *self._data_axes).reshape(
            -1, self.replicate_size * self.shard_size
        )
        here = next(ranks for ranks in planes.tolist() if dist.get_rank() in ranks)
        self.peers: tuple[int, ...] = tuple(sorted(here))
        if len(shard_axes) > 1 or len(replicate_axes) > 1:
            # Cut over two axes, rows are dealt twice; taken as one axis, once. DTensor must
            # see the axis that the rows were cut over.
            self._take_axes_as_one(mesh, replicate_axes, shard_axes)

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> MeshAxes:
        """The axes of `mesh`, made once: axes taken as one need process groups of their own."""
        # By identity, since meshes that are equal may belong to different worlds; what is
        # kept holds its mesh, so the identity is not given to another.
        kept = _axes_with_groups.get((id(mesh), dims))
        if kept is not None:
            return kept
        axes = cls(mesh, dims)
        if axes.mesh is not mesh:
            _axes_with_groups[id(mesh), dims] = axes
            _meshes_kept.append(mesh)
        return axes

    def _take_axes_as_one(
        self, mesh: DeviceMesh, replicate_axes: list[int], shard_axes: list[int]
    ) -> None:
        groups = [
            (name, group)
            for name, group, axes in (
                ("replicate", self.replicate_group, replicate_axes),
                ("shard", self.shard_group, shard_axes),
            )
            if axes and group is not None
        ]
        self.mesh = mesh_of_groups(groups, mesh.device_type)
        self._shard_axes = [len(groups) - 1] if shard_axes else []

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of one copy; None if each holds it whole."""
        return None if self._shard_group is None else self._shard_group()

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part; None if there is no other."""
        return None if self._replicate_group is None else self._replicate_group()

    def shard_subgroup(self, size: int) -> dist.ProcessGroup:
        """The `size` neighbours among the ranks of one copy to which this rank belongs.

        Made once for each group of ranks, and kept as long as the world. All ranks of the
        copy must call it, in one order.

        Args:
            size: a divisor of `shard_size`, neither 1 nor all.
        """
        group = self.shard_group
        assert group is not None
        made = _subgroups.setdefault(group, {})
        if size not in made:
            ranks = dist.get_process_group_ranks(group)
            first = group.rank() // size * size
            # Among the members only: other ranks of the world may be busy with other models.
            subgroup = dist.new_group(
                ranks[first : first + size],
                use_local_synchronization=True,
                timeout=timeout_of_groups(),
            )
            assert isinstance(subgroup, dist.ProcessGroup)
            made[size] = BorrowedGroup(subgroup)
        return made[size]()

    @property
    def ranks(self) -> set[int]:
        """The ranks that share one copy with this one, and those that hold the same part."""
        groups = (self.shard_group, self.replicate_group)
        return {rank for group in groups for rank in _ranks_of(group)}

    def data_axes_of(self, mesh: DeviceMesh) -> list[int]:
        """Which axes of `mesh` are for data parallelism: those of the mesh given, else none."""
        return self._data_axes if mesh == self._given else []

    def joined(self, mesh: DeviceMesh, axes: Sequence[int]) -> DeviceMesh:
        """A mesh of the replicate axis, `axes` of another mesh, and the shard axis, in this order.

        Args:
            mesh: whose ranks form a grid with those of this one, as parts of one mesh do.
            axes: which of its axes.
        """
        key = (mesh, tuple(axes))
        if key not in self._joined:
            names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
            parts = [("replicate", self.replicate_group)]
            parts += [(names[axis], mesh.get_group(axis)) for axis in axes]
            parts += [("shard", self.shard_group)]
            self._joined[key] = mesh_of_groups(
                [(name, group) for name, group in parts if group is not None], self.device_type
            )
        return self._joined[key]

    @property
    def device_type(self) -> str:
        """The kind of device that the ranks compute on."""
        return self.mesh.device_type

    @cached_property
    def device(self) -> Device:
        """The one that this rank computes on."""
        return get_device(self.device_type)

    def placements(self, dim: int | None) -> list[Placement]:
        """How DTensor calls a parameter whose `dim` is sharded over these axes; None: no dim."""
        return [
            Shard(dim) if dim is not None and axis in self._shard_axes else Replicate()
            for axis in range(self.mesh.ndim)
        ]


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def mesh_of_groups(axes: Sequence[tuple[str, dist.ProcessGroup]], device_type: str) -> DeviceMesh:
    """A mesh with these groups as its axes, of all ranks that they reach from this one.

    In a grid a step along one axis changes the rank by as much wherever it starts.
    """
    if len(axes) == 1:
        return DeviceMesh.from_group(axes[0][1], device_type, mesh_dim_names=(axes[0][0],))
    here = dist.get_rank()
    steps = [[rank - here for rank in _ranks_of(group)] for _, group in axes]
    ranks = [here + sum(step) for step in product(*steps)]
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(dist.get_world_size())):
        raise ValueError(
            f"The axes {[name for name, _ in axes]} with the ranks "
            f"{[_ranks_of(group) for _, group in axes]} form no grid around rank {here}. Take both "
            "meshes from one: mesh = init_mesh({'dp': 2, 'tp': 4}), then mesh['dp'], mesh['tp']."
        )
    return DeviceMesh.from_group(
        [group for _, group in axes],
        device_type,
        mesh=torch.tensor(ranks).view([len(step) for step in steps]),
        mesh_dim_names=tuple(name for name, _ in axes),
    )


def _axis(mesh: DeviceMesh, name: str) -> int:
    names = mesh.mesh_dim_names or ()
    if name not in names:
        raise ValueError(
            f"The mesh has no axis {name!r}; its axes are {list(names) or 'not named'}. Name "
            "them when the mesh is made: init_mesh({'replicate': 2, 'shard': 4})."
        )
    return names.index(name)


def _group(mesh: DeviceMesh, axes: list[int]) -> tuple[dist.ProcessGroup | None, int, int]:
    """The group of the ranks that differ from this one in `axes` only; its size; our place."""
    if not axes:
        return None, 1, 0
    if len(axes) == 1:
        return mesh.get_group(axes[0]), mesh.size(axes[0]), mesh.get_local_rank(axes[0])
    if axes != sorted(axes):
        raise ValueError(
            f"The axes {[(mesh.mesh_dim_names or ())[a] for a in axes]} are taken as one, so they "
            f"must be named in the order of the mesh, {list(mesh.mesh_dim_names or ())}."
        )
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    size = prod(mesh.size(axis) for axis in axes)
    ours: dist.ProcessGroup | None = None
    # Every rank takes part in making every group: that is the rule of new_group.
    for ranks in mesh.mesh.permute(*others, *axes).reshape(-1, size).tolist():
        group = dist.new_group(ranks, timeout=timeout_of_groups())
        if dist.get_rank() in ranks:
            ours = group
    assert isinstance(ours, dist.ProcessGroup)
    return ours, size, ours.rank()


_axes_with_groups: dict[tuple[int, DataParallelMeshDims | None], MeshAxes] = {}
_meshes_kept: list[DeviceMesh] = []
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, BorrowedGroup]] = (
    weakref.WeakKeyDictionary()
)
