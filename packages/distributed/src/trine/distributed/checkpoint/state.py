"""What a checkpoint holds, and which part of a model and an optimizer it is.

The layout is that of `torch.distributed.checkpoint.state_dict.get_state_dict`: under `model`
the state dict of the model, under `optimizer` the state and the groups of the optimizer with
the names of parameters in the place of numbers. Values are saved sharded as they lie.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trine.distributed.fsdp import FullyShardedDataParallel, StateDictType

__all__ = [
    "group_of",
    "listed",
    "load_model_values",
    "load_optimizer_values",
    "model_values",
    "optimizer_params",
    "optimizer_values",
    "require_loadable",
    "require_readable",
    "saved_bytes",
    "unpacked",
]

StateDict = dict[str, Any]


def model_values(model: nn.Module) -> StateDict:
    """The state dict of a model by its saved names; values that are no tensors are packed."""
    with _sharded_values(model):
        values = model.state_dict()
    # In a tuple, or an empty container would be lost, and others taken apart.
    return {
        _saved_name(key): value if isinstance(value, Tensor) else (value,)
        for key, value in values.items()
    }


def require_loadable(values: Mapping[str, Any]) -> None:
    """Refuse values of `model_values` that could not be loaded again.

    Raises:
        ValueError: naming the first.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            require_readable(name, value)


def load_model_values(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Load what `model_values` gave; names and shapes must have been compared before."""
    with _sharded_values(model):
        keys = model.state_dict().keys()
        model.load_state_dict({key: unpacked(values[_saved_name(key)]) for key in keys})


def unpacked(value: object) -> object:
    """A value of the model's state dict as it was before it was packed."""
    return value[0] if isinstance(value, tuple) else value


def optimizer_params(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """The parameters of each group of an optimizer, by their saved names.

    Raises:
        ValueError: if one of them is not a parameter of the model.
    """
    names: dict[int, str] = {}
    with _sharded_values(model):
        kept = model.state_dict(keep_vars=True)
    for key, param in kept.items():
        names.setdefault(id(param), _saved_name(key))  # a tied one goes by its first name
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        found = {}
        for position, param in enumerate(group["params"]):
            name = names.get(id(param))
            if name is None:
                raise ValueError(
                    f"optimizer: parameter {position} of its group {number}, of shape "
                    f"{tuple(param.shape)}, is no parameter of the model. Make the optimizer from "
                    "model.parameters(), after fully_shard, and while they are not gathered."
                )
            found[name] = param
        groups.append(found)
    return groups


def optimizer_values(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """The state dict of an optimizer with names in the place of numbers.

    Raises:
        ValueError: if it holds a parameter that the model lacks, or a value that could not be
            loaded again.
    """
    params = optimizer_params(model, optimizer)
    packed = optimizer.state_dict()
    names: dict[Any, str] = {}
    groups = []
    for own, group in zip(params, packed["param_groups"], strict=True):
        names.update(zip(group["params"], own, strict=True))
        groups.append({**group, "params": list(own)})
    state = {names.get(key, key): dict(values) for key, values in packed["state"].items()}
    require_readable("optimizer param_groups", groups)
    for name, values in state.items():
        for key, value in values.items():
            if not isinstance(value, Tensor):
                require_readable(f"optimizer state {key} of {name}", value)
    return {"state": state, "param_groups": groups}


def load_optimizer_values(
    params: Sequence[Mapping[str, Tensor]], optimizer: Optimizer, values: Mapping[str, Any]
) -> None:
    """Load what `optimizer_values` gave.

    Args:
        params: what `optimizer_params` says of the optimizer.
        optimizer: gets the state; need not have any yet.
        values: its groups must have the parameters of the optimizer's, in any order.
    """
    own = optimizer.state_dict()["param_groups"]
    numbers: dict[str, Any] = {}
    groups = []
    for named, group in zip(params, own, strict=True):
        numbers.update(zip(named, group["params"], strict=True))
        groups.append({**group_of(named, values["param_groups"]), "params": group["params"]})
    state = {numbers.get(name, name): each for name, each in values.get("state", {}).items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def group_of(names: Mapping[str, object], groups: Sequence[StateDict]) -> StateDict:
    """The saved group that has these parameters.

    Raises:
        ValueError: if none has exactly these.
    """
    wanted = set(names)
    for group in groups:
        if set(group["params"]) == wanted:
            return group
    nearest = max(groups, key=lambda group: len(wanted & set(group["params"])), default=None)
    saved = set(nearest["params"]) if nearest is not None else set()
    raise ValueError(
        "The groups of the optimizer are not those that were saved: no group has exactly the "
        f"parameters {listed(wanted)}. The most alike lacks {listed(wanted - saved)} and has "
        f"{listed(saved - wanted)} beside them. Make the optimizer with the same groups."
    )


def listed(names: set[str], most: int = 5) -> str:
    """A few names of many, for a message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return (", ".join(ordered[:most]) or "none") + more


def saved_bytes(value: object) -> bytes:
    """A value as a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def require_readable(name: str, value: object) -> None:
    """Refuse, before it is too late, what a checkpoint would not load again.

    Raises:
        ValueError: naming it.
    """
    try:
        torch.load(io.BytesIO(saved_bytes(value)), weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be saved: a checkpoint holds tensors, numbers, strings, and lists, "
            f"tuples and dicts of them, or objects with a state_dict. torch said: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _sharded_values(model: nn.Module) -> AbstractContextManager[None]:
    """A block in which no rank makes whole what wrappers hold, whatever the user has set."""
    if not FullyShardedDataParallel.fsdp_modules(model):
        return nullcontext()
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


def _saved_name(key: str) -> str:
    # torch.compile(module) puts this into names; a checkpoint loads with and without it.
    return key.replace("_orig_mod.", "")
