"""CodeBlock: a function, and what its runtime is to do with it.

A block is data. It decides nothing about devices: its runtime executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trine.core.runtime.base import BaseRuntime
from trine.core.runtime.tags import runtime_of

__all__ = ["CodeBlock", "forward", "update_parameters"]


@dataclass
class CodeBlock:
    """A function and what to do with it; call it with a batch to have that done.

    Attributes:
        func: a module, or a method of one.
        optimizers: the optimizers to step; their gradients are cleared first.
        backprop: whether to compute gradients.
        backprop_from: the output to differentiate, or None for every output that looks
            like a loss: a floating scalar.
        backprop_to: outputs or inputs at which differentiation stops, or None. They get
            a gradient in their `.grad`; what they were computed from gets none.
            With a grad scaler that gradient keeps the scale which was in force during the
            step, so that `stop.backward(stop.grad)` gives parameters what the scaler will
            unscale; divide by `scaler.get_scale()`, read before the block runs, for the
            gradient itself.
        state: what the runtime, or whoever made the block, wants to remember with it.
        runtime: what executes the block.
    """

    func: Callable[..., Any]
    optimizers: list[torch.optim.Optimizer]
    backprop: bool
    backprop_from: str | None
    backprop_to: set[str] | None
    state: dict[str, Any]
    runtime: BaseRuntime

    def __call__(self, inputs: Any) -> Any:
        """Execute the block and return what the function returned."""
        return self.runtime.execute(self, inputs)

    def state_dict(self) -> dict[str, Any]:
        """The block's state; of values that have a state dict, that."""
        return {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in self.state.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave. Keys that are missing in `state` stay."""
        for key, value in state.items():
            if hasattr(self.state.get(key), "load_state_dict"):
                self.state[key].load_state_dict(value)
            else:
                self.state[key] = value


def forward(block: Callable[..., Any]) -> CodeBlock:
    """A block that calls a module and does nothing else.

    Args:
        block: a module that was moved with `trine.core.to`, a method of one, or another
            block, whose function, state and runtime are taken over.

    Raises:
        ValueError: if there is no runtime to execute it.
    """
    if isinstance(block, CodeBlock):
        func, state, runtime = block.func, block.state, block.runtime
    else:
        func, state, runtime = block, {}, _runtime_for(block)
    return CodeBlock(
        func=func,
        optimizers=[],
        backprop=False,
        backprop_from=None,
        backprop_to=None,
        state=state,
        runtime=runtime,
    )


def update_parameters(
    block: Callable[..., Any],
    optimizers: Sequence[torch.optim.Optimizer],
    backprop_from: str | None = None,
    backprop_to: set[str] | None = None,
) -> CodeBlock:
    """A block that calls a module, differentiates, and steps optimizers.

    Args:
        block: a module that was moved with `trine.core.to`, a method of one, or a block
            made by `forward`.
        optimizers: the optimizers to step. Without any, gradients add up.
        backprop_from: the output to differentiate; see `CodeBlock`.
        backprop_to: values at which differentiation stops; see `CodeBlock`.

    Raises:
        ValueError: if there is no runtime to execute it, or the block differentiates
            already.
    """
    if isinstance(block, CodeBlock) and block.backprop:
        raise ValueError(
            "This block updates parameters already. Give update_parameters the module, or "
            "the block that forward(module) returned."
        )
    made = forward(block)
    made.optimizers = list(optimizers)
    made.backprop = True
    made.backprop_from = backprop_from
    made.backprop_to = backprop_to
    return made


def _runtime_for(func: Callable[..., Any]) -> BaseRuntime:
    module = func if isinstance(func, nn.Module) else getattr(func, "__self__", None)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{func!r} is neither a module nor a method of one, so nothing says where it runs."
        )
    runtime = runtime_of(module)
    if runtime is None:
        raise ValueError(
            f"This {type(module).__name__} has no runtime. Move it first: "
            "model = trine.core.to(model, device). A copy of a module has to be moved again."
        )
    return runtime
