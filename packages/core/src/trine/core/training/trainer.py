"""Trainer: the loop over epochs and batches that a handler is driven by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from trine.core.handler.base import BaseHandler
from trine.core.runtime.base import BaseRuntime
from trine.core.runtime.tags import named_runtime_modules, runtime_of
from trine.core.tracing import set_step, span
from trine.core.training.evaluator import Evaluator
from trine.core.training.position import DataPosition
from trine.core.training.progress import ProgressLine, is_rank_zero
from trine.core.training.triggers import Trigger, TriggerLike, make_trigger

__all__ = ["Trainer"]

EvaluatorSpec = Evaluator | tuple[Evaluator, TriggerLike]
Extension = Callable[["Trainer"], object]


class Trainer:
    """Trains for epochs, validates in between, stops when told to, and can be resumed.

    The order of one epoch: `train_epoch_begin`; for each batch `train_step` and
    `train_post_step`, then whatever is due (validations first, extensions in the order
    they were added, the stop condition last); `train_epoch_end`. `train_setup` comes
    before everything, `train_cleanup` after a run that was completed.

    Args:
        handler: what is done at each of these moments.
        models: the models by name, or one, which is called `main`.
        optimizers: the optimizers by name, or one, called `main`.
        max_epochs: stop after so many epochs, or None.
        max_iterations: stop after so many iterations in all, or None.
        stop_trigger: a further condition to stop, asked once after each iteration.
        evaluator: what validates, or a tuple of it and a trigger, or a mapping of such by
            name. Without a trigger it is due after each epoch.
        progress_bar: show on rank 0 how far the run is: one line on a terminal, a line
            every ten seconds and at the end of an epoch elsewhere.

    Raises:
        ValueError: if nothing would ever stop the run.

    Example:
        >>> import torch
        >>> from torch import nn, optim
        >>> import trine.core
        >>> from trine.core.handler import Handler, Logic
        >>> from trine.core.runtime import runtime_of
        >>> from trine.core.training import Trainer
        >>> model = trine.core.to(nn.Linear(3, 1), "cpu")
        >>> handler = Handler(Logic(), runtime_of(model), {})
        >>> trainer = Trainer(
        ...     handler,
        ...     models=model,
        ...     optimizers=optim.SGD(model.parameters(), lr=0.1),
        ...     max_epochs=2,
        ... )
        >>> trainer.run([{"input": torch.ones(1, 3)}] * 5)
        >>> trainer.epoch, trainer.iteration
        (2, 10)
    """

    def __init__(
        self,
        handler: BaseHandler,
        *,
        models: nn.Module | Mapping[str, nn.Module],
        optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        max_epochs: int | None = None,
        max_iterations: int | None = None,
        stop_trigger: TriggerLike | None = None,
        evaluator: EvaluatorSpec | Mapping[str, EvaluatorSpec] | None = None,
        progress_bar: bool = False,
    ) -> None:
        if max_epochs is None and max_iterations is None and stop_trigger is None:
            raise ValueError(
                "Nothing would stop this run: give max_epochs, max_iterations or stop_trigger."
            )
        self.handler = handler
        self.models = {"main": models} if isinstance(models, nn.Module) else dict(models)
        self.optimizers = (
            {"main": optimizers}
            if isinstance(optimizers, torch.optim.Optimizer)
            else dict(optimizers)
        )
        self.max_epochs = max_epochs
        self.max_iterations = max_iterations
        self.iteration = 0
        """Iterations done, over all epochs and runs."""
        self.observation: dict[str, Any] = {}
        """The latest value of everything reported, detached from the graph."""
        self._stop_trigger = None if stop_trigger is None else make_trigger(stop_trigger)
        self._evaluators = _with_triggers(evaluator)
        self._extensions: dict[str, tuple[Extension, Trigger]] = {}
        self._progress_bar = progress_bar
        self._iterations_per_epoch: int | None = None
        self._pending: deque[tuple[int, Any]] = deque()
        self._position = DataPosition()
        # Extensions not asked yet in this iteration; None once it is complete.
        self._unasked: list[str] | None = None

    @property
    def iterations_per_epoch(self) -> int:
        """How many iterations an epoch has.

        Raises:
            RuntimeError: before the first run, which says it.
        """
        if self._iterations_per_epoch is None:
            raise RuntimeError("How long an epoch is, is known once run() was called.")
        return self._iterations_per_epoch

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return 0 if self.iteration == 0 else self.iteration // self.iterations_per_epoch

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """What validates, by name."""
        return {name: evaluator for name, (evaluator, _) in self._evaluators.items()}

    def is_epoch_last_iter(self, idx: int) -> bool:
        """Whether the iteration of that index within an epoch is the epoch's last."""
        return idx + 1 == self.iterations_per_epoch

    def report(self, values: Mapping[str, Any]) -> None:
        """Remember values under their names, for stop conditions and the progress line."""
        for name, value in values.items():
            self.observation[name] = value.detach() if isinstance(value, Tensor) else value

    def extend(
        self, extension: Extension, name: str | None = None, trigger: TriggerLike = (1, "epoch")
    ) -> None:
        """Call a function of the trainer whenever its trigger is due, after validation.

        Args:
            extension: for instance what saves a checkpoint or steps a scheduler. If it
                has `state_dict` and `load_state_dict`, its state is the trainer's too.
            name: what its state is kept under; `__name__` or the class's name if None.
            trigger: when it is due.

        Raises:
            ValueError: if the name is taken.
        """
        name = name or str(getattr(extension, "__name__", type(extension).__name__))
        if name in self._extensions:
            raise ValueError(f"An extension is called {name!r} already; give this one a name.")
        self._extensions[name] = (extension, make_trigger(trigger))

    def run(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        train_len: int | None = None,
        eval_len: int | None = None,
    ) -> None:
        """Train until a stop condition holds.

        After `load_state_dict`, training goes on where it was. In the middle of an epoch,
        the batches that were seen are loaded and passed over, in the order they had: the
        random state from which the loader drew it is restored. That is torch's (of the
        CPU), Python's, and that of a `generator` of the loader or its sampler. An order
        that is drawn from anything else, such as NumPy, or bit by bit between steps that
        draw from the same generator, is the loader's to restore.

        Args:
            train_loader: batches to train on; started over if it is shorter than an epoch.
            val_loader: batches to validate on; needed if there is an evaluator.
            train_len: iterations of an epoch; by default the loader's length.
            eval_len: batches of a validation; by default the loader's length.

        Raises:
            ValueError: if `val_loader` and the evaluator do not come together, or an
                epoch has no length or no batch.
        """
        if bool(self._evaluators) != (val_loader is not None):
            raise ValueError(
                "An evaluator and a val_loader are needed together: "
                + ("val_loader is missing." if val_loader is None else "evaluator is missing.")
            )
        self._set_epoch_length(train_loader, train_len)
        self._pending.clear()
        self.handler.train_setup(self, train_loader)
        self._position.use(train_loader)
        if val_loader is not None:
            for evaluator in self.evaluators.values():
                evaluator.setup(val_loader)
        line = ProgressLine() if self._progress_bar and is_rank_zero() else None
        try:
            # A state that an extension saved leaves the rest of its iteration to be done.
            within = self._unasked is not None
            if within:
                self._run_extensions()
            stopped = self._is_over(asked=within)
            while not stopped:
                stopped = self._run_epoch(train_loader, val_loader, eval_len, line)
        finally:
            if line is not None:
                line.close()
        self.handler.train_cleanup(self)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on later; keep it with `torch.save`.

        It has the state of models, optimizers, the handler's logic and the models'
        runtimes; of extensions, triggers and the stop condition that have a `state_dict`;
        of what was reported, the tensors, numbers and strings; the place in the data and
        the random state of the CPU. That of an accelerator is left out.

        An extension may call it, and no other callback: what is due after the extension
        in the same iteration is then done by `run`, after `load_state_dict`.
        """
        return {
            "iteration": self.iteration,
            "iterations_per_epoch": self._iterations_per_epoch,
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "optimizers": {name: each.state_dict() for name, each in self.optimizers.items()},
            "handler": self.handler.state_dict(),
            "runtimes": {name: each.state_dict() for name, each in self._runtimes().items()},
            "extensions": {
                name: extension.state_dict()
                for name, (extension, _) in self._extensions.items()
                if hasattr(extension, "state_dict")
            },
            "triggers": {
                name: trigger.state_dict() for name, trigger in self._stateful_triggers().items()
            },
            "observation": {
                name: value
                for name, value in self.observation.items()
                if isinstance(value, Tensor | float | int | str)
            },
            "unasked_extensions": None if self._unasked is None else list(self._unasked),
            "position": self._position.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, into the models and optimizers of this trainer.

        Raises:
            ValueError: if the names of models, optimizers, extensions or triggers differ.
        """
        stateful = {
            name: extension
            for name, (extension, _) in self._extensions.items()
            if hasattr(extension, "load_state_dict")
        }
        groups: dict[str, Mapping[str, Any]] = {
            "models": self.models,
            "optimizers": self.optimizers,
            "extensions": stateful,
            "triggers": self._stateful_triggers(),
        }
        for kind, mine in groups.items():
            if mine.keys() != state_dict[kind].keys():
                raise ValueError(
                    f"The state was saved with the {kind} {sorted(state_dict[kind])}, and this "
                    f"trainer has {sorted(mine)}."
                )
        for kind, mine in groups.items():
            for name, each in mine.items():
                each.load_state_dict(state_dict[kind][name])
        self.handler.load_state_dict(state_dict["handler"])
        for name, runtime in self._runtimes().items():
            if name in state_dict["runtimes"]:
                runtime.load_state_dict(state_dict["runtimes"][name])
        self._position.load_state_dict(state_dict["position"])
        self._unasked = state_dict["unasked_extensions"]
        self.observation = dict(state_dict["observation"])
        self.iteration = state_dict["iteration"]
        self._iterations_per_epoch = state_dict["iterations_per_epoch"]

    def _runtimes(self) -> dict[str, BaseRuntime]:
        """The runtimes of the models, by the names of the modules they serve."""
        return {
            name: runtime
            for model_name, model in self.models.items()
            for name, module in named_runtime_modules(model, model_name)
            if (runtime := runtime_of(module)) is not None
        }

    def _stateful_triggers(self) -> dict[str, Any]:
        """What decides when something is due and has a state of its own."""
        triggers: dict[str, Trigger | None] = {"stop": self._stop_trigger}
        triggers |= {f"evaluator {name}": each for name, (_, each) in self._evaluators.items()}
        triggers |= {f"extension {name}": each for name, (_, each) in self._extensions.items()}
        return {
            name: trigger
            for name, trigger in triggers.items()
            if hasattr(trigger, "state_dict") and hasattr(trigger, "load_state_dict")
        }

    def _set_epoch_length(self, loader: Iterable[Any], given: int | None) -> None:
        try:
            length = len(loader) if given is None else given  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            raise ValueError(
                "The training loader has no length. Say how many batches make an epoch: "
                "run(loader, train_len=...)."
            ) from None
        if length < 1:
            raise ValueError(f"An epoch of {length} batches cannot be trained on.")
        if self.iteration and self._iterations_per_epoch != length:
            raise ValueError(
                f"An epoch had {self._iterations_per_epoch} iterations and has {length} now, so "
                f"iteration {self.iteration} would be in another epoch. Pass train_len="
                f"{self._iterations_per_epoch}."
            )
        self._iterations_per_epoch = length

    def _run_epoch(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None,
        eval_len: int | None,
        line: ProgressLine | None,
    ) -> bool:
        """Train to the end of the epoch, or until stopped; whether the run is over."""
        epoch, done = divmod(self.iteration, self.iterations_per_epoch)
        title = f"epoch {epoch + 1}" + (f"/{self.max_epochs}" if self.max_epochs else "")
        stopped = False
        self.handler.train_epoch_begin(self, train_loader)
        # Not before train_epoch_begin, which tells a distributed sampler the epoch. Closed
        # at the end, so that a loader with workers need not wait to be collected.
        with closing(self._position.batches(train_loader, go_on=done > 0)) as batches:
            for index in range(done, self.iterations_per_epoch):
                self._run_step(index, batches)
                self._run_what_is_due(val_loader, eval_len)
                stopped = self._is_over(asked=True)
                if line is not None:
                    total = self.iterations_per_epoch
                    final = stopped or self.is_epoch_last_iter(index)
                    line.update(title, index + 1, total, self.observation, final=final)
                if stopped:
                    break
        self.handler.train_epoch_end(self)
        return stopped

    def _run_step(self, index: int, batches: Iterator[Any]) -> None:
        set_step(self.iteration)
        with span("step", category="step"):
            with span("load batch", category="io"):
                batch = next(batches)
            self._pending.append((index, batch))
            self.handler.train_step(self, index, batch, self._complete)
        self.iteration += 1
        self._position.step_done()

    def _complete(self, batch_idx: int, outputs: Any) -> None:
        """What a handler calls when a step is complete."""
        index, batch = self._pending[0] if self._pending else (None, None)
        if index != batch_idx:
            raise RuntimeError(
                f"The handler completed iteration {batch_idx} of the epoch, but {index} is the "
                "next to complete. Steps complete in order and once."
            )
        self._pending.popleft()
        self.handler.train_post_step(self, batch_idx, batch, outputs)

    def _run_what_is_due(self, val_loader: Iterable[Any] | None, eval_len: int | None) -> None:
        for evaluator, trigger in self._evaluators.values():
            if trigger(self) and val_loader is not None:
                with span("validation"):
                    evaluator.handler.train_validation_begin(self, evaluator)
                    self.report(evaluator.run(val_loader, eval_len=eval_len))
                    evaluator.handler.train_validation_end(self, evaluator)
        self._unasked = list(self._extensions)
        self._run_extensions()

    def _run_extensions(self) -> None:
        while self._unasked:
            # One that was saved and is not here any more has nothing to be asked.
            name = self._unasked.pop(0)
            extension = self._extensions.get(name)
            if extension is not None and extension[1](self):
                with span(name):
                    extension[0](self)

    def _is_over(self, *, asked: bool) -> bool:
        """Whether to stop. The user's own condition is for after an iteration only."""
        wanted = asked and self._stop_trigger is not None and self._stop_trigger(self)
        self._unasked = None
        if self.max_epochs is not None and self.epoch >= self.max_epochs:
            return True
        if self.max_iterations is not None and self.iteration >= self.max_iterations:
            return True
        return wanted


def _with_triggers(
    given: EvaluatorSpec | Mapping[str, EvaluatorSpec] | None,
) -> dict[str, tuple[Evaluator, Trigger]]:
    if given is None:
        return {}
    by_name = given if isinstance(given, Mapping) else {"Evaluator": given}
    return {
        name: (each[0], make_trigger(each[1]))
        if isinstance(each, tuple)
        else (each, make_trigger((1, "epoch")))
        for name, each in by_name.items()
    }
