"""A wrapped model's optimizer state, as the user wants it saved, and back into an optimizer.

The state of a sharded parameter is sharded like it: mostly DTensors, beside step counts and
other plain values. Saving makes of them what the user has set; loading takes whole tensors,
DTensors, or this rank's rows, and files them under the numbers that `Optimizer.load_state_dict`
wants. Tensors are made whole one at a time, so that a rank which needs none holds one at most.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from trine.core import Device, get_device
from trine.distributed._fsdp.state import state_of
from trine.distributed._fsdp.state_dict import cut, why_not_whole
from trine.distributed._wrapper.optim_names import (
    OptimInput,
    StateDict,
    by_name,
    by_number,
    filed_by,
    require_form,
)
from trine.distributed._wrapper.state_dict_types import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from trine.distributed._wrapper.state_dicts import whole_value

__all__ = ["collected", "scattered", "to_load"]

# --- saving -------------------------------------------------------------------------------


@torch.no_grad()
def collected(
    model: nn.Module,
    optim: Optimizer,
    packed: Mapping[str, Any] | None,
    settings: StateDictSettings,
    group: dist.ProcessGroup | None,
) -> StateDict:
    """The state of an optimizer under the names of parameters, of the type that is set.

    Args:
        model: the top of a tree with wrappers in it.
        optim: of parameters of `model`.
        packed: its state dict, by numbers or by names; None to ask it.
        settings: what to convert to.
        group: of which the first rank is meant by `rank0_only`; None for all ranks.

    Returns:
        A new dictionary; empty where `rank0_only` wants none. Whole tensors have memory of
        their own, each.

    Every rank must call it together if the values are to be whole.
    """
    filed = filed_by(model, optim, None)
    form = by_name(optim.state_dict() if packed is None else packed, filed)
    config = settings.optim_state_dict_config
    first_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
    wanted = not first_only or dist.get_rank(group) == 0
    kind = settings.state_dict_type

    def converted(name: object, value: Tensor) -> Tensor | None:
        if not wanted:
            if isinstance(value, DTensor):
                whole_value(value, str(name))  # the others need this rank's part
            return None
        return _saved(value, kind, config, str(name))

    state = {}
    for name, values in form["state"].items():
        made = _mapped(values, partial(converted, name))
        if wanted:
            state[name] = made
    return {"state": state, "param_groups": copy.deepcopy(form["param_groups"])} if wanted else {}


def _saved(value: Tensor, kind: StateDictType, config: OptimStateDictConfig, name: str) -> Tensor:
    if kind is StateDictType.FULL_STATE_DICT:
        value = whole_value(value, name) if isinstance(value, DTensor) else value.clone()
    elif kind is StateDictType.LOCAL_STATE_DICT and isinstance(value, DTensor):
        value = value.to_local()
    return value.cpu() if config.offload_to_cpu else value


# --- loading ------------------------------------------------------------------------------


@torch.no_grad()
def to_load(
    model: nn.Module,
    given: Mapping[str, Any],
    optim: Optimizer | None,
    optim_input: OptimInput = None,
    *,
    named: bool = False,
    rows: bool = False,
    fetch: Callable[[Any], Tensor] | None = None,
) -> StateDict:
    """What `optim.load_state_dict` takes, made of an optimizer's state dict.

    Args:
        model: the top of a tree with wrappers in it.
        given: by names or by numbers; values are whole tensors, DTensors, or rows. Not changed,
            and the result shares no memory with it.
        optim: of parameters of `model`.
        optim_input: its parameters or groups, where there is no `optim`; None for all.
        named: file it under names, for optimizers that load it so.
        rows: plain tensors may be this rank's rows, of `LOCAL_STATE_DICT`.
        fetch: gives the tensor for what stands in its place in `given`.

    Raises:
        ValueError: if names or shapes are not those of the optimizer, naming them.
    """
    filed = filed_by(model, optim, optim_input)
    form = by_name(given, filed)
    params = {name: param for group in filed.groups for name, param in group.items()}
    counts = _scalars(form["state"], params)
    state: StateDict = {}
    for name, values in form["state"].items():
        live = getattr(optim, "state", {}).get(params.get(name), {})
        placed = _Placing(name, params.get(name), counts, rows, fetch or _as_it_is)
        state[name] = placed.value(values, live, ())
    groups = [copy.deepcopy(group) for group in form["param_groups"]]
    made: StateDict = {"state": state, "param_groups": groups}
    return made if named else by_number(made, filed)


@torch.no_grad()
def scattered(
    model: nn.Module,
    given: Mapping[str, Any] | None,
    optim: Optimizer | None,
    optim_input: OptimInput = None,
    group: dist.ProcessGroup | None = None,
    *,
    named: bool = False,
) -> StateDict:
    """The same for a state dict of whole tensors that only the first rank of `group` has.

    It is sent to the others, one tensor at a time. Every rank of `group` must call it together.
    """
    device = _device(model)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    tensors: list[Tensor] = []
    sent: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            sent[0] = _announced(given, tensors)
        except (TypeError, ValueError) as error:  # on every rank, or the others would wait
            sent[0] = str(error)
    dist.broadcast_object_list(sent, source, group, device.torch_device)
    if isinstance(sent[0], str):
        raise ValueError(sent[0])

    def fetch(announced: _Announced) -> Tensor:
        if announced.value is not None:
            return announced.value
        if tensors:
            whole = device.tensor_to_device(tensors[announced.position].detach()).contiguous()
        else:
            whole = torch.empty(announced.shape, dtype=announced.dtype, device=device.torch_device)
        dist.broadcast(whole, source, group=group)
        return whole

    return to_load(model, sent[0], optim, optim_input, named=named, fetch=fetch)


@dataclass(frozen=True)
class _Announced:
    """Stands for a tensor that is sent later.

    Attributes:
        position: in the list of those to send.
        shape: of it.
        dtype: of it.
        value: itself, if it is so small that it comes along.
    """

    position: int
    shape: torch.Size
    dtype: torch.dtype
    value: Tensor | None = None


def _announced(given: Any, tensors: list[Tensor]) -> StateDict:
    """A state dict with stand-ins for its tensors, which are added to `tensors`."""
    require_form(given)

    def announce(value: Tensor) -> Any:
        if isinstance(value, DTensor):
            raise ValueError(
                "The optimizer state dict of the first rank holds DTensors, which it cannot make "
                "whole alone. Pass one of whole tensors, as full_optim_state_dict gives; sharded "
                "ones go through flatten_sharded_optim_state_dict on every rank."
            )
        tensors.append(value)
        small = value.detach().cpu().clone() if value.dim() == 0 else None
        return _Announced(len(tensors) - 1, value.shape, value.dtype, small)

    state = {name: _mapped(values, announce) for name, values in given["state"].items()}
    return {"state": state, "param_groups": given["param_groups"]}


@dataclass(frozen=True)
class _Placing:
    """Puts the state of one parameter where the parameter is.

    Attributes:
        name: of the parameter.
        param: the parameter; None for state that belongs to none.
        counts: names of values that have no dims, whatever the parameter has.
        rows: whether plain tensors are this rank's rows.
        fetch: gives the tensor for what stands in its place.
    """

    name: str
    param: Tensor | None
    counts: set[str]
    rows: bool
    fetch: Callable[[Any], Tensor]

    def value(self, value: Any, live: Any, path: tuple[Any, ...]) -> Any:
        """Any value of the state, as a copy.

        Args:
            value: to place.
            live: what the optimizer has there now, if anything.
            path: the keys that lead to it.
        """
        if isinstance(value, dict):
            return {
                key: self.value(
                    each, live.get(key) if isinstance(live, Mapping) else None, (*path, key)
                )
                for key, each in value.items()
            }
        if type(value) in (list, tuple):
            beside = live if isinstance(live, (list, tuple)) and len(live) == len(value) else ()
            lives = [*beside] or [None] * len(value)
            return type(value)(
                self.value(each, other, (*path, number))
                for number, (each, other) in enumerate(zip(value, lives, strict=True))
            )
        if not isinstance(value, Tensor | _Announced):
            return copy.deepcopy(value)
        like = self._like(value, live if isinstance(live, Tensor) else None, path)
        tensor = self.fetch(value)
        if hasattr(tensor, "local_shards"):
            return self._from_shards(tensor, like, path)
        if like is None:
            whole = self._whole(tensor, None) if isinstance(tensor, DTensor) else tensor
            return whole.detach().clone()
        if isinstance(tensor, DTensor):
            if tensor.device_mesh == like.device_mesh and tensor.placements == like.placements:
                return tensor.detach().clone()
            tensor = self._whole(tensor, like)
        elif self.rows and tensor.shape == like.to_local().shape:
            return _from_rows(tensor.detach().clone(), like)
        return cut(tensor, like, copy=True)

    def _from_shards(self, value: Any, like: DTensor | None, path: tuple[Any, ...]) -> DTensor:
        """What `load_sharded_optimizer_state_dict` of torch reads, which makes ShardedTensors."""
        if like is not None and tuple(like.placements) == (Shard(0),):
            rows = like.to_local()
            step = -(-like.shape[0] // like.device_mesh.size())
            first = step * like.device_mesh.get_local_rank()
            held = [(each.metadata.shard_offsets[0], each.tensor) for each in value.local_shards()]
            if not held and not rows.numel():
                held = [(first, rows)]
            if [(at, own.shape) for at, own in held] == [(first, rows.shape)]:
                return _from_rows(held[0][1].detach().clone(), like)
        raise ValueError(
            f"Optimizer state {'.'.join(map(str, path))} of {self.name} is a ShardedTensor that is "
            f"cut otherwise than the parameter on rank {dist.get_rank()}. Read the checkpoint with "
            "torch.distributed.checkpoint.load into what sharded_optim_state_dict gives, or with "
            "get_optimizer_state_dict and set_optimizer_state_dict of "
            "torch.distributed.checkpoint.state_dict."
        )

    def _like(
        self, value: Tensor | _Announced, live: Tensor | None, path: tuple[Any, ...]
    ) -> DTensor | None:
        """What a tensor of the state is to be sharded like; None if it stays plain.

        Raises:
            ValueError: if it cannot be the state of this parameter.
        """
        param = self.param
        if param is None:
            return None
        sharded = param if isinstance(param, DTensor) else None
        if live is not None:
            if self._shape(value, live) != live.shape:
                raise self._misfit(value, path, f"the optimizer has {tuple(live.shape)} there")
            return live if isinstance(live, DTensor) else None
        scalar = not value.shape and (bool(param.shape) or path[0] in self.counts)
        if scalar:
            return None
        if self._shape(value, param) == param.shape:
            return sharded
        if len(path) > 1 or (isinstance(value, DTensor) and sharded is None):
            return None
        shape = value.shape
        reduced = len(shape) == param.dim() and all(
            size in (1, full) for size, full in zip(shape, param.shape, strict=True)
        )
        if not reduced:  # not what is left of a dim over which an optimizer sums, either
            raise self._misfit(value, path, f"the parameter has {tuple(param.shape)}")
        return None if sharded is None else _replicated(value, sharded)

    def _shape(self, value: Tensor | _Announced, like: Tensor) -> torch.Size:
        """The shape of the whole tensor that `value` is, or is this rank's rows of."""
        rows = self.rows and isinstance(like, DTensor) and not isinstance(value, DTensor)
        if rows and value.shape == cast(DTensor, like).to_local().shape:
            return like.shape
        return value.shape

    def _whole(self, value: DTensor, like: DTensor | None) -> Tensor:
        reason = None if like is None else why_not_whole(value, like)
        if reason is not None:
            raise ValueError(f"Optimizer state of {self.name}: {reason}")
        return value.full_tensor()

    def _misfit(
        self, value: Tensor | _Announced, path: tuple[Any, ...], instead: str
    ) -> ValueError:
        what = "rows of a LOCAL_STATE_DICT" if self.rows else "a tensor"
        return ValueError(
            f"Optimizer state {'.'.join(map(str, path))} of {self.name} is {what} of shape "
            f"{tuple(value.shape)} on rank {dist.get_rank()}, but {instead}. Load the state of a "
            "model with the same shapes. If this optimizer keeps values of other shapes than its "
            "parameters', let it make one step before loading, so that it shows them."
        )


