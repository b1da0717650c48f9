"""The unsharded twin: the same model, trained on the same bytes by one process alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trine.distributed.demo.model import next_byte_loss

__all__ = ["Reference", "compare"]

# Note [Why losses may drift apart]
#
# The twin sees each rank's windows as a batch of its own and sums the gradients in the
# order of ranks, as the engine does on gloo. There the two trainings do the same
# arithmetic and were seen to differ by 2e-7, which is the printed mean of the losses.
# A backend that sums in another order changes the last bit of a gradient, and training
# amplifies that: with the sum of three ranks reversed, losses were up to 5e-6 apart within
# 400 steps. A tolerance of 1e-3 leaves room for more ranks, and is far below what a shard
# in the wrong place or a gradient counted twice does to the loss within a few steps. Where
# gradients are reduced in bf16, every step rounds to 3 digits, and 1e-1 is the bound (1e-2
# was seen after 40 steps on three ranks).


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
            loss = next_byte_loss(self._forward(windows[:, :-1]), windows)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += loss.item()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            for parameter in group["params"]:
                parameter.grad.mul_(1 / len(windows_of_ranks))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / len(windows_of_ranks)

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
