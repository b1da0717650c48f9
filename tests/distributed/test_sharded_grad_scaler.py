"""ShardedGradScaler: the scale and the steps of an unsharded GradScaler, on all ranks alike."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsShardedGradScaler
from torch.distributed.tensor import DTensor

from trine.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from trine.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

RunOnRanks = Callable[..., list[Any]]

INIT_SCALE = 1024.0
OVERFLOWS = (1, 4)  # steps in which the gradient of the last row exceeds the range of fp16


def loss_of(output: Tensor, step: int) -> Tensor:
    """A sum whose gradients are 1, or 1000 for the last output, times the scale."""
    weights = torch.ones(4)
    weights[-1] = 1000.0 if step in OVERFLOWS else 1.0
    return (output.float() * weights).sum()


def in_half(model: nn.Linear, x: Tensor) -> Tensor:
    """What a wrapper with fp16 parameters computes."""
    assert model.bias is not None
    return nn.functional.linear(x.half(), model.weight.half(), model.bias.half())


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def scale_like_the_unsharded_scaler() -> list[float]:
    torch.manual_seed(0)
    reference = nn.Linear(3, 4)
    half = MixedPrecision(param_dtype=torch.float16)
    model = FullyShardedDataParallel(
        copy.deepcopy(reference), mixed_precision=half, device_id="cpu"
    )
    options: dict[str, Any] = {"init_scale": INIT_SCALE, "growth_interval": 2}
    scaler = ShardedGradScaler(growth_factor=4.0, backoff_factor=0.25, **options)
    expected = torch.amp.GradScaler("cpu", growth_factor=4.0, backoff_factor=0.25, **options)
    x = torch.ones(2, 3)
    scales = []

    for step in range(8):
        for module, compute, one in (
            (model, model, scaler),
            (reference, lambda x: in_half(reference, x), expected),
        ):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            backward(one.scale(loss_of(compute(x), step)))
            overflown = step in OVERFLOWS and (module is reference or dist.get_rank() == 1)
            assert has_infinite(module) == overflown
            one.step(optimizer)
            one.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
        assert scales[-1] == expected.get_scale()
        # The ranks have the same batch, and the mean of two equal halves is exact.
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            assert torch.equal(ours.full_tensor(), theirs)
    return scales


def has_infinite(module: nn.Module) -> bool:
    """Whether this rank sees a gradient that is not finite, in what it holds."""
    grads = [param.grad for param in module.parameters()]
    held = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    return not all(bool(grad.isfinite().all()) for grad in held if grad is not None)


def test_one_rank_overflows_and_all_skip_as_the_unsharded_scaler_does(
    run_on_ranks: RunOnRanks,
) -> None:
    results = run_on_ranks(scale_like_the_unsharded_scaler, 2)

    assert results[0] == results[1]
    assert results[0][:5] == [1024.0, 256.0, 256.0, 1024.0, 256.0]


def ask_the_given_ranks() -> tuple[float, float]:
    """The scales after an overflow on rank 1, with all ranks and with this one alone asked."""
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    found = []
    for group in (None, groups[rank]):
        assert group is None or isinstance(group, dist.ProcessGroup)
        plain = nn.Linear(2, 2)  # not sharded, such as what a wrapper was told to ignore
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=group)
        backward(scaler.scale(plain(torch.ones(1, 2)).sum()))
        assert plain.bias.grad is not None
        if rank == 1:
            plain.bias.grad[0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found[0], found[1]


def test_ranks_agree_over_the_process_group(run_on_ranks: RunOnRanks) -> None:
    results = run_on_ranks(ask_the_given_ranks, 2)

    assert results == [(4.0, 8.0), (4.0, 4.0)]


def test_the_arguments_are_those_of_torchs() -> None:
    ours, theirs = (
        [(each.name, each.default) for each in inspect.signature(scaler).parameters.values()]
        for scaler in (ShardedGradScaler, TorchsShardedGradScaler)
    )

    assert ours == theirs


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the default is a GPU")
def test_without_a_gpu_it_is_enabled_and_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = ShardedGradScaler()

    assert scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 65536.0


def test_one_that_is_not_enabled_changes_nothing() -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    scaler = ShardedGradScaler(enabled=False)

    loss = scaler.scale(param.sum())
    backward(loss)
    scaler.step(torch.optim.SGD([param], lr=0.5))
    scaler.update()

    assert loss.item() == 1.0
    assert param.item() == 0.5
