"""How large the state of an optimizer is: asked of torch's own, on tensors without memory."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trine.core.planning import PlanError

__all__ = ["StateSizes"]


class StateSizes:
    """Bytes of state for parameters of given shapes.

    Args:
        described: a class of `torch.optim` in any case, and arguments of it if need be:
            `adamw`, or `sgd:momentum=0.9`.

    Raises:
        PlanError: if there is no such optimizer.
    """

    def __init__(self, described: str) -> None:
        name, _, arguments = described.partition(":")
        classes = {
            each.__name__.lower(): each
            for each in vars(torch.optim).values()
            if inspect.isclass(each) and issubclass(each, Optimizer) and each is not Optimizer
        }
        if name.lower() not in classes:
            known = ", ".join(sorted(classes))
            raise PlanError(f"torch.optim has no optimizer {name!r}. It has {known}.")
        self._described = described
        self._class = classes[name.lower()]
        self._arguments = _arguments(arguments, described)
        self._known: dict[tuple[tuple[int, ...], torch.dtype], int] = {}

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes for one parameter, after a step.

        Raises:
            PlanError: if the optimizer cannot make a step without values.
        """
        key = shape, dtype
        if key not in self._known:
            self._known[key] = self._measure(shape, dtype)
        return self._known[key]

    def _measure(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        param.grad = torch.empty_like(param)
        try:
            optimizer = self._class([param], **self._arguments)
            optimizer.step()
        except (RuntimeError, TypeError, ValueError) as error:
            raise PlanError(
                f"The state of {self._described} cannot be found out: its step on a tensor "
                f"without values says: {error}. Plan with one like it, such as adamw or "
                "sgd:momentum=0.9."
            ) from error
        return sum(
            each.nbytes for each in optimizer.state[param].values() if isinstance(each, Tensor)
        )


def _arguments(given: str, described: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        name, equals, value = part.partition("=")
        try:
            found[name.strip()] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            equals = ""
        if not equals:
            raise PlanError(
                f"{part!r} of the optimizer {described!r} is not understood. Expected arguments "
                "as in sgd:momentum=0.9,nesterov=True."
            )
    return found
