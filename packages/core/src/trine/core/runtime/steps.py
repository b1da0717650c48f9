"""The parts of one step: call with a batch, find the losses, differentiate, autocast.

`PyTorchRuntime.execute` and `Logic` put them together; here nothing knows of either.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import Node

__all__ = [
    "AutocastOption",
    "GradScalerLike",
    "autocast_context",
    "backward",
    "call_with_batch",
    "check_autocast",
    "check_grad_scaler",
    "named_outputs",
    "scalar_losses",
    "warn_of_no_loss",
]

AutocastOption = bool | Mapping[str, Any]
"""True, False, or the arguments of `torch.autocast`."""


@runtime_checkable
class GradScalerLike(Protocol):
    """What is asked of a gradient scaler; that of torch has it, for every device."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the scale."""

    def step(self, optimizer: torch.optim.Optimizer) -> object:
        """Unscale the gradients and step, unless one is not finite."""

    def update(self) -> None:
        """Choose the next scale."""


def check_grad_scaler(scaler: object) -> GradScalerLike | None:
    """The scaler, once it is known to be one.

    Raises:
        TypeError: if it has no `scale`, `step` and `update`.
    """
    if scaler is not None and not isinstance(scaler, GradScalerLike):
        raise TypeError(
            f"The option 'grad_scaler' takes a torch.amp.GradScaler, or an object with "
            f"scale, step and update; got {type(scaler).__name__}."
        )
    return scaler


def check_autocast(option: object) -> AutocastOption:
    """The option `autocast`, once it is known to be one; None is False.

    Raises:
        TypeError: if it is neither a bool nor a mapping.
    """
    if option is None:
        return False
    if not isinstance(option, (bool, Mapping)):
        raise TypeError(
            f"The option 'autocast' takes True, False or a dict of arguments of torch.autocast, "
            f"such as {{'dtype': torch.bfloat16}}; got {option!r}."
        )
    return option


def autocast_context(option: AutocastOption, device_type: str) -> AbstractContextManager[object]:
    """A fresh autocast context for the option `autocast`.

    Args:
        option: True or False, or arguments of `torch.autocast`; `device_type` and
            `enabled` need not be among them.
        device_type: the kind of device to autocast on where the option does not say.

    Raises:
        ValueError: if torch has no autocast for that kind of device.
    """
    arguments: dict[str, Any] = {"enabled": option} if isinstance(option, bool) else dict(option)
    kind = arguments.pop("device_type", device_type)
    if not torch.amp.is_autocast_available(kind):
        if not arguments.get("enabled", True):
            return nullcontext()
        raise ValueError(
            f"torch has no autocast for {kind!r} devices. Leave the option 'autocast' out, or "
            "name another 'device_type' in it."
        )
    return torch.autocast(kind, **arguments)


def call_with_batch(func: Callable[..., Any], batch: Any) -> Any:
    """Call with a batch as its type suggests.

    A mapping becomes keyword arguments, a list or tuple positional ones; a namedtuple
    and everything else is one argument.
    """
    if isinstance(batch, Mapping):
        return func(**batch)
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return func(*batch)
    return func(batch)


def named_outputs(outputs: Any) -> Mapping[str, Any]:
    """Outputs by name: keys or field names, else positions `"0"`, `"1"`, ..."""
    if isinstance(outputs, Mapping):
        return outputs
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return dict(zip(outputs._fields, outputs, strict=True))
    if isinstance(outputs, (list, tuple)):
        return {str(position): output for position, output in enumerate(outputs)}
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {each.name: getattr(outputs, each.name) for each in dataclasses.fields(outputs)}
    return {"0": outputs}


def scalar_losses(outputs: Mapping[str, Any]) -> list[Tensor]:
    """The outputs that look like losses: one floating element, made by differentiable work.

    One tensor under two names counts once.
    """
    found = {
        id(value): value
        for value in outputs.values()
        if isinstance(value, Tensor)
        and value.grad_fn is not None
        and value.numel() == 1
        and (value.dtype.is_floating_point or value.dtype.is_complex)
    }
    return list(found.values())


def backward(losses: Sequence[Tensor], stops: Sequence[Tensor] = ()) -> None:
    """Differentiate the sum of the losses, in one walk of the graph.

    Args:
        losses: may share parts of their graphs.
        stops: values at which to stop. Each gets the gradient in its `.grad`; what they
            were computed from gets none. The graph is kept, so that differentiation can
            go on from them: `stop.backward(stop.grad)`.
    """
    if not stops:
        torch.autograd.backward(losses)
        return
    inner = [stop for stop in stops if stop.grad_fn is not None]
    leaves = _leaves_in_front(losses, inner)
    # A parameter may be used on both sides of a stop, so what would reach it from behind has
    # to be cut: the hook lets nothing pass, and keeps what arrived for the stop itself.
    arrived: dict[int, Tensor] = {}

    def cut(stop: Tensor) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            arrived[id(stop)] = grad
            return torch.zeros_like(grad)

        return hook

    for stop in inner:
        stop.retain_grad()  # or reading its .grad would warn
    earlier = [stop.grad for stop in inner]
    handles = [stop.register_hook(cut(stop)) for stop in inner]  # type: ignore[no-untyped-call]  # torch leaves it untyped
    try:
        torch.autograd.backward(losses, inputs=[*leaves, *inner], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
        for stop, before in zip(inner, earlier, strict=True):
            now = arrived.get(id(stop))
            stop.grad = now if before is None else before if now is None else before + now


def _leaves_in_front(losses: Iterable[Tensor], stops: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that gradients of the losses reach without passing a stop."""
    closed = {(stop.grad_fn, stop.output_nr) for stop in stops}
    todo = [(loss.grad_fn, loss.output_nr) for loss in losses]
    seen: set[Node] = set()
    leaves: list[Tensor] = []
    while todo:
        edge = todo.pop()
        node = edge[0]
        if node is None or edge in closed or node in seen:
            continue
        seen.add(node)
        leaf: Tensor | None = getattr(node, "variable", None)  # AccumulateGrad has one
        if leaf is not None:
            leaves.append(leaf)
        todo.extend(node.next_functions)
    return leaves


def warn_of_no_loss(outputs: Mapping[str, Any]) -> None:
    """Say that a step has nothing to differentiate: parameters will not be trained by it."""
    warnings.warn(
        f"No gradient was computed: none of the outputs ({', '.join(map(str, outputs))}) is a "
        "floating scalar that depends on parameters. Return the loss, or name it.",
        stacklevel=2,
    )
