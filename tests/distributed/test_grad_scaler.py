"""The gradient scaler of core on sharded parameters: all ranks skip a step, or none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trine.core import get_device
from trine.distributed.fsdp import fully_shard

RunOnRanks = Callable[..., list[Any]]


class Scaled(nn.Module):
    """Its first parameter has no dims, so that every rank holds all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


def step_with_an_overflow_on_rank_1() -> tuple[float, list[list[float]]]:
    torch.manual_seed(0)
    model = fully_shard(Scaled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = get_device("cpu").grad_scaler("amp_fp16", init_scale=8.0)
    assert scaler is not None
    first = next(model.parameters())
    assert isinstance(first, DTensor)
    assert first.placements == (Replicate(),)
    before = [param.full_tensor().flatten().tolist() for param in sharded(model)]
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    weight = model.linear.weight.grad
    assert isinstance(weight, DTensor)
    if dist.get_rank() == 1:
        weight.to_local()[0, 0] = math.inf

    scaler.step(optimizer)
    scaler.update()

    after = [param.full_tensor().flatten().tolist() for param in sharded(model)]
    assert after == before
    return scaler.get_scale(), after


def sharded(model: nn.Module) -> list[DTensor]:
    return [param for param in model.parameters() if isinstance(param, DTensor)]


def test_ranks_agree_to_skip_where_the_first_parameter_has_no_dims(
    run_on_ranks: RunOnRanks,
) -> None:
    results = run_on_ranks(step_with_an_overflow_on_rank_1, 2)

    assert results == [(4.0, results[0][1])] * 2
