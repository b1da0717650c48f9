"""register_comm_hook: gradients are added up by the user's function, and only by it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.tensor import DTensor

from trine.distributed import fsdp, init_mesh
from trine.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

RunOnRanks = Callable[..., list[Any]]


class Net(nn.Module):
    """Rows that do not divide by the ranks, so that parts are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 7), nn.Linear(7, 3)
        self.spare = nn.Linear(7, 3)  # which not every rank uses

    def forward(self, x: Tensor, spare: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        out: Tensor = self.last(x)
        return out + self.spare(x) if spare else out


def build(package: Any, strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    options.update(
        sharding_strategy=package.ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    net = Net()
    net.first = package.FullyShardedDataParallel(net.first, **options)
    return package.FullyShardedDataParallel(net, **options)


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def whole_grads(model: Any) -> list[Tensor | None]:
    """Gradients by the means of either implementation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with type(model).summon_full_params(model, with_grads=True):
            return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def decompress(state: Any, grad: Tensor) -> None:
    """As torch's, which then records a stream of a GPU and therefore fails on CPUs."""
    grad.data = grad.data.to(state.parameter_type)


def reduce_like_torch() -> None:
    group = dist.group.WORLD
    assert group is not None
    vars(default_hooks)["_decompress"] = decompress
    for strategy, plain in (
        ("FULL_SHARD", default_hooks.reduce_scatter_hook),
        ("SHARD_GRAD_OP", default_hooks.reduce_scatter_hook),
        ("NO_SHARD", default_hooks.allreduce_hook),
    ):
        for hook, kind in (
            (plain, default_hooks.DefaultState),
            (default_hooks.fp16_compress_hook, default_hooks.LowPrecisionState),
            (default_hooks.bf16_compress_hook, default_hooks.LowPrecisionState),
        ):
            ours, theirs = (build(package, strategy) for package in (fsdp, torch_fsdp))
            for model in (ours, theirs):
                model.register_comm_hook(kind(group), hook)
                backward(model(batch()).square().mean())

            # In half types a sum of four depends on its order, which is the backend's choice
            # and differs with where an element lies.
            two = dist.get_world_size() == 2
            rtol = (
                0
                if two
                else {"fp16_compress_hook": 2e-3, "bf16_compress_hook": 2e-2}.get(
                    hook.__name__, 1e-6
                )
            )
            torch.testing.assert_close(
                whole_grads(ours), whole_grads(theirs), rtol=rtol, atol=0 if two else rtol / 10
            )


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_hooks_give_the_gradients_that_they_give_with_torchs_wrapper(
    run_on_ranks: RunOnRanks, ranks: int
) -> None:
    run_on_ranks(reduce_like_torch, ranks)


class Seen:
    """What a hook was called with."""

    def __init__(self) -> None:
        self.calls: list[Tensor] = []


def add_up(seen: Seen, grads: Tensor, output: Tensor | None = None) -> None:
    """Sums, not means."""
    assert grads.dim() == 1
    seen.calls.append(grads.clone())
    if output is None:
        dist.all_reduce(grads)
    else:
        rows = grads.view(dist.get_world_size(), -1).clone()
        dist.all_reduce(rows)
        output.copy_(rows[dist.get_rank()])


def add_up_by_hand() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    reference = Net()
    backward(reference(batch()).square().mean())
    expected = []
    for param in reference.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)
        expected.append(param.grad)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model, seen = build(fsdp, strategy), Seen()
        model.register_comm_hook(seen, add_up)
        params = list(model.parameters())

        backward(model(batch()).square().mean())

        torch.testing.assert_close(whole_grads(model), expected, rtol=1e-6, atol=1e-6)
        # Nothing but gradients, and a hook that quantizes by the largest can rely on it.
        sizes = {grads.numel() for grads in seen.calls}
        assert sizes == {padded(model.first), padded(model)}
        largest = max(float(grads.abs().max()) for grads in seen.calls)
        assert largest == max(own_largest(reference, ranks))

        # Twice as much arrives at once when the first backward keeps its own.
        model.zero_grad()
        seen.calls.clear()
        with model.no_sync():
            backward(model(batch()).square().mean())
        assert not seen.calls
        backward(model(batch()).square().mean())
        twice = [2 * grad for grad in expected]
        torch.testing.assert_close(whole_grads(model), twice, rtol=1e-6, atol=1e-6)

        # A parameter that only the first rank uses has a gradient on all; one that none, none.
        model.zero_grad()
        backward(model(batch(), spare=rank == 0).square().mean())
        assert all(param.grad is not None for param in params)
        model.zero_grad()
        backward(model(batch(), spare=False).square().mean())
        names = [name for name, param in model.named_parameters() if param.grad is None]
        assert names == ["spare.weight", "spare.bias"]

    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    model, seen = build(fsdp, "FULL_SHARD", mixed_precision=half), Seen()
    model.register_comm_hook(seen, add_up)
    backward(model(batch()).square().mean())
    assert {grads.dtype for grads in seen.calls} == {torch.float16}
    assert all(isinstance(p.grad, DTensor) and p.grad.dtype is p.dtype for p in model.parameters())


def own_largest(reference: Net, ranks: int) -> list[float]:
    """The largest gradient on this rank, found without sharding."""
    alone = copy.deepcopy(reference)
    alone.zero_grad()
    backward(alone(batch()).square().mean())
    return [float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None]


def padded(wrapper: FullyShardedDataParallel) -> int:
    """Elements of the parameters of one wrapper, with rows for all ranks."""
    ranks = 1 if wrapper.sharding_strategy is ShardingStrategy.NO_SHARD else dist.get_world_size()
    inner = {id(param) for param in wrapper.first.parameters()} if hasattr(wrapper, "last") else ()
    own = [param for param in wrapper.parameters() if id(param) not in inner]
    return sum(
        -(-p.shape[0] // ranks) * ranks * p[0].numel() for p in map(torch.Tensor.detach, own)
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_hook_sees_gradients_only_and_owns_the_division(
    run_on_ranks: RunOnRanks, ranks: int
) -> None:
    run_on_ranks(add_up_by_hand, ranks)


def refuse() -> None:
    model = build(fsdp, "FULL_SHARD")
    with pytest.raises(TypeError, match="hook must be a function such as"):
        model.register_comm_hook(None, 3)
    model(batch())
    with pytest.raises(RuntimeError, match="called on first, which another wrapper is around"):
        model.first.register_comm_hook(None, add_up)
    model.register_comm_hook(Seen(), add_up)
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        model.register_comm_hook(Seen(), add_up)

    mesh = init_mesh({"replicate": 1, "shard": 2})
    hybrid = build(fsdp, "HYBRID_SHARD", device_mesh=mesh)
    with pytest.raises(ValueError, match="has a hybrid strategy"):
        hybrid.register_comm_hook(None, add_up)


def test_hooks_that_cannot_be_are_refused(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(refuse, 2)
