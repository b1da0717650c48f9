"""BaseRuntime: what a kind of device may do at each point of a program's life.

A runtime moves data and modules, executes code blocks, and is told when training and
evaluation reach their steps. It must not know which loop calls it, nor change global
state when it is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trine.core import tracing
from trine.core.batches import map_tensors
from trine.core.devices import Device
from trine.core.runtime.loops import EvaluatorLike, TrainerLike

if TYPE_CHECKING:
    from trine.core.handler.code_block import CodeBlock

__all__ = ["BaseRuntime", "DeviceLike"]

DeviceLike = str | torch.device | Device
"""What names a device: `"cuda:1"`, a `torch.device`, or a Device."""


class BaseRuntime:
    """What runs a model on one device; subclass it for a kind of device of your own.

    A subclass says how to move and how to execute: `move_module`, `move_tensor`,
    `execute` and `map`. The other callbacks do nothing until they are overridden.
    `trine.core.to` makes the runtime and `trine.core.handler.Handler` calls it, once for
    each topmost module that was moved with it.

    Args:
        device_spec: the device that modules and tensors are moved to.
        options: whatever the subclass wants to be told; kept as `self.options`.
    """

    def __init__(self, device_spec: DeviceLike, options: dict[str, Any]) -> None:
        self.device_spec = device_spec
        self.options = options

    def convert_batch(self, args: Any) -> Any:
        """The batch with every tensor moved by `move_tensor`, its containers' types kept.

        Args:
            args: any nesting of containers; what is no tensor stays as it is.
        """
        return map_tensors(args, self.move_tensor)

    def move_module(self, module: nn.Module) -> nn.Module:
        """Move a module to the device and return it, or what stands in for it there.

        The module is tagged with this runtime already (`runtime_of`). A runtime that
        keeps the module should keep a `weakref.ref`: the tag lives as long as the
        module, and would keep it alive for ever.
        """
        raise NotImplementedError(_must_define(self, "move_module(module)"))

    def move_tensor(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the device."""
        raise NotImplementedError(_must_define(self, "move_tensor(tensor)"))

    def initialize_module(
        self,
        module: nn.Module,
        loader_or_batch: Iterable[Any] | Tensor | None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Called once for each module before training or evaluation starts.

        Args:
            module: a module that was moved with this runtime.
            loader_or_batch: the data it will see, for a device that has to know shapes.
            optimizer: the optimizer of the module, or None in evaluation.
        """

    def train_epoch_begin(self, module: nn.Module) -> None:
        """Called before an epoch's first batch is loaded."""

    def train_epoch_end(self, module: nn.Module) -> None:
        """Called after an epoch's last step, and after a validation that follows it."""

    def train_pre_step(
        self, trainer: TrainerLike, module: nn.Module, batch_idx: int, batch: Any
    ) -> None:
        """Called before each training step.

        Args:
            trainer: the loop.
            module: a module that was moved with this runtime.
            batch_idx: how many steps of this epoch are done.
            batch: the batch as it was loaded, not moved yet.
        """

    def train_post_step(
        self, trainer: TrainerLike, module: nn.Module, batch_idx: int, batch: Any, outs: Any
    ) -> None:
        """Called after each training step, the optimizer's part included.

        Args:
            trainer: the loop.
            module: a module that was moved with this runtime.
            batch_idx: how many steps of this epoch were done before this one.
            batch: the batch as it was loaded.
            outs: what the step's forward returned.
        """

    def train_cleanup(self, module: nn.Module) -> None:
        """Called once when a training run is complete."""

    def train_validation_begin(self, module: nn.Module) -> None:
        """Called before each validation of a training run."""

    def train_validation_end(self, module: nn.Module) -> None:
        """Called after each validation of a training run."""

    def eval_pre_step(
        self, evaluator: EvaluatorLike, module: nn.Module, batch_idx: int, batch: Any
    ) -> None:
        """Called before each evaluation step; arguments as in `train_pre_step`."""

    def eval_post_step(
        self, evaluator: EvaluatorLike, module: nn.Module, batch_idx: int, batch: Any, outs: Any
    ) -> None:
        """Called after each evaluation step; arguments as in `train_post_step`."""

    def execute(self, code_block: CodeBlock, batch: Any) -> Any:
        """Do what a code block describes, on the device.

        Args:
            code_block: the function to call and what to do with its outputs.
            batch: its inputs, on the device already.

        Returns:
            What the function returned.
        """
        raise NotImplementedError(_must_define(self, "execute(code_block, batch)"))

    def map(
        self,
        func: CodeBlock,
        iterable: Iterable[Any],
        out_keys: set[str] | None = None,
        device: Any = "cpu",
    ) -> Iterable[Any]:
        """Apply a code block to each batch of an iterable, when the result is asked for.

        Args:
            func: the code block.
            iterable: batches.
            out_keys: the outputs to keep, or None for all.
            device: where the results are wanted.
        """
        raise NotImplementedError(_must_define(self, "map(func, iterable, out_keys, device)"))

    def state_dict(self) -> dict[str, Any]:
        """What the runtime needs to go on after a restart; nothing here."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    @classmethod
    def trace(cls, event_name: str | None, arg: Any) -> AbstractContextManager[object]:
        """Time a `with` block; override it to reach the device's own tools too.

        The block is a span of category `user`. With nobody listening this costs what
        `trine.core.tracing.span` costs, so do not override it with `@contextmanager`.

        Args:
            event_name: what happens in the block; the class's name if None.
            arg: reaches the sinks as the span's `args["arg"]`, unless it is None.
        """
        name = event_name or cls.__name__
        if tracing.enabled and arg is not None:
            return tracing.span(name, args={"arg": arg})
        return tracing.span(name)


def _must_define(runtime: BaseRuntime, method: str) -> str:
    return (
        f"{type(runtime).__name__} has to define {method}. For a device that torch knows, "
        "derive from PyTorchRuntime, which does."
    )
