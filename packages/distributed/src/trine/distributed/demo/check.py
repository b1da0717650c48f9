"""The unsharded twin: the same model, trained on the same bytes by one process alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trine.distributed.demo.model import next_byte_loss

__all__ = ["Reference", "compare"]

# Note [Why losses drift apart]
#
# The twin sees each rank's windows as a batch of its own and averages the gradients in
# the order of ranks, so the two trainings differ only in the last bits: in how sums over
# ranks are ordered, and in how the optimizer's kernel is vectorised over a shard or over
# the whole parameter. AdamW divides a gradient by its own size, so parameters whose
# gradient is all rounding error take full steps in a random direction, and training
# itself then amplifies the difference step by step. Measured over 400 default steps in
# fp32: DRIFT. A shard in the wrong place or a gradient counted
# twice shows as 1e-1 and more within the first ten steps.


class Reference:
    """An unsharded model and its optimizer.

    Args:
        model: as it was before sharding; it is trained in place.
        optimizer: of that model's parameters.
        dtype: in which to compute; the parameters stay as they are.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._dtype = dtype

    def step(self, windows_of_ranks: list[Tensor], learning_rate: float) -> float:
        """Train one step on the windows of all ranks and return the mean loss."""
        total = 0.0
        for windows in windows_of_ranks:
            loss = next_byte_loss(self._forward(windows[:, :-1]), windows) / len(windows_of_ranks)
            loss.backward()
            total += loss.item()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def _forward(self, tokens: Tensor) -> Tensor:
        cast = {name: p.to(self._dtype) for name, p in self._model.named_parameters()}
        logits: Tensor = functional_call(self._model, cast, (tokens,))
        return logits


def compare(losses: list[float], expected: list[float], tolerance: float) -> tuple[bool, str]:
    """Whether all losses agree, and a sentence about it."""
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    # A loss that is not a number agrees with nothing.
    wrong = [step for step, by in enumerate(differences) if not by <= tolerance]
    if not wrong:
        return True, (
            f"all {len(losses)} losses equal those of the unsharded model to {tolerance:g} "
            f"(largest difference {max(differences):.1e})"
        )
    step = wrong[0]
    return False, (
        f"the loss of step {step} is {losses[step]:.6f}, but {expected[step]:.6f} without "
        f"sharding; {len(wrong)} of {len(losses)} losses differ by more than {tolerance:g}"
    )
