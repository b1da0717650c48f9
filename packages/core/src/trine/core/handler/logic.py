"""Logic: what is done with a batch in one training or evaluation step.

A logic knows models, optimizers and batches. When runtimes are called is the handler's
business, and how often a step is taken the loop's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trine.core.handler.options import consume_all
from trine.core.runtime import steps
from trine.core.runtime.pytorch import PyTorchRuntime
from trine.core.runtime.tags import runtime_of
from trine.core.tracing import span

__all__ = ["BaseLogic", "Logic", "SingleModelLogic"]

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


class BaseLogic:
    """The callbacks of a logic, all of which do nothing; override those that you need.

    Args:
        options: given to `consume_options` as a copy.

    Raises:
        ValueError: if there is an option that it did not ask for.
    """

    epoch_length: int | None = None
    """Steps of an epoch, or None where the loop does not say; set before `train_epoch_begin`."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        consume_all(self, self.consume_options, options)

    def consume_options(self, options: dict[str, Any]) -> None:
        """Take the options that this logic knows out of `options`, and remember them.

        What is left in the mapping afterwards is meant for someone else, or misspelt; the
        constructor refuses it.
        """

    def train_epoch_begin(self, models: Models, epoch: int, loader: Iterable[Any]) -> None:
        """Called before an epoch's first batch is loaded.

        Args:
            models: the models by name.
            epoch: epochs already finished.
            loader: what the batches will come from.
        """

    def train_epoch_end(self, models: Models, epoch: int) -> None:
        """Called after an epoch's last step; `epoch` counts this one as finished."""

    def train_step(self, models: Models, optimizers: Optimizers, batch_idx: int, batch: Any) -> Any:
        """Compute outputs and gradients; stepping is left to `train_step_optimizers`.

        Args:
            models: the models by name.
            optimizers: the optimizers by name.
            batch_idx: steps of this epoch that are done.
            batch: on the device already.

        Returns:
            The outputs, for reports and callbacks.
        """

    def train_step_optimizers(self, models: Models, optimizers: Optimizers, batch_idx: int) -> None:
        """Step the optimizers; called after each `train_step`."""

    def train_validation_begin(self, models: Models) -> None:
        """Called before each validation, with the evaluator's models."""

    def train_validation_end(self, models: Models) -> None:
        """Called after each validation, with the evaluator's models."""

    def eval_step(self, models: Models, batch_idx: int, batch: Any) -> Any:
        """Compute outputs; called without gradients. Arguments as in `train_step`."""

    def state_dict(self) -> dict[str, Any]:
        """What the logic needs to go on after a restart; nothing here."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class SingleModelLogic(BaseLogic):
    """Puts one model into training or evaluation mode at the right moments.

    Args:
        model_name: which of the models.
        options: given to `consume_options` as a copy.
    """

    def __init__(self, model_name: str = "main", options: dict[str, Any] | None = None) -> None:
        self.model_name = model_name
        super().__init__(options)

    def train_epoch_begin(self, models: Models, epoch: int, loader: Iterable[Any]) -> None:
        """Put the model into training mode, and tell a distributed sampler the epoch."""
        models[self.model_name].train()
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def train_epoch_end(self, models: Models, epoch: int) -> None:
        """Put the model into evaluation mode."""
        models[self.model_name].eval()

    def train_validation_begin(self, models: Models) -> None:
        """Put the model into evaluation mode."""
        models[self.model_name].eval()

    def train_validation_end(self, models: Models) -> None:
        """Put the model into training mode."""
        models[self.model_name].train()


class Logic(SingleModelLogic):
    """Trains one model with one optimizer of the same name.

    The batch decides how the model is called: a mapping becomes keyword arguments, a list
    or tuple positional ones, everything else (a namedtuple too) one argument. Outputs
    are named by their keys or fields, else by position: `"0"`, `"1"`, ...

    Args:
        model_name: which of the models and optimizers.
        options: all optional:

            * `backward_outputs` (str or list of str): the outputs to differentiate; their
              sum, if there are several. Default: every output that looks like a loss, a
              floating scalar.
            * `backward_function` (callable): called with each loss instead of
              `loss.backward()`.
            * `autocast` (bool or dict): compute under `torch.autocast`. True takes the
              model's kind of device and its default dtype; a dict holds arguments of
              `torch.autocast`, of which `device_type` may be left out. Default False.
            * `grad_scaler` (`torch.amp.GradScaler`): scales the losses and steps.
            * `gradient_accumulation_steps` (int): step once for so many batches, with
              the mean of their gradients. Where an epoch's length is known (from the
              loop, or else the loader), its last batches make a shorter window with the
              mean over themselves; where it is not, the window goes on in the next
              epoch. A state saved within a window holds its gradients. Default 1.

    Raises:
        TypeError: if the scaler is none, or another option has no such type.
        ValueError: if an option is unknown, or `gradient_accumulation_steps` is not at
            least 1.
    """

    def __init__(self, model_name: str = "main", options: dict[str, Any] | None = None) -> None:
        self.backward_outputs: str | list[str] | tuple[str, ...] | None = None
        self._backward_function: Callable[[Tensor], object] | None = None
        self._autocast_option: steps.AutocastOption = False
        self._grad_scaler: steps.GradScalerLike | None = None
        self._window = 1
        self._accumulated = 0  # batches of the open window
        self._accumulating: torch.optim.Optimizer | None = None  # with their gradients
        self._restored: list[Tensor | None] | None = None  # gradients for the next step
        self._epoch_length: int | None = None
        super().__init__(model_name, options)

    def consume_options(self, options: dict[str, Any]) -> None:
        """Take the options of this class; those that are absent or None stay as they were."""

        def take(name: str, now: Any) -> Any:
            given = options.pop(name, None)
            return now if given is None else given

        super().consume_options(options)
        self.backward_outputs = take("backward_outputs", self.backward_outputs)
        self._backward_function = take("backward_function", self._backward_function)
        self._autocast_option = steps.check_autocast(take("autocast", self._autocast_option))
        self._grad_scaler = steps.check_grad_scaler(take("grad_scaler", self._grad_scaler))
        self._window = take("gradient_accumulation_steps", self._window)
        if not isinstance(self._window, int):
            raise TypeError(
                f"gradient_accumulation_steps={self._window!r}: expected a whole number of batches."
            )
        if self._window < 1:
            raise ValueError(
                f"gradient_accumulation_steps={self._window}: expected 1 or more batches."
            )

    def train_epoch_begin(self, models: Models, epoch: int, loader: Iterable[Any]) -> None:
        """Put the model into training mode, and tell a distributed sampler the epoch."""
        super().train_epoch_begin(models, epoch, loader)
        if self.epoch_length is not None:  # may differ from the loader's
            self._epoch_length = self.epoch_length
            return
        try:
            self._epoch_length = len(loader)  # type: ignore[arg-type]  # asking is the point
        except (TypeError, NotImplementedError):
            self._epoch_length = None

    def train_step(self, models: Models, optimizers: Optimizers, batch_idx: int, batch: Any) -> Any:
        """Clear gradients where a window begins, compute outputs, and differentiate."""
        model = models[self.model_name]
        optimizer = optimizers[self.model_name]
        if self._accumulated == 0:
            optimizer.zero_grad()
        elif self._restored is not None:
            _set_gradients(optimizer, self._restored)
        self._restored = None
        self._accumulating = optimizer
        with span("forward", category="compute"), self._autocast(model):
            outputs = self._forward(model, batch)
        with span("backward", category="compute"):
            self._backward(self._losses(steps.named_outputs(outputs)))
        self._accumulated += 1
        return outputs

    def train_step_optimizers(self, models: Models, optimizers: Optimizers, batch_idx: int) -> None:
        """Step the optimizer, through the scaler if there is one, where a window ends."""
        optimizer = optimizers[self.model_name]
        missing = self._window - self._accumulated
        if self._window > 1 and missing > 0:
            if batch_idx + 1 != self._epoch_length:
                return
            _multiply_gradients(optimizer, self._window / self._accumulated)
        self._accumulated, self._accumulating = 0, None
        with span("optimizer", category="compute"):
            if self._grad_scaler is None:
                optimizer.step()
            else:
                self._grad_scaler.step(optimizer)
                self._grad_scaler.update()

    def eval_step(self, models: Models, batch_idx: int, batch: Any) -> Any:
        """Compute outputs."""
        model = models[self.model_name]
        with span("forward", category="compute"), self._autocast(model):
            return self._forward(model, batch)

    def state_dict(self) -> dict[str, Any]:
        """The state of the gradient scaler, and within a window what it accumulated."""
        scaler: Any = self._grad_scaler
        state = {"grad_scaler": scaler.state_dict()} if hasattr(scaler, "state_dict") else {}
        if self._accumulated:
            gradients = self._restored
            if gradients is None and self._accumulating is not None:
                gradients = [parameter.grad for parameter in _parameters(self._accumulating)]
            state["accumulation"] = {
                "window": self._window,
                "batches": self._accumulated,
                "gradients": gradients,
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ValueError: if it was saved within a window of another length.
        """
        accumulation = state_dict.get("accumulation", {"batches": 0, "gradients": None})
        if accumulation["batches"] and accumulation["window"] != self._window:
            raise ValueError(
                f"The state was saved {accumulation['batches']} batches into a window of "
                f"{accumulation['window']}, and this logic has gradient_accumulation_steps="
                f"{self._window}. Go on with the former number, or from a state saved where a "
                "window ends."
            )
        scaler: Any = self._grad_scaler
        if "grad_scaler" in state_dict and hasattr(scaler, "load_state_dict"):
            scaler.load_state_dict(state_dict["grad_scaler"])
        self._accumulated = accumulation["batches"]
        self._restored = accumulation["gradients"]

    def _autocast(self, model: nn.Module) -> AbstractContextManager[object]:
        return steps.autocast_context(self._autocast_option, _device_type(model))

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        return steps.call_with_batch(model, batch)

    def _losses(self, outputs: Mapping[str, Any]) -> list[Tensor]:
        """What to differentiate, each tensor once, whatever names it has."""
        if self.backward_outputs is None:
            losses = steps.scalar_losses(outputs)
        else:
            names = self.backward_outputs
            found: dict[int, Tensor] = {}
            for name in [names] if isinstance(names, str) else names:
                value = outputs.get(name)
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    found[id(value)] = value
                elif name not in outputs:
                    warnings.warn(
                        f"backward_outputs names {name!r}, which is not among the outputs: "
                        f"{', '.join(map(str, outputs))}.",
                        stacklevel=2,
                    )
            losses = list(found.values())
        if not losses:
            steps.warn_of_no_loss(outputs)
        return losses

    def _backward(self, losses: list[Tensor]) -> None:
        if self._window > 1:
            losses = [loss / self._window for loss in losses]
        if self._grad_scaler is not None:
            losses = [self._grad_scaler.scale(loss) for loss in losses]
        if self._backward_function is not None:
            for loss in losses:
                self._backward_function(loss)
        elif losses:
            steps.backward(losses)


def _device_type(model: nn.Module) -> str:
    """The kind of device that the model computes on.

    Its runtime knows best: parameters may be kept elsewhere between steps.
    """
    runtime = runtime_of(model)
    if isinstance(runtime, PyTorchRuntime):
        return runtime.device.torch_device.type
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _multiply_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for parameter in _parameters(optimizer):
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _set_gradients(optimizer: torch.optim.Optimizer, gradients: list[Tensor | None]) -> None:
    parameters = _parameters(optimizer)
    if len(parameters) != len(gradients):
        raise ValueError(
            f"The state holds the gradients of {len(gradients)} parameters, and the optimizer "
            f"has {len(parameters)}."
        )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
