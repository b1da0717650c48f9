"""Gathered values that are old are gathered again, on all ranks alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trine.distributed.fsdp import fully_shard

RunOnRanks = Callable[..., list[Any]]


def pair(reshard_after_forward: bool | int | None) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    net = copy.deepcopy(reference)
    fully_shard(net[0], reshard_after_forward=reshard_after_forward)
    fully_shard(net, reshard_after_forward=reshard_after_forward)
    return net, reference


def step_of_one_rank() -> None:
    """An optimizer of rank 0 alone steps: a probe, a logger's model."""
    if dist.get_rank() == 0:
        probe = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        with torch.enable_grad():
            backward(probe(torch.ones(1, 2)).sum())
        optimizer.step()


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def probes(reshard_after_forward: bool | int | None) -> None:
    net, reference = pair(reshard_after_forward)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        net(x)
        step_of_one_rank()
        torch.testing.assert_close(net(x), reference(x))

    loss = net(x).square().mean()
    step_of_one_rank()
    backward(loss)

    everyone = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        for rank in range(dist.get_world_size())
    ]
    backward(torch.stack([reference(each).square().mean() for each in everyone]).mean())
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        # fp32, a few terms in another order.
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None, 2], ids=str)
def test_an_optimizer_of_one_rank_alone_makes_nobody_gather(
    run_on_ranks: RunOnRanks, reshard_after_forward: bool | int | None
) -> None:
    run_on_ranks(probes, 4, reshard_after_forward)


def local_edits(reshard_after_forward: bool | int) -> None:
    net, _ = pair(reshard_after_forward)
    params = list(net.parameters())
    loss = net(torch.ones(2, 6)).sum()
    with torch.no_grad():
        for param in params:
            assert isinstance(param, DTensor)
            local = param.to_local()
            if local.numel():
                local.mul_(1.0)
    backward(loss)
    with torch.no_grad():
        net(torch.ones(2, 6))


@pytest.mark.parametrize("reshard_after_forward", [False, 2])
def test_edits_that_ranks_without_rows_leave_out_make_nobody_wait(
    run_on_ranks: RunOnRanks, reshard_after_forward: bool | int
) -> None:
    run_on_ranks(local_edits, 4, reshard_after_forward)


def step_between(reshard_after_forward: bool) -> None:
    net, reference = pair(reshard_after_forward)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.5)) for each in (net, reference)]
    x = torch.ones(2, 6)
    for model, optimizer in pairs:
        backward(model(x).square().mean())
        with torch.no_grad():
            model(x)  # with False everything is whole now
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(net(x), reference(x))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_forward_sees_the_step_of_an_optimizer_while_parameters_were_whole(
    run_on_ranks: RunOnRanks, reshard_after_forward: bool
) -> None:
    run_on_ranks(step_between, 2, reshard_after_forward)
