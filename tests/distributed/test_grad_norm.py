"""Clipping by the global norm, against torch's own on the whole gradients."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from trine.distributed import init_mesh
from trine.distributed.fsdp import clip_grad_norm_, fully_shard
from trine.distributed.testing import RanksFailed

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


def clip_with_nan_on(rank: int, p: float) -> float:
    model, _ = models({"ddp": 2, "fsdp": 2} if dist.get_world_size() == 4 else {"fsdp": 2})
    weight = next(model.parameters())
    assert isinstance(weight.grad, DTensor)
    if dist.get_rank() % 2 == rank:  # in all copies of that shard
        weight.grad.to_local()[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="over all ranks is nan"):
        clip_grad_norm_(model.parameters(), 1.0, p, error_if_nonfinite=True)
    return clip_grad_norm_(model.parameters(), 1.0, p).item()


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(("world_size", "rank"), [(2, 0), (2, 1), (4, 1)])
def test_nan_on_one_rank_makes_the_norm_nan_on_all(
    run_on_ranks: RunOnRanks, world_size: int, rank: int, p: float
) -> None:
    norms = run_on_ranks(clip_with_nan_on, world_size, rank, p)

    assert all(math.isnan(norm) for norm in norms)


def whole_gradients(model: nn.Module) -> Tensor:
    grads = [param.grad for param in model.parameters()]
    return torch.cat([grad.full_tensor().flatten() for grad in grads if isinstance(grad, DTensor)])


def clip_half_types(dtype: torch.dtype, size: float, p: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3)).to(dtype)
    fully_shard(model)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        local = param.to_local()
        values = (torch.rand(local.shape) + 1) * size
        grad = DTensor.from_local(
            values.to(dtype),
            param.device_mesh,
            param.placements,
            shape=param.shape,
            stride=param.stride(),
        )
        param.grad = grad
    whole = whole_gradients(model).double()
    expected = torch.linalg.vector_norm(whole, p)

    norm = clip_grad_norm_(model.parameters(), 1.0, p)

    assert norm.dtype is torch.float32
    # Some thousand fp32 additions; rounding to the half type on the way would be off by 4e-3.
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
    clipped = whole_gradients(model)
    scaled = whole * (1 / expected)
    # One rounding to the half type; the fp16 ones are below its smallest normal number.
    tolerances = {torch.bfloat16: (2**-8, 0.0), torch.float16: (2**-11, 2**-25)}
    rtol, atol = tolerances[dtype]
    torch.testing.assert_close(clipped.double(), scaled, rtol=rtol * 1.01, atol=atol * 1.01)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 3e4)]
)
def test_half_gradients_have_a_norm_and_a_factor_in_fp32(
    run_on_ranks: RunOnRanks, dtype: torch.dtype, size: float, p: float
) -> None:
    # The last: the norm is above 65504, the greatest fp16, and the factor below its least.
    run_on_ranks(clip_half_types, 2, dtype, size, p)


def test_gradients_of_several_dtypes_are_clipped_together() -> None:
    half, double = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2).double())
    half.grad, double.grad = torch.full((2,), 6e4).half(), torch.full((2,), 1.0).double()

    norm = clip_grad_norm_([half, double], 1.0)

    assert norm.dtype is torch.float64
    assert norm.item() == pytest.approx(math.sqrt(2 * float(half.new_tensor(6e4)) ** 2 + 2))


def clip_alone() -> None:
    model, _ = models({"fsdp": 3})
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    for _ in range(3):  # what was in the sockets already may still arrive
        clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.only_gloo(
    "over MPI the job ends as soon as a rank is gone, before the others can raise"
)
def test_a_rank_that_is_gone_is_reported_as_by_other_collectives(run_on_ranks: RunOnRanks) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(clip_alone, 3)

    assert re.search(
        r"CommError: all_reduce of the gradient norm failed on rank [02] of 3 \(#\d of group "
        r"\S+, ranks 0-2\)[^\0]*Look at the first rank that reported an error",
        str(failure.value),
    )


def test_arguments_that_are_none_are_refused_by_name() -> None:
    params = [nn.Parameter(torch.ones(2))]
    params[0].grad = torch.ones(2)

    with pytest.raises(TypeError, match=r"^parameters must be .* model\.parameters\(\); got str"):
        clip_grad_norm_("abc", 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got Linear"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="its element 0 is of type tuple"):
        clip_grad_norm_(nn.Linear(2, 2).named_parameters(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^max_norm must be a number, got 'much' \(str\)"):
        clip_grad_norm_(params, "much")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^norm_type must be a number, got None"):
        clip_grad_norm_(params, 1.0, None)  # type: ignore[arg-type]
    for limit in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must be zero or positive"):
            clip_grad_norm_(params, limit)

    assert params[0].grad.tolist() == [1, 1]
    assert clip_grad_norm_(params, 0.0, "inf").item() == 1.0  # type: ignore[arg-type]  # as torch
    assert params[0].grad.tolist() == [0, 0]


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
