"""What autograd saves in a forward, per unit: found out on the meta device, without memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trine.core.planning import PlanError

__all__ = ["Activations", "saved_by"]

Activations = dict[str, dict[int, int]]
"""By unit: bytes saved after so many of the units inside it have computed."""


def saved_by(
    model: nn.Module,
    units: dict[str, list[str]],
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype | None,
) -> Activations:
    """The bytes that a forward saves for backward.

    Args:
        model: on the meta device; not changed.
        units: full names of the units' modules, "" for the model; with those right inside.
        inputs: of the forward.
        dtype: of the computation; None for the parameters' own.

    Raises:
        PlanError: if the forward does not run on these inputs without values.
    """
    model = copy.deepcopy(model)
    for param in model.parameters():
        if dtype is not None and param.is_floating_point():
            param.data = param.data.to(dtype)
    if dtype is not None:
        inputs = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
    recorder = _Recorder(model.parameters(), model.buffers())
    for name in units:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(partial(recorder.begin, name))
        module.register_forward_hook(recorder.end)
    try:
        with saved_tensors_hooks(recorder.save, lambda saved: saved), _FusedAttention():
            model(*inputs)
    except Exception as error:  # whatever a user's forward may raise
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in inputs)
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise PlanError(
            f"The forward of {type(model).__name__} does not run on the meta device with inputs "
            f"{shapes}. {reason}. Give other inputs, or none to leave activations out."
        ) from error
    return recorder.saved


class _Recorder:
    """Adds up what is saved, for the innermost unit that computes."""

    def __init__(self, *held: Iterable[Tensor]) -> None:
        self.saved: Activations = defaultdict(lambda: defaultdict(int))
        # The memory of a tensor is known by its storage object, which must stay alive for that.
        self._storages = {id(s): s for each in held for s in (t.untyped_storage() for t in each)}
        self._running: list[str] = []
        self._done: dict[str, int] = defaultdict(int)

    def begin(self, name: str, *_: Any) -> None:
        self._running.append(name)

    def end(self, *_: Any) -> None:
        self._running.pop()
        if self._running:
            self._done[self._running[-1]] += 1

    def save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages and self._running:
            self._storages[id(storage)] = storage
            unit = self._running[-1]
            self.saved[unit][self._done[unit]] += storage.nbytes()
        return tensor.detach()  # an output that is saved would keep alive the graph that keeps it


class _Attention(torch.autograd.Function):
    """Saves what fused kernels of attention do: no scores."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *batch, heads, time, _ = (1, *query.shape) if query.dim() == 2 else query.shape
        # Heads lie beside each other, as the kernels write them, so that joining them is a view.
        out = query.new_empty(*batch, time, heads, value.shape[-1]).transpose(-3, -2)
        out = out.reshape(*query.shape[:-1], -1)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Any:  # pragma: no cover
        raise NotImplementedError("nothing runs backward on the meta device")


class _FusedAttention(TorchFunctionMode):
    """Takes attention as fused kernels do it; torch's form for meta tensors saves all scores."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value")
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            attend: Callable[..., Tensor] = _Attention.apply
            return attend(*(given[name] for name in names))
        return func(*args, **(kwargs or {}))
