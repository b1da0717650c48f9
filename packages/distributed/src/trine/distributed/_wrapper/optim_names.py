"""Under what an optimizer's state is filed: full names of parameters, or their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trine.distributed._fsdp.state import saved_name, state_of
from trine.distributed._fsdp.successors import rebind, successor_of
from trine.distributed._wrapper.options import same_member
from trine.distributed._wrapper.state_dict_types import OptimStateKeyType

__all__ = [
    "Filed",
    "OptimInput",
    "StateDict",
    "by_name",
    "by_number",
    "filed_by",
    "rekeyed",
    "require_form",
]

StateDict = dict[str, Any]
OptimInput = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None


@dataclass(frozen=True)
class Filed:
    """The parameters of an optimizer by name.

    Attributes:
        groups: its groups; each parameter goes by the first of its names.
        first: for every name of every parameter of the model, also tied ones, the first.
    """

    groups: list[dict[str, Tensor]]
    first: dict[str, str]

    def numbers(self) -> dict[str, int]:
        """What `Optimizer.state_dict` calls each."""
        names = dict.fromkeys(name for group in self.groups for name in group)
        return {name: number for number, name in enumerate(names)}


def rekeyed(
    model: nn.Module,
    given: Mapping[str, Any],
    key_type: object,
    optim: Optimizer | None,
    optim_input: OptimInput = None,
) -> StateDict:
    """A state dict under names instead of numbers, or the other way round; values are shared.

    Args:
        model: wrapped or not.
        given: under either.
        key_type: an `OptimStateKeyType`: what it is to be under.
        optim: of parameters of `model`, in the groups of `given`.
        optim_input: its parameters or groups, where there is no `optim`; None for all.

    Raises:
        ValueError: if names are not those of the optimizer, naming them.
    """
    kind = same_member(OptimStateKeyType, key_type, "optim_state_key_type")
    filed = filed_by(model, optim, optim_input)
    form = by_name(given, filed)
    return form if kind is OptimStateKeyType.PARAM_NAME else by_number(form, filed)


def filed_by(model: nn.Module, optim: Optimizer | None, optim_input: OptimInput) -> Filed:
    """The parameters of an optimizer by name.

    Raises:
        ValueError: if one of them is not a parameter of the model.
    """
    names: dict[int, str] = {}
    first: dict[str, str] = {}
    params: list[Tensor] = []
    for name, param in _named_parameters(model):
        if id(param) not in names:
            params.append(param)
        first[name] = names.setdefault(id(param), name)
    if optim is not None:
        rebind(optim)
        held = [list(group["params"]) for group in optim.param_groups]
    else:
        held = [[_current(param) for param in group] for group in _held(optim_input, params)]
    groups = []
    for number, group in enumerate(held):
        found = {}
        for position, param in enumerate(group):
            if id(param) not in names:
                raise ValueError(
                    f"Parameter {position} of group {number} of the optimizer, of shape "
                    f"{tuple(param.shape)}, is no parameter of this {type(model).__name__}. Make "
                    "the optimizer from model.parameters(), after the model is wrapped."
                )
            found[names[id(param)]] = param
        groups.append(found)
    return Filed(groups, first)


def _held(optim_input: OptimInput, params: list[Tensor]) -> list[list[Tensor]]:
    if optim_input is None:
        return [params]
    given = list(optim_input)
    if given and all(isinstance(each, dict) for each in given):
        return [list(cast(dict[str, Any], each)["params"]) for each in given]
    return [cast(list[Tensor], given)]


def _current(param: Tensor) -> Tensor:
    successor = successor_of(param)
    return param if successor is None else successor[0]


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters as optimizers have them, by every name; also while they are gathered."""
    sharded: dict[tuple[int, str], Tensor] = {}
    for module in model.modules():
        state = state_of(module)
        for group in () if state is None else state.groups:
            for param in group.params:
                sharded |= {(id(slot.module), slot.name): param.sharded for slot in param.slots}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, shown in module.named_parameters(recurse=False, remove_duplicate=False):
            full = saved_name(f"{prefix}.{name}" if prefix else name)
            yield full, sharded.get((id(module), name), shown)


def by_name(given: Mapping[str, Any], filed: Filed) -> StateDict:
    """A state dict under the first names of parameters, in the groups of the optimizer.

    Raises:
        ValueError: if names are missing, or unexpected, or grouped otherwise.
    """
    require_form(given)
    groups: Sequence[Mapping[str, Any]] = given["param_groups"]
    names: dict[Any, str] = {}
    if all(isinstance(key, int) for group in groups for key in group["params"]):
        sizes = [len(group["params"]) for group in groups], [len(own) for own in filed.groups]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"The optimizer state dict has groups of {sizes[0]} parameters by their numbers, "
                f"but the optimizer has groups of {sizes[1]}. Make it with the same groups."
            )
        for group, own in zip(groups, filed.groups, strict=True):
            names.update(zip(group["params"], own, strict=True))
    else:
        for group in groups:
            cleaned = {key: saved_name(str(key)) for key in group["params"]}
            names |= {key: filed.first.get(name, name) for key, name in cleaned.items()}
    _require_same(set(names.values()), {name for own in filed.groups for name in own})
    state = {names.get(key, key): values for key, values in given["state"].items()}
    # In one order on all ranks; what belongs to no parameter comes last.
    ordered = [name for own in filed.groups for name in own if name in state]
    ordered += [key for key in state if key not in set(ordered)]
    found = []
    for number, own in enumerate(filed.groups):
        at = [
            i for i, each in enumerate(groups) if {names[key] for key in each["params"]} == {*own}
        ]
        if not at:
            raise ValueError(
                f"No group of the optimizer state dict has exactly the parameters of group "
                f"{number} of the optimizer: {_listed(set(own))}. Make it with the same groups."
            )
        index = number if number in at else at[0]  # several may be empty
        found.append({**groups[index], "params": list(own)})
    return {"state": {name: state[name] for name in ordered}, "param_groups": found}


def require_form(given: object) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"An optimizer state dict is expected, got {type(given).__name__}. For one that only "
            "the first rank has, use scatter_full_optim_state_dict on every rank."
        )
    if not {"state", "param_groups"} <= given.keys():
        raise ValueError(
            "An optimizer state dict has the keys 'state' and 'param_groups'; this one, on rank "
            f"{dist.get_rank() if dist.is_initialized() else 0}, has {sorted(map(str, given))}. If "
            "only the first rank has it, use scatter_full_optim_state_dict, or set "
            "FullOptimStateDictConfig(rank0_only=True), on every rank."
        )


def _require_same(saved: set[str], own: set[str]) -> None:
    problems = []
    if own - saved:
        problems.append(f"missing: {_listed(own - saved)}")
    if saved - own:
        problems.append(f"unexpected, as the optimizer lacks them: {_listed(saved - own)}")
    if problems:
        raise ValueError(
            f"The optimizer state dict is of other parameters. {'; '.join(problems)}. Load it into "
            "an optimizer of the parameters that were saved."
        )


def by_number(form: StateDict, filed: Filed) -> StateDict:
    numbers = filed.numbers()
    return {
        "state": {numbers.get(name, name): values for name, values in form["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in form["param_groups"]
        ],
    }


def _listed(names: set[str], most: int = 5) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (
        f" and {len(ordered) - most} more" if len(ordered) > most else ""
    )
