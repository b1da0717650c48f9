"""One training that fits every backend: a small model, sharded, against the unsharded one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trine.distributed.fsdp import fully_shard

__all__ = ["train_like_the_unsharded_model"]


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 1)
    return nn.Sequential(*layers).to(device)


def batch(step: int, rank: int, device: torch.device) -> Tensor:
    """What a rank sees in a step; drawn on the host, so that it is the same for every device."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=generator).to(device)


def train_like_the_unsharded_model(device: torch.device) -> None:
    """Train on all ranks, and on the batches of all of them without sharding; compare.

    Args:
        device: of this rank, as its backend wants it.
    """
    reference, model = build(device), build(device)
    for layer in list(model):
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]

    for step in range(5):
        of_all = [batch(step, rank, device) for rank in range(dist.get_world_size())]
        reference(torch.cat(of_all)).square().mean().backward()
        model(of_all[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for expected, parameter in zip(reference.parameters(), model.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        # A mean over all batches is added up in another order than the mean of their means.
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-4, atol=1e-5)
