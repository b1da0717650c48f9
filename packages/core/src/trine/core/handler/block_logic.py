"""CodeBlockLogic: a step as one code block, executed by the model's runtime."""

from __future__ import annotations

from typing import Any

from trine.core.handler.code_block import forward, update_parameters
from trine.core.handler.logic import Models, Optimizers, SingleModelLogic

__all__ = ["CodeBlockLogic"]


class CodeBlockLogic(SingleModelLogic):
    """Trains one model with every optimizer there is, in the way its runtime executes.

    Args:
        model_name: which of the models.
        options: `backward_outputs` (str): the output to differentiate. Default: every
            output that looks like a loss. Autocast and scaling are options of the
            runtime here.

    Raises:
        TypeError: if `backward_outputs` is no string.
    """

    backward_outputs: str | None = None

    def consume_options(self, options: dict[str, Any]) -> None:
        """Take the option of this class; where it is absent, it stays as it was."""
        super().consume_options(options)
        given = options.pop("backward_outputs", None)
        if given is None:
            return
        if not isinstance(given, str):
            raise TypeError(
                f"CodeBlockLogic differentiates one output, so backward_outputs is one name; "
                f"got {given!r}. Leave it out to differentiate every scalar output."
            )
        self.backward_outputs = given

    def train_step(self, models: Models, optimizers: Optimizers, batch_idx: int, batch: Any) -> Any:
        """Execute forward, backward and the optimizers' steps as one block."""
        block = update_parameters(
            models[self.model_name], list(optimizers.values()), self.backward_outputs
        )
        return block(batch)

    def eval_step(self, models: Models, batch_idx: int, batch: Any) -> Any:
        """Execute forward as a block."""
        return forward(models[self.model_name])(batch)
