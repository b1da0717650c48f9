"""ClosureLogic: for optimizers that evaluate the model themselves, such as LBFGS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.core.handler.logic import Logic, Models, Optimizers
from trine.core.runtime import steps
from trine.core.tracing import span

__all__ = ["ClosureLogic"]


class ClosureLogic(Logic):
    """Gives the optimizer a function that computes the loss, as often as it wants.

    The options are those of `Logic`, but for a scaler and for accumulation: a step is
    the optimizer's alone here.

    Raises:
        ValueError: if one of those two is asked for.
    """

    def consume_options(self, options: dict[str, Any]) -> None:
        """Take the options of `Logic`, and refuse what cannot work here."""
        super().consume_options(options)
        if self._grad_scaler is not None:
            raise ValueError(
                "A gradient scaler cannot work inside an optimizer's closure. Use Logic, or "
                "a precision that needs none, such as bfloat16."
            )
        if self._window > 1:
            raise ValueError(
                "An optimizer with a closure steps on one batch. Use Logic to accumulate."
            )

    def train_step(self, models: Models, optimizers: Optimizers, batch_idx: int, batch: Any) -> Any:
        """Step the optimizer, which evaluates and differentiates the model.

        Returns:
            The outputs of the first evaluation, made before parameters changed.

        Raises:
            ValueError: if the outputs have no loss.
        """
        model, optimizer = models[self.model_name], optimizers[self.model_name]
        evaluations: list[Any] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            with span("forward", category="compute"), self._autocast(model):
                outputs = self._forward(model, batch)
            if not evaluations:
                evaluations.append(outputs)
            named = steps.named_outputs(outputs)
            losses = self._losses(named)
            if not losses:
                raise ValueError(
                    f"A closure has to compute a loss, and none of the outputs "
                    f"({', '.join(map(str, named))}) is one."
                )
            with span("backward", category="compute"):
                self._backward(losses)
            return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

        with span("optimizer", category="compute"):
            # torch types the closure's result as float, and documents a tensor.
            optimizer.step(closure)  # type: ignore[arg-type]
        return evaluations[0]

    def train_step_optimizers(self, models: Models, optimizers: Optimizers, batch_idx: int) -> None:
        """Nothing: `train_step` has stepped already."""
