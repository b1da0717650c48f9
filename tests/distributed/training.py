"""Models to train, and how, for tests that compare several ways to shard them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Block", "train_alike"]


class Block(nn.Module):
    """Rows of 10 and 6."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def train_alike(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Losses of a model of tokens, with the same batches on every rank.

    However the model is sharded, its gradients are those of one process.
    """
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.arange(4).add(step) % 5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
