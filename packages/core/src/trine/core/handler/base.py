"""BaseHandler: the moments of training and evaluation, as a loop announces them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trine.core.handler.logic import BaseLogic
from trine.core.handler.options import consume_all
from trine.core.runtime.loops import EvaluatorLike, TrainerLike

__all__ = ["BaseHandler", "CompleteFn"]

CompleteFn = Callable[[int, Any], None]
"""Called by a handler with `(batch_idx, outputs)` once a step is complete.

A handler may do so later than in the step itself, but in the order of the steps, and
before it returns from `train_epoch_end` or `eval_loop_end`.
"""


class BaseHandler:
    """The callbacks that a loop makes, all of which do nothing here.

    Args:
        logic: what is done in a step; kept as `self._logic`.
        options: given to `consume_options` as a copy.
        args: ignored, for subclasses that take more.
        kwargs: ignored, for subclasses that take more.

    Raises:
        ValueError: if there is an option that it did not ask for.
    """

    def __init__(
        self, logic: BaseLogic, options: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        self._logic = logic
        consume_all(self, self.consume_options, options)

    def consume_options(self, options: dict[str, Any]) -> None:
        """Take the options that this handler knows out of `options`, and remember them."""

    def train_setup(self, trainer: TrainerLike, loader: Iterable[Any]) -> None:
        """Called once when a training run starts."""

    def train_epoch_begin(self, trainer: TrainerLike, loader: Iterable[Any]) -> None:
        """Called before an epoch's first batch is loaded."""

    def train_step(
        self, trainer: TrainerLike, batch_idx: int, batch: Any, complete_fn: CompleteFn
    ) -> None:
        """Do one training step.

        Args:
            trainer: the loop.
            batch_idx: steps of this epoch that are done.
            batch: as the loader gave it.
            complete_fn: to be called with `batch_idx` and the outputs.
        """

    def train_post_step(
        self, trainer: TrainerLike, batch_idx: int, batch: Any, outputs: Any
    ) -> None:
        """Called when a training step is complete."""

    def train_validation_begin(self, trainer: TrainerLike, evaluator: EvaluatorLike) -> None:
        """Called before each validation."""

    def train_validation_end(self, trainer: TrainerLike, evaluator: EvaluatorLike) -> None:
        """Called after each validation."""

    def train_epoch_end(self, trainer: TrainerLike) -> None:
        """Called after an epoch's last step, and after a validation that follows it."""

    def train_cleanup(self, trainer: TrainerLike) -> None:
        """Called once when a training run is complete."""

    def eval_setup(self, evaluator: EvaluatorLike, loader: Iterable[Any]) -> None:
        """Called once before the first evaluation."""

    def eval_loop_begin(self, evaluator: EvaluatorLike) -> None:
        """Called before the first step of each evaluation."""

    def eval_step(
        self, evaluator: EvaluatorLike, batch_idx: int, batch: Any, complete_fn: CompleteFn
    ) -> None:
        """Do one evaluation step; arguments as in `train_step`."""

    def eval_post_step(
        self, evaluator: EvaluatorLike, batch_idx: int, batch: Any, outputs: Any
    ) -> None:
        """Called when an evaluation step is complete."""

    def eval_loop_end(self, evaluator: EvaluatorLike) -> None:
        """Called after the last step of each evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """What the logic needs to go on after a restart."""
        return self._logic.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._logic.load_state_dict(state_dict)
