"""A wrapped model's state dict: plain names, and values of the type that the user has set.

Each wrapper changes what comes from the module it wraps, except for what a wrapper below it has
changed already. Values are collected one parameter at a time, so that a rank which needs none of
them holds one at most.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trine.distributed._fsdp.errors import CommError
from trine.distributed._fsdp.param import ShardedParam
from trine.distributed._fsdp.state import WRAPPED, FSDPState, saved_name
from trine.distributed._wrapper.state_dict_types import (
    FullStateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = ["collected", "given_back", "own_names", "whole_value", "without_infix"]

_INFIX = f"{WRAPPED}."


@torch.no_grad()
def collected(
    state: FSDPState, values: dict[str, Any], prefix: str, settings: StateDictSettings
) -> None:
    """Rename and convert what the wrapped module has put into a state dict.

    Args:
        state: of the wrapper.
        values: its state dict, and nothing else; changed in place, in order.
        prefix: of the wrapper's own names.
        settings: what to convert to.

    Every rank must call it together if the values are to be whole.

    Raises:
        RuntimeError: inside `summon_full_params`, on a rank that does not show whole values.
    """
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        _refuse_alone(state)
    found = list(values.items())
    values.clear()
    config = settings.state_dict_config
    everywhere = not (isinstance(config, FullStateDictConfig) and config.rank0_only)
    wanted = everywhere or dist.get_rank() == 0
    params = _params_below(state)
    done: dict[int, Any] = {}  # a shared parameter is one value under several names
    for key, value in found:
        name = key.replace(prefix + _INFIX, prefix, 1) if key.startswith(prefix + _INFIX) else key
        # By parameter, not by memory: a rank that holds no rows could not tell.
        which = id(params.get(name[len(prefix) :], value))
        if which not in done:
            done[which] = _converted(value, settings, wanted, name)
        if wanted:
            values[name] = done[which]


def _refuse_alone(state: FSDPState) -> None:
    for group in state.groups:
        for param in group.params if group.is_lent else ():
            if param.slots[0].get() is param.sharded:
                raise RuntimeError(
                    f"Rank {dist.get_rank()} was asked for a FULL_STATE_DICT inside "
                    f"summon_full_params(rank0_only=True), where it shows {param.fqn} sharded and "
                    "the first rank does not help it. Ask on the first rank alone, or outside."
                )


def _converted(value: Any, settings: StateDictSettings, wanted: bool, name: str) -> Any:
    if isinstance(value, DTensor):
        if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            value = whole_value(value, name)
        elif settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            value = value.to_local()
    if wanted and settings.state_dict_config.offload_to_cpu and isinstance(value, Tensor):
        value = value.cpu()
    return value


def whole_value(value: DTensor, name: str) -> Tensor:
    """The whole tensor, with memory of its own; a collective among the ranks that hold it.

    Args:
        value: sharded.
        name: whose value it is.

    Raises:
        CommError: if another rank has gone, or does not ask for it.
    """
    try:
        whole: Tensor = value.full_tensor()
    except RuntimeError as error:
        raise CommError(
            f"{name} could not be collected on rank {dist.get_rank()}: another rank has gone, or "
            "does not ask for it. Every rank must ask for whole state dicts together, those too "
            f"that get none because of rank0_only. torch said: {error}"
        ) from error
    # Where a rank holds all of it, torch gives its very memory.
    local = value.to_local()
    return whole.clone() if whole.data_ptr() == local.data_ptr() else whole


def given_back(
    state: FSDPState, values: dict[str, Any], prefix: str, own: Collection[str], local: bool
) -> None:
    """Rename what is to be loaded so that it reaches the wrapped module.

    Args:
        state: of the wrapper.
        values: torch's copy of a state dict; changed in place.
        prefix: of the wrapper's own names.
        own: what the wrapper itself holds, whose names stay.
        local: whether plain tensors may be this rank's rows, of `LOCAL_STATE_DICT`.
    """
    for key in [key for key in values if key.startswith(prefix)]:
        rest = key[len(prefix) :]
        if rest.split(".", 1)[0] in own:
            continue
        values[prefix + _INFIX + rest] = values.pop(key)
    if local:
        for name, param in _params_below(state).items():
            key = prefix + _INFIX + name
            value = values.get(key)
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                values[key] = _from_rows(value, param, key)


def _params_below(state: FSDPState) -> dict[str, ShardedParam]:
    """The parameters of a wrapper's unit by their plain names below it, by all of them."""
    wrapper = state.modules[0]
    wrapped = wrapper.get_submodule(WRAPPED)
    names = {id(module): name for name, module in wrapped.named_modules()}
    found = {}
    for group in state.groups:
        for param in group.params:
            for slot in param.slots:
                name = names[id(slot.module)]
                found[saved_name(f"{name}.{slot.name}" if name else slot.name)] = param
    return found


def _from_rows(value: Tensor, param: ShardedParam, key: str) -> Tensor:
    if value.shape != param.local.shape:
        raise ValueError(
            f"{without_infix(key)} in a LOCAL_STATE_DICT has the shape {tuple(value.shape)}, but "
            f"rank {dist.get_rank()} holds rows of shape {tuple(param.local.shape)}. Load it on "
            "the ranks that saved it, or load a FULL_STATE_DICT or SHARDED_STATE_DICT."
        )
    mesh, placements = param.mesh, param.axes.placements(param.dim)
    return DTensor.from_local(
        value,
        mesh,
        placements,
        run_check=False,
        shape=param.sharded.shape,
        stride=param.sharded.stride(),
    )


def without_infix(text: str) -> str:
    """Words or names without those of wrappers."""
    return text.replace(_INFIX, "")


def own_names(wrapper: nn.Module) -> set[str]:
    """What a wrapper itself holds beside the wrapped module."""
    names = {*wrapper._parameters, *wrapper._buffers, *wrapper._modules}
    if type(wrapper).get_extra_state is not nn.Module.get_extra_state:  # of a class made from it
        names.add("_extra_state")
    return names - {WRAPPED}
