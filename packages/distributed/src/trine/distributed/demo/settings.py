"""What one run of the demo is to do, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from trine.core import Precision
from trine.distributed.demo.model import GPT, GPTConfig
from trine.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Outcome", "Settings"]


@dataclass(frozen=True)
class Settings:
    """One run of the demo.

    Attributes:
        text: file or folder to train on; None for Python's standard library.
        steps: how many optimizer steps.
        backend: of the process group.
        precision: of the sharded model.
        out: existing folder for the timeline and the checkpoint.
        check: train the unsharded model beside it and compare.
        seed: of the initial parameters, the windows and the sample.
        batch: windows per rank and step.
        learning_rate: the highest, reached after 40 steps.
        sample: how many bytes the trained model writes.
        model: the size of the model.
    """

    text: Path | None
    steps: int
    backend: str
    precision: Precision
    out: Path
    check: bool
    seed: int
    batch: int = 8
    learning_rate: float = 2e-3
    sample: int = 240
    model: GPTConfig = field(default_factory=GPTConfig)

    @property
    def window(self) -> int:
        """Bytes in a window: what the model can see, and the byte after it."""
        return self.model.context + 1

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """What the precision means to `fully_shard`."""
        if self.precision is Precision.FP32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self.precision.compute_dtype, reduce_dtype=self.precision.reduce_dtype
        )

    @property
    def tolerance(self) -> float:
        """By how much a loss may differ from the unsharded model's, in nats per byte.

        See Note [Why losses may drift apart] in `check`.
        """
        return 1e-3 if self.precision.reduce_dtype is torch.float32 else 1e-1

    @property
    def timeline_folder(self) -> Path:
        """Where the recordings of the ranks and their timeline go."""
        return self.out / "timeline"

    @property
    def checkpoint_folder(self) -> Path:
        """Where the checkpoint goes."""
        return self.out / "checkpoint"

    @property
    def checkpoint_nbytes(self) -> int:
        """What the checkpoint holds: every parameter and AdamW's two moments of it, in fp32."""
        with torch.device("meta"):
            model = GPT(self.model)
        return 3 * sum(4 * parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class Outcome:
    """What one rank has to tell at the end.

    Attributes:
        losses: of every step, in nats per byte, the mean over all ranks.
        reference_losses: the unsharded model's, empty without `check` and on other
            ranks than 0.
        parameters: how many the whole model has.
        train_s: seconds spent in training steps.
        tokens: bytes that this rank trained on.
        sent_nbytes: bytes that this rank sent to gather parameters and reduce gradients.
        peak_nbytes: the most memory this process ever held.
        sample: what the trained model writes.
    """

    losses: list[float]
    reference_losses: list[float]
    parameters: int
    train_s: float
    tokens: int
    sent_nbytes: int
    peak_nbytes: int
    sample: bytes
