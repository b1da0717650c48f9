"""Clipping by the global norm, against torch's own on the whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from trine.distributed import init_mesh
from trine.distributed.fsdp import clip_grad_norm_, fully_shard

RunOnRanks = Callable[..., list[Any]]


def models(axes: dict[str, int]) -> tuple[nn.Module, nn.Module]:
    """A sharded model and a whole one with equal gradients of different sizes."""
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        # One row and two: some ranks hold nothing of them.
        pair.append(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2), nn.Linear(2, 1)))
    model, reference = pair
    mesh = init_mesh(axes)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.arange(15.0).view(3, 5)
    for each in pair:
        each(x).square().sum().backward()
    return model, reference


def clip(axes: dict[str, int], p: float, max_norm: float) -> float:
    model, reference = models(axes)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, p)

    norm = clip_grad_norm_(model.parameters(), max_norm, p)

    assert type(norm) is Tensor
    assert norm.shape == ()
    # Sums of a few dozen fp32 squares in another order.
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)
    return norm.item()


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"fsdp": 3}, {"ddp": 2, "fsdp": 2}])
def test_the_norm_is_that_of_the_whole_on_every_rank(
    run_on_ranks: RunOnRanks, axes: dict[str, int], p: float, max_norm: float
) -> None:
    norms = run_on_ranks(clip, math.prod(axes.values()), axes, p, max_norm)

    assert len(set(norms)) == 1


def clip_mixed() -> None:
    model, reference = models({"fsdp": 2})
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.tensor([3.0, 4.0, 0.0])
    grads = [param.grad for param in reference.parameters() if param.grad is not None]
    expected = torch.nn.utils.get_total_norm([*grads, plain.grad])

    norm = clip_grad_norm_([*model.parameters(), plain], 1.0)

    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        plain.grad, torch.tensor([3.0, 4.0, 0.0]) / expected, rtol=1e-5, atol=1e-7
    )


def test_sharded_and_plain_parameters_are_clipped_together(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(clip_mixed, 2)


def clip_what_cannot_be() -> None:
    model, _ = models({"fsdp": 2})
    weight = next(model.parameters())
    with pytest.raises(ValueError, match="norm_type must be positive"):
        clip_grad_norm_(model.parameters(), 1.0, 0.0)
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    assert isinstance(weight.grad, DTensor)
    before = weight.grad.to_local().clone()
    if dist.get_rank() == 1:
        weight.grad.to_local()[0, 0] = math.nan
    with pytest.raises(RuntimeError, match=r"norm \(p = 2\) over all ranks is nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if dist.get_rank() == 0:
        torch.testing.assert_close(weight.grad.to_local(), before, rtol=0, atol=0)
    mesh = weight.grad.device_mesh
    holder = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    holder.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match="is a partial sum"):
        clip_grad_norm_([holder], 1.0)


def test_what_cannot_be_clipped_is_refused_and_left_alone(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(clip_what_cannot_be, 2)
