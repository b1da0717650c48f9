"""Meshes: the axes along which the ranks of the world are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trine.core import Device, get_device
from trine.distributed.process_groups import init_process_group

__all__ = ["init_mesh"]


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
        found = get_device("auto" if dist.get_backend() == dist.Backend.NCCL else "cpu")
    else:
        found = get_device(device)
    world_size = dist.get_world_size()
    if axes is None:
        axes = {"shard": world_size}
    _check(axes, world_size)
    return init_device_mesh(found.kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


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
