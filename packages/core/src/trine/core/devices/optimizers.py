"""Move an optimizer's state, and nothing that the optimizer wants left where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trine.core.batches import map_tensors, tensors_of

__all__ = ["move_optimizer_state"]

# Counters that torch's optimizers keep beside the moments and read on the host.
_HOST_SCALARS = frozenset({"step", "mu_product"})
# What they and torch's schedulers read there from a group, of whatever shape one number has.
_HOST_RATES = frozenset({"lr", "betas", "initial_lr", "max_lr", "min_lr"})


def move_optimizer_state(optimizer: Optimizer, move: Callable[[Tensor], Tensor]) -> None:
    """Apply `move` to the tensors of an optimizer's state and of its groups, in place.

    Looks into what is nested (LBFGS keeps lists). Parameters, state that is still empty
    and scalars read on the host are left alone; see `Device.optimizer_to_device`.
    """
    groups = optimizer.param_groups
    group_of = {param: group for group in groups for param in group["params"]}
    places: list[tuple[Any, Any]] = []
    for owner, state in optimizer.state.items():
        if isinstance(state, dict):
            # State that belongs to no parameter goes by the first group.
            on_host = _reads_scalars_on_host(group_of.get(owner, groups[0]))
            places += [
                (state, key)
                for key, value in state.items()
                if not (on_host and key in _HOST_SCALARS and _is_scalar(value))
            ]
        else:
            places.append((optimizer.state, owner))
    # The defaults too: a group added later takes its learning rate from there.
    for group in (*groups, optimizer.defaults):
        on_host = _reads_scalars_on_host(group)
        places += [
            (group, key)
            for key, value in group.items()
            if key != "params" and not (on_host and _is_for_the_host(key, value))
        ]
    # One walk for all, so that a tensor shared between places stays shared.
    moved = map_tensors([owner[key] for owner, key in places], move)
    for (owner, key), value in zip(places, moved, strict=True):
        owner[key] = value


def _reads_scalars_on_host(group: dict[str, Any]) -> bool:
    return not (group.get("capturable") or group.get("fused"))


def _is_for_the_host(key: str, value: Any) -> bool:
    # A tensor without dimensions does where it is: work on a device takes it from the host.
    return all(
        tensor.dim() == 0 or (key in _HOST_RATES and tensor.numel() == 1)
        for tensor in tensors_of(value)
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
