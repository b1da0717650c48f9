"""What `load_state_dict` is given, as values that a sharded parameter can take.

A state dict of the model sharded alike needs nothing. A whole tensor is cut: each rank takes
its own part, and nothing is communicated. A DTensor that lies on other ranks or is cut
otherwise is made whole first, by a collective among the ranks that hold it.

This module changes the copy of the dictionary that torch passes down, never the user's, and
leaves every refusal that torch has words for (missing, unexpected, of another shape) to torch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trine.distributed._fsdp.torch_internals import module_parameters

__all__ = ["cut", "localize", "why_not_whole"]


@torch.no_grad()
def localize(
    module: nn.Module, values: dict[str, Any], prefix: str, *, assign: bool, errors: list[str]
) -> None:
    """Put this rank's part in the place of each value for a sharded parameter of `module`.

    Args:
        module: whose own parameters, not those of its sub-modules, are looked after.
        values: a state dict; changed.
        prefix: of the module's keys in it.
        assign: whether the values will become the parameters, rather than be copied.
        errors: gets a sentence for each value that cannot be used.
    """
    for name, held in module_parameters(module).items():
        key = prefix + name
        value = values.get(key)
        param = cast(object, held)  # a Parameter and a DTensor; no type says both
        if not isinstance(param, DTensor) or not isinstance(value, Tensor):
            continue
        if not param.shape and value.shape == (1,):
            value = value[0]  # as torch does for files of its early days
        if value.shape != param.shape:
            continue
        if isinstance(value, DTensor):
            if value.device_mesh == param.device_mesh and value.placements == param.placements:
                continue
            reason = why_not_whole(value, param)
            if reason is not None:
                errors.append(f'While loading "{key}": {reason}')
                # The parameter as it is, so that torch has nothing to say about it.
                values[key] = param.detach()
                continue
            value = value.full_tensor()
        values[key] = cut(value, param, copy=assign)


def cut(whole: Tensor, param: DTensor, *, copy: bool) -> Tensor:
    """This rank's part of a tensor that every rank has, as a DTensor like `param`.

    Args:
        whole: of the same shape; equal on every rank.
        param: whose ranks and cut it gets.
        copy: never share memory with `whole`.
    """
    part: Tensor = distribute_tensor(
        whole.detach(), param.device_mesh, param.placements, src_data_rank=None
    )
    # A part that stays in the model must not keep the memory of the whole.
    return part.clone() if copy else part


def why_not_whole(value: DTensor, param: DTensor) -> str | None:
    """Why the ranks of `param` cannot make `value` whole, if they cannot.

    The answer is the same on every rank, so that none waits for another.
    """
    world = dist.get_world_size()
    holders = set(value.device_mesh.mesh.flatten().tolist())
    takers = set(param.device_mesh.mesh.flatten().tolist())
    if takers <= holders and max(holders) < world and _has_groups(value):
        return None
    return (
        f"the value is a DTensor over the ranks {_listed(holders)} ({value.device_mesh}), which "
        f"rank {dist.get_rank()} cannot make whole: the parameter lies on the ranks "
        f"{_listed(takers)} of a world of {world}. Load the parts of another number of ranks "
        "with trine.distributed.checkpoint or torch.distributed.checkpoint, which write them to "
        "files and read what each rank needs; or pass whole tensors (value.full_tensor(), on the "
        "ranks that hold it)."
    )


def _has_groups(value: DTensor) -> bool:
    # A mesh that came out of a file has none.
    try:
        for axis in range(value.device_mesh.ndim):
            value.device_mesh.get_group(axis)
    except (RuntimeError, KeyError, ValueError, IndexError, AttributeError):
        return False
    return True


def _listed(ranks: set[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