def _as_it_is(value: Any) -> Tensor:
    return cast(Tensor, value)


def _from_rows(rows: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _replicated(value: Tensor | _Announced, param: DTensor) -> DTensor:
    """A value of another shape than a sharded parameter's, as the whole of it on every rank."""
    mesh = param.device_mesh
    empty = torch.empty(value.shape, dtype=value.dtype, device=mesh.device_type)
    return DTensor.from_local(empty, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _scalars(state: StateDict, params: Mapping[str, Tensor]) -> set[str]:
    """Names of values that have no dims where their parameter has some, such as step counts.

    They tell what belongs to a parameter without dims from what counts its steps.
    """
    found = {"step"}
    for name, values in state.items():
        if name in params and params[name].shape and isinstance(values, dict):
            tensors = {k: v for k, v in values.items() if isinstance(v, Tensor | _Announced)}
            found |= {key for key, value in tensors.items() if not value.shape}
    return found


def _mapped(values: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same dicts, lists and tuples, with other values for tensors and copies of the rest."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, dict):
        return {key: _mapped(value, function) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_mapped(value, function) for value in values)
    return copy.deepcopy(values)


def _device(model: nn.Module) -> Device:
    """A device that the backend reaches."""
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            return get_device(state.axes.mesh.device_type)
    return get_device("cpu")
