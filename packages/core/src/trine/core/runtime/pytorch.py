"""PyTorchRuntime: the runtime of every device that torch itself serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trine.core.batches import map_tensors
from trine.core.devices import Device, get_device
from trine.core.runtime import steps
from trine.core.runtime.base import BaseRuntime, DeviceLike
from trine.core.tracing import span

if TYPE_CHECKING:
    from trine.core.handler.code_block import CodeBlock

__all__ = ["PyTorchRuntime"]


class PyTorchRuntime(BaseRuntime):
    """Runs models with torch on any device that `get_device` knows.

    Args:
        device_spec: the device.
        options: all optional:

            * `autocast` (bool or dict): compute code blocks under `torch.autocast`. True
              takes the device's own kind and its default dtype; a dict holds arguments
              of `torch.autocast`, of which `device_type` may be left out. Default False,
              which computes in full precision whatever surrounds the call.
            * `grad_scaler` (`torch.amp.GradScaler`): scales the losses of code blocks and
              steps their optimizers.

            A subclass may have options of its own; only where there is none, one that is
            not listed here is refused.

    Raises:
        ValueError: if this machine has no such device, torch no autocast for it, or an
            option is unknown.
        TypeError: if the scaler is none, or `autocast` neither a bool nor a dict.
    """

    def __init__(self, device_spec: DeviceLike, options: dict[str, Any]) -> None:
        super().__init__(device_spec, options)
        unknown = [name for name in options if name not in ("autocast", "grad_scaler")]
        if unknown and type(self) is PyTorchRuntime:
            raise ValueError(
                f"PyTorchRuntime has no option {', '.join(map(repr, unknown))}. Its options: "
                "autocast, grad_scaler. Options of a runtime of your own come with runtime_class."
            )
        self.device: Device = get_device(device_spec)
        self._torch_device = self.device.torch_device
        self._autocast_option = steps.check_autocast(options.get("autocast"))
        self._grad_scaler = steps.check_grad_scaler(options.get("grad_scaler"))
        self._autocast()  # a wrong option fails here and not in the first step

    def _autocast(self) -> AbstractContextManager[object]:
        return steps.autocast_context(self._autocast_option, self._torch_device.type)

    def convert_batch(self, args: Any) -> Any:
        """The batch with every tensor moved by `move_tensor`, its containers' types kept.

        An object with a method `to` of its own is asked to move itself.

        Args:
            args: any nesting of containers; what cannot be moved stays as it is.
        """
        return map_tensors(args, self.move_tensor, objects=partial(_move, self._torch_device))

    def move_module(self, module: nn.Module) -> nn.Module:
        """Move the module's parameters and buffers, in place, and return it."""
        return self.device.module_to_device(module)

    def move_tensor(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; the same object if it is there already."""
        return self.device.tensor_to_device(tensor)

    def execute(self, code_block: CodeBlock, batch: Any) -> Any:
        """Run forward, and as the block says backward and its optimizers' steps.

        With several losses their sum is differentiated. Gradients of the block's
        optimizers are cleared first; a block without optimizers adds to what is there.

        Args:
            code_block: what to run.
            batch: a mapping becomes keyword arguments, a list or tuple positional ones,
                everything else one argument.

        Raises:
            ValueError: if `backprop_from` or `backprop_to` names nothing.
        """
        for optimizer in code_block.optimizers:
            optimizer.zero_grad()
        with span("forward", category="compute"), self._autocast():
            outputs = steps.call_with_batch(code_block.func, batch)
        if code_block.backprop:
            with span("backward", category="compute"):
                self._backward(code_block, batch, steps.named_outputs(outputs))
        if code_block.optimizers:
            with span("optimizer", category="compute"):
                self._step(code_block.optimizers)
        return outputs

    def _backward(self, code_block: CodeBlock, batch: Any, outputs: Mapping[str, Any]) -> None:
        if code_block.backprop_from is None:
            losses = steps.scalar_losses(outputs)
        else:
            losses = [_find(code_block.backprop_from, "backprop_from", outputs)]
        if not losses:
            steps.warn_of_no_loss(outputs)
            return
        # An output hides an input of the same name: it is nearer to the loss.
        values = {**batch, **outputs} if isinstance(batch, Mapping) else outputs
        names = code_block.backprop_to or ()
        stops = [_find(name, "backprop_to", values) for name in names]
        if self._grad_scaler is not None:
            losses = [self._grad_scaler.scale(loss) for loss in losses]
        steps.backward(losses, stops)

    def _step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        if self._grad_scaler is None:
            for optimizer in optimizers:
                optimizer.step()
            return
        for optimizer in optimizers:
            self._grad_scaler.step(optimizer)
        self._grad_scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The state of the gradient scaler, if there is one that has any."""
        scaler: Any = self._grad_scaler
        return {"grad_scaler": scaler.state_dict()} if hasattr(scaler, "state_dict") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        scaler: Any = self._grad_scaler
        if "grad_scaler" in state_dict and hasattr(scaler, "load_state_dict"):
            scaler.load_state_dict(state_dict["grad_scaler"])

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
            iterable: batches; their tensors are moved to the runtime's device.
            out_keys: the outputs to keep, in the order they are given out, or None for
                all. The outputs have to be a mapping then.
            device: where the tensors of the results are put. Containers keep their types.

        Raises:
            TypeError: if there are `out_keys` and the outputs are no mapping.
            ValueError: if one of `out_keys` is not among the outputs.
        """
        move = partial(_move, device.torch_device if isinstance(device, Device) else device)
        for batch in iterable:
            outputs = func(self.convert_batch(batch))
            if out_keys is not None:
                outputs = _only(out_keys, outputs)
            yield map_tensors(outputs, move, objects=move)


def _move(target: Any, thing: Any) -> Any:
    moved = thing.to(target)
    return thing if moved is None else moved  # None: it moved in place


def _only(keys: set[str], outputs: Any) -> dict[str, Any]:
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"out_keys chooses among named outputs, but the function returned "
            f"{type(outputs).__name__}. Return a dict, or leave out_keys out."
        )
    for key in keys:
        if key not in outputs:
            raise ValueError(_no_such(key, "out_keys", outputs))
    return {key: value for key, value in outputs.items() if key in keys}


def _find(name: str, argument: str, values: Mapping[str, Any]) -> Tensor:
    value = values.get(name)
    if not isinstance(value, Tensor):
        raise ValueError(_no_such(name, argument, values))
    return value


def _no_such(name: str, argument: str, values: Mapping[str, Any]) -> str:
    return f"{argument} names {name!r}, which is no tensor among: {', '.join(map(str, values))}."
