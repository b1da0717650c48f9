"""State: what a training run is made of, as its device is shown it.

Read-only. A trainer keeps its own state and shows this much of it to `Device.prepare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from trine.core.precision import Precision

__all__ = ["State"]


@dataclass(frozen=True)
class State:
    """A training run, as `Device.prepare` is shown it.

    Attributes:
        model: the module to be trained, or None.
        optimizers: the optimizers that step its parameters.
        precision: the precision of the run, or its name.
    """

    model: nn.Module | None = None
    optimizers: Sequence[Optimizer] = ()
    precision: Precision | str = Precision.FP32
