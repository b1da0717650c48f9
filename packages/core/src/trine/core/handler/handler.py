"""Handler: calls every runtime and the logic, in order, at each moment of a loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trine.core.errors import TrineError
from trine.core.handler.base import BaseHandler, CompleteFn
from trine.core.handler.logic import BaseLogic
from trine.core.runtime import steps
from trine.core.runtime.base import BaseRuntime
from trine.core.runtime.loops import EvaluatorLike, TrainerLike
from trine.core.runtime.tags import named_runtime_modules, runtime_of
from trine.core.tracing import span

__all__ = ["Handler"]

Served = list[tuple[str, nn.Module, BaseRuntime]]


class Handler(BaseHandler):
    """Runs a logic on models that `trine.core.to` moved, and keeps their runtimes informed.

    At each moment the runtimes come first, in the order of the models and of their
    submodules, and the logic follows. A step is: `train_pre_step` of the runtimes, the
    batch moved by `entry_runtime`, `train_step` and `train_step_optimizers` of the logic.

    Args:
        logic: what is done in a step.
        entry_runtime: moves the batches.
        options: all optional:

            * `train_report_keys` (str or list of str): outputs to report after each
              training step, as `train/<name>`.
            * `eval_report_keys` (str or list of str): outputs to report after each
              evaluation step, as `val/<name>`.
            * `async` (bool): accepted for older programs; it has no effect.

    Raises:
        ValueError: if an option is unknown.
        TypeError: if the names to report are no strings.
    """

    def __init__(
        self, logic: BaseLogic, entry_runtime: BaseRuntime, options: dict[str, Any]
    ) -> None:
        super().__init__(logic, options)
        self._entry_runtime = entry_runtime
        # One entry for each set of models seen: a trainer's and an evaluator's may differ.
        # The models are held, so that no other one can have their id.
        self._served: dict[tuple[int, ...], tuple[list[nn.Module], Served]] = {}

    def consume_options(self, options: dict[str, Any]) -> None:
        """Take the options of this class out of `options`."""
        super().consume_options(options)
        self._eval_report_keys = _names("eval_report_keys", options.pop("eval_report_keys", ()))
        self._train_report_keys = _names("train_report_keys", options.pop("train_report_keys", ()))
        options.pop("async", False)

    def train_setup(self, trainer: TrainerLike, loader: Iterable[Any]) -> None:
        """Put the models into training mode and let their runtimes initialise them.

        Args:
            trainer: the loop.
            loader: what batches will come from, or a mapping of such by module name.

        Raises:
            TrineError: if no module of the models has a runtime.
        """
        for model in trainer.models.values():
            model.train()
        self._initialize(trainer.models, loader, trainer.optimizers)

    def train_epoch_begin(self, trainer: TrainerLike, loader: Iterable[Any]) -> None:
        """Tell the runtimes, then the logic."""
        with span("train_epoch_begin"):
            for _, module, runtime in self._serving(trainer.models):
                runtime.train_epoch_begin(module)
        # Not every loop has a number; the logic may ask the loader then.
        self._logic.epoch_length = getattr(trainer, "iterations_per_epoch", None)
        self._logic.train_epoch_begin(trainer.models, trainer.epoch, loader)

    def train_step(
        self, trainer: TrainerLike, batch_idx: int, batch: Any, complete_fn: CompleteFn
    ) -> None:
        """Tell the runtimes, move the batch, and let the logic compute and step."""
        with span("train_pre_step"):
            for _, module, runtime in self._serving(trainer.models):
                runtime.train_pre_step(trainer, module, batch_idx, batch)
        with span("move batch", category="io"):
            batch = self._entry_runtime.convert_batch(batch)
        outputs = self._logic.train_step(trainer.models, trainer.optimizers, batch_idx, batch)
        self._logic.train_step_optimizers(trainer.models, trainer.optimizers, batch_idx)
        complete_fn(batch_idx, outputs)

    def train_post_step(
        self, trainer: TrainerLike, batch_idx: int, batch: Any, outputs: Any
    ) -> None:
        """Tell the runtimes, and report the outputs that the options name."""
        with span("train_post_step"):
            for _, module, runtime in self._serving(trainer.models):
                runtime.train_post_step(trainer, module, batch_idx, batch, outputs)
        if self._train_report_keys:
            trainer.report(_chosen("train", self._train_report_keys, outputs))

    def train_validation_begin(self, trainer: TrainerLike, evaluator: EvaluatorLike) -> None:
        """Tell the runtimes of the evaluator's models, then the logic."""
        with span("train_validation_begin"):
            for _, module, runtime in self._serving(evaluator.models):
                runtime.train_validation_begin(module)
        self._logic.train_validation_begin(evaluator.models)

    def train_validation_end(self, trainer: TrainerLike, evaluator: EvaluatorLike) -> None:
        """Tell the runtimes of the evaluator's models, then the logic."""
        with span("train_validation_end"):
            for _, module, runtime in self._serving(evaluator.models):
                runtime.train_validation_end(module)
        self._logic.train_validation_end(evaluator.models)

    def train_epoch_end(self, trainer: TrainerLike) -> None:
        """Tell the runtimes, then the logic."""
        with span("train_epoch_end"):
            for _, module, runtime in self._serving(trainer.models):
                runtime.train_epoch_end(module)
        self._logic.train_epoch_end(trainer.models, trainer.epoch)

    def train_cleanup(self, trainer: TrainerLike) -> None:
        """Tell the runtimes."""
        with span("train_cleanup"):
            for _, module, runtime in self._serving(trainer.models):
                runtime.train_cleanup(module)

    def eval_setup(self, evaluator: EvaluatorLike, loader: Iterable[Any]) -> None:
        """Put the models into evaluation mode and let their runtimes initialise them.

        Raises:
            TrineError: if no module of the models has a runtime.
        """
        for model in evaluator.models.values():
            model.eval()
        self._initialize(evaluator.models, loader, {})

    def eval_step(
        self, evaluator: EvaluatorLike, batch_idx: int, batch: Any, complete_fn: CompleteFn
    ) -> None:
        """Tell the runtimes, move the batch, and let the logic compute."""
        with span("eval_pre_step"):
            for _, module, runtime in self._serving(evaluator.models):
                runtime.eval_pre_step(evaluator, module, batch_idx, batch)
        with span("move batch", category="io"):
            batch = self._entry_runtime.convert_batch(batch)
        complete_fn(batch_idx, self._logic.eval_step(evaluator.models, batch_idx, batch))

    def eval_post_step(
        self, evaluator: EvaluatorLike, batch_idx: int, batch: Any, outputs: Any
    ) -> None:
        """Tell the runtimes, and report the outputs that the options name."""
        with span("eval_post_step"):
            for _, module, runtime in self._serving(evaluator.models):
                runtime.eval_post_step(evaluator, module, batch_idx, batch, outputs)
        if self._eval_report_keys:
            evaluator.report(_chosen("val", self._eval_report_keys, outputs))

    def _initialize(
        self,
        models: Mapping[str, nn.Module],
        loader: Iterable[Any],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self._served.pop(_identity(models), None)  # modules may have been moved since
        served = self._serving(models)
        if not served:
            raise TrineError(
                "None of the models was moved to a device, so no runtime serves them. Move them "
                "first: model = trine.core.to(model, device)."
            )
        only = next(iter(optimizers.values())) if len(optimizers) == 1 else None
        with span("initialize_module"):
            for name, module, runtime in served:
                data = loader.get(name) if isinstance(loader, Mapping) else loader
                runtime.initialize_module(module, data, optimizers.get(name, only))

    def _serving(self, models: Mapping[str, nn.Module]) -> Served:
        """Name, module and runtime of everything to be told about, in order."""
        key = _identity(models)
        if key not in self._served:
            served = [
                (name, module, runtime)
                for model_name, model in models.items()
                for name, module in named_runtime_modules(model, model_name)
                if (runtime := runtime_of(module)) is not None
            ]
            self._served[key] = (list(models.values()), served)
        return self._served[key][1]


def _identity(models: Mapping[str, nn.Module]) -> tuple[int, ...]:
    return tuple(id(model) for model in models.values())


def _names(option: str, given: object) -> list[str]:
    if given is None or isinstance(given, str):
        return [] if given is None else [given]
    names: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"The option {option!r} takes names of outputs, got {given!r}.")
    return names


def _chosen(prefix: str, keys: list[str], outputs: Any) -> dict[str, Any]:
    named = steps.named_outputs(outputs)
    missing = [key for key in keys if key not in named]
    if missing:
        raise ValueError(
            f"{prefix}_report_keys".replace("val", "eval")
            + f" names {', '.join(missing)}, but the outputs are: {', '.join(map(str, named))}."
        )
    return {f"{prefix}/{key}": named[key] for key in keys}
