"""Adam and AdamW over the plain tensors inside of sharded parameters: the same values, sooner.

An optimizer that loops over parameters, as torch's do on a CPU, calls a dozen operations for each,
and a DTensor looks up for each of them how its result is distributed. All that Adam does is done
element by element, so this rank's rows can be computed alone. State, parameters and gradients
stay the DTensors that they are; only what one step computes with is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trine.distributed._fsdp.successors import owner_of
from trine.distributed._fsdp.torch_internals import exchange_collected, local_tensor

__all__ = ["step_on_plain_tensors"]

_registered = False


def step_on_plain_tensors() -> None:
    """Let torch's Adam and AdamW, and no other optimizer, step on plain tensors from now on."""
    global _registered
    if not _registered:
        _registered = True
        register_optimizer_step_pre_hook(_exchange_if_known)


def _exchange_if_known(optimizer: Optimizer, *_: Any) -> None:
    # A subclass may do more than element by element.
    if type(optimizer) is Adam or type(optimizer) is AdamW:
        exchange_collected(optimizer, _exchange)


def _exchange(group: dict[str, Any], collected: Sequence[list[Tensor]]) -> None:
    """Exchange what one step computes with, where all of it is the engine's and laid alike.

    Args:
        group: of the optimizer's parameters.
        collected: parameters, gradients and state; changed.
    """
    params, *others = collected
    if group.get("differentiable") or torch.compiler.is_compiling():
        return
    # All or none: torch's operations on lists do not take both kinds.
    if not all(owner_of(param) is not None for param in params):
        return
    beside = [each for each in others if each and isinstance(each[0], DTensor)]
    for tensors in beside:
        if len(tensors) != len(params) or not all(map(_alike, params, tensors)):
            return
    increment_version(params)
    for tensors in (params, *beside):
        tensors[:] = map(local_tensor, tensors)


def _alike(param: Tensor, other: Tensor) -> bool:
    return (
        isinstance(param, DTensor)
        and isinstance(other, DTensor)
        and other.placements == param.placements
        and other.device_mesh == param.device_mesh
        and local_tensor(other).shape == local_tensor(param).shape
    )
