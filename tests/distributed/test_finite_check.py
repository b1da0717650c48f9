"""The first gradient that is not finite is named with its rank and step, on every rank.

Gradients are spoilt on one rank, by a hook on the output of one layer or of one parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from trine.core import tracing
from trine.distributed import init_mesh
from trine.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    NonFiniteGradient,
    fully_shard,
)

RunOnRanks = Callable[..., list[Any]]

LIMIT_S = 90.0  # gloo's own is half an hour


class Block(nn.Module):
    """Its `spoil` is what the gradient of `down.weight` is multiplied by."""

    spoil = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        # The forward value is the same; only the weight's own gradient is spoilt.
        weight = _spoilt(self.down.weight, self.spoil)
        return x + nn.functional.linear(hidden, weight, self.down.bias)


def _spoilt(weight: Tensor, factor: float) -> Tensor:
    alias = weight.view_as(weight)
    if factor != 1.0:
        alias.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
    return alias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def checked(net: Net, **options: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    assert isinstance(net, FSDPModule)
    net.set_check_finite_gradients()
    return net


def batch(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def train(net: Net) -> None:
    net(batch(dist.get_rank())).square().mean().backward()


def spoil(net: Net, block: int, rank: int, factor: float = float("nan")) -> None:
    if dist.get_rank() == rank:
        found = net.blocks[block]
        assert isinstance(found, Block)
        found.spoil = factor


def found_in(body: Callable[[], None]) -> tuple[str, tuple[int, ...], int, str] | None:
    try:
        body()
    except NonFiniteGradient as error:
        return error.parameter, error.ranks, error.step, str(error)
    return None


def train_until_spoilt(factor: float) -> Any:
    net = checked(Net())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        train(net)
        optimizer.step()
    spoil(net, 1, rank=1, factor=factor)
    return found_in(lambda: train(net))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
def test_parameter_rank_and_step_are_named_on_every_rank(
    run_on_ranks: RunOnRanks, factor: float
) -> None:
    found = run_on_ranks(train_until_spoilt, 3, factor, timeout_s=LIMIT_S)

    parameter, ranks, step, message = found[0]
    assert (parameter, ranks, step) == ("blocks.1.down.weight", (1,), 2)
    assert message.startswith(
        "The gradient of blocks.1.down.weight is not finite on rank 1, after 2 optimizer steps. "
    )
    assert found == [found[0]] * 3


def spoil_two() -> Any:
    tracing.set_step(17)
    net = checked(Net())
    spoil(net, 0, rank=0)
    spoil(net, 2, rank=1)
    return found_in(lambda: train(net))


def test_the_first_in_the_order_of_backward_is_named_and_the_step_of_the_seam(
    run_on_ranks: RunOnRanks,
) -> None:
    for parameter, ranks, step, message in run_on_ranks(spoil_two, 2, timeout_s=LIMIT_S):
        assert (parameter, ranks, step) == ("blocks.2.down.weight", (1,), 17)
        assert "on rank 1, in step 17 (first blocks.0.down.weight on rank 0)." in message


def retry() -> Any:
    torch.manual_seed(0)
    reference = Net()
    net = checked(copy.deepcopy(reference))
    spoil(net, 1, rank=0)
    first = found_in(lambda: train(net))
    spoil(net, 1, rank=0, factor=1.0)
    net.zero_grad()
    again = found_in(lambda: train(net))
    losses = [reference(batch(rank)).square().mean() for rank in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    for (name, ours), whole in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        # fp32 sums in another order.
        torch.testing.assert_close(ours.grad.full_tensor(), whole.grad, msg=name)
    return first, again


def test_after_it_zero_grad_and_a_retry_give_the_right_gradients(run_on_ranks: RunOnRanks) -> None:
    for first, again in run_on_ranks(retry, 2, timeout_s=LIMIT_S):
        assert first[:2] == ("blocks.1.down.weight", (0,))
        assert again is None


def accumulate() -> Any:
    net = checked(Net())
    assert isinstance(net, FSDPModule)
    net.set_requires_gradient_sync(False)
    spoil(net, 2, rank=1)
    kept = found_in(lambda: train(net))
    spoil(net, 2, rank=1, factor=1.0)
    net.set_requires_gradient_sync(True)
    return kept, found_in(lambda: train(net))


def test_gradients_kept_without_communication_are_looked_at_when_they_are_reduced(
    run_on_ranks: RunOnRanks,
) -> None:
    for kept, reduced in run_on_ranks(accumulate, 2, timeout_s=LIMIT_S):
        assert kept is None
        assert reduced[:2] == ("blocks.2.down.weight", (1,))


def train_copies() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_mesh({"copies": 2, "shards": 2})
    net = checked(Net(), mesh=mesh, mp_policy=policy)
    fine = found_in(lambda: train(net))
    spoil(net, 0, rank=2)
    return fine, found_in(lambda: train(net))


def test_ranks_of_other_copies_are_named_too_with_mixed_precision(
    run_on_ranks: RunOnRanks,
) -> None:
    for fine, found in run_on_ranks(train_copies, 4, timeout_s=LIMIT_S):
        assert fine is None
        assert found[:2] == ("blocks.0.down.weight", (2,))


class Mlp(nn.Module):
    """Its `spoils` says whether this rank's part of the gradient of `up.weight` becomes NaN."""

    spoils = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.spoils:
            self.up.weight.register_hook(lambda grad: grad * float("nan"))  # type: ignore[no-untyped-call]
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


def train_tensor_parallel() -> Any:
    mesh = init_mesh({"dp": 2, "tp": 2})
    model = nn.Sequential(Mlp(), Mlp())
    for mlp in model:
        parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(mlp, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert isinstance(model, FSDPModule)
    model.set_check_finite_gradients()
    x = batch(mesh.get_local_rank("dp"))
    fine = found_in(lambda: model(x).square().mean().backward())
    first = model[0]
    assert isinstance(first, Mlp)
    first.spoils = dist.get_rank() == 3
    return fine, found_in(lambda: model(x).square().mean().backward())


def test_ranks_of_other_tensor_parallel_parts_are_told_too(run_on_ranks: RunOnRanks) -> None:
    for fine, found in run_on_ranks(train_tensor_parallel, 4, timeout_s=LIMIT_S):
        assert fine is None
        assert found[:2] == ("0.up.weight", (3,))


def train_unchecked() -> Any:
    net = checked(Net())
    assert isinstance(net, FSDPModule)
    net.set_check_finite_gradients(False)
    spoil(net, 1, rank=0)
    return found_in(lambda: train(net))


def test_it_can_be_turned_off_again(run_on_ranks: RunOnRanks) -> None:
    assert run_on_ranks(train_unchecked, 2, timeout_s=LIMIT_S) == [None, None]


def train_alone() -> Any:
    net = checked(Net())
    spoil(net, 1, rank=0)
    return found_in(lambda: train(net))


def test_a_rank_on_its_own_is_told_too(run_on_ranks: RunOnRanks) -> None:
    [(parameter, ranks, _, _)] = run_on_ranks(train_alone, 1, timeout_s=LIMIT_S)

    assert (parameter, ranks) == ("blocks.1.down.weight", (0,))
