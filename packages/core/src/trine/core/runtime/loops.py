"""What runtimes and handlers may ask of the loop that calls them.

`trine.core.training` has one such loop; any object with these members is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["EvaluatorLike", "TrainerLike"]


class TrainerLike(Protocol):
    """A training loop, as the callbacks see it."""

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """The models by name; a single one is called `main`."""

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name; that of a model has the model's name."""

    @property
    def epoch(self) -> int:
        """Epochs already finished."""

    def report(self, values: Mapping[str, Any]) -> None:
        """Take values worth showing, such as `{"train/loss": loss}`."""


class EvaluatorLike(Protocol):
    """An evaluation loop, as the callbacks see it."""

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """The models by name; a single one is called `main`."""

    def report(self, values: Mapping[str, Any]) -> None:
        """Take values of one batch; the loop averages them over batches."""
