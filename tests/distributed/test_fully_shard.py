"""Sharded models train as if they were not: every value is checked against a whole model.

Bodies run on every rank. Each rank has its own batch; the reference model, whole on every
rank, takes the mean of the losses of all ranks' batches.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trine.distributed._fsdp import collectives
from trine.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from trine.distributed.testing import RanksFailed

RunOnRanks = Callable[..., list[Any]]

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])

# fp32: gradients of order 0.1 to 1, sums of a few dozen terms in another order.
FP32 = 1e-6
# bf16 has 8 bits of mantissa: 2**-8 relative to values of order 1.
BF16 = 2e-2


class Block(nn.Module):
    """5 hidden rows: uneven over 2 and 3 ranks."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    """Rows of 11, 7, 5 and 1: uneven, and fewer than ranks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(7, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x * self.scale)
        return logits


def net_and_reference() -> tuple[Net, Net]:
    torch.manual_seed(0)
    reference = Net()
    return copy.deepcopy(reference), reference


def sharded(net: Net, **options: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def batches(step: int = 0) -> list[Tensor]:
    """One batch for each rank."""
    return [
        torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))
        for rank in range(dist.get_world_size())
    ]


def own(per_rank: list[Tensor]) -> Tensor:
    return per_rank[dist.get_rank()]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())


def mean_backward(reference: nn.Module, per_rank: list[Tensor]) -> list[float]:
    """Gradients of the mean loss over ranks; the losses of each rank."""
    losses = [loss_of(reference, tokens) for tokens in per_rank]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch's own
    return [loss.item() for loss in losses]


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(model: nn.Module, reference: nn.Module, tolerance: float = FP32) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert (param.grad is None) == (expected[name].grad is None), f"{name}.grad"
        if param.grad is not None:
            torch.testing.assert_close(
                whole(param.grad),
                expected[name].grad,
                rtol=tolerance,
                atol=tolerance,
                msg=f"gradient of {name}: {whole(param.grad)}, expected {expected[name].grad}",
            )


def compare_steps(
    model: nn.Module, reference: nn.Module, steps: int, *, lr: float | None = None
) -> None:
    """Both compute, on a batch of each step, and take a step of SGD if `lr` says how far."""
    for step in range(steps):
        model.zero_grad()
        reference.zero_grad()
        backward(loss_of(model, own(batches(step))))
        mean_backward(reference, batches(step))
        assert_same_gradients(model, reference)
        if lr is not None:
            torch.optim.SGD(model.parameters(), lr).step()
            torch.optim.SGD(reference.parameters(), lr).step()


def assert_same_values(model: nn.Module, reference: nn.Module, tolerance: float = FP32) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            whole(param.detach()), expected[name].detach(), rtol=tolerance, atol=tolerance
        )


# --- training --------------------------------------------------------------------------


def train_ten_steps() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(10):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()

        loss = loss_of(model, own(batches(step)))
        backward(loss)
        losses = mean_backward(reference, batches(step))

        assert loss.item() == pytest.approx(losses[dist.get_rank()], abs=FP32)
        assert_same_gradients(model, reference)
        optimizer.step()
        reference_optimizer.step()
    # AdamW divides by the root of small second moments, which enlarges rounding.
    assert_same_values(model, reference, 1e-5)


@WORLD_SIZES
def test_ten_adamw_steps_equal_those_of_the_whole_model(
    run_on_ranks: RunOnRanks, world_size: int
) -> None:
    run_on_ranks(train_ten_steps, world_size)


def train_with_all_taken_for_large() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "LARGE_NBYTES", 1)
        train_ten_steps()


def test_large_groups_on_gloo_train_like_small_ones(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(train_with_all_taken_for_large, 3)


def shard_shapes() -> dict[str, tuple[int, ...]]:
    model = sharded(net_and_reference()[0])
    shapes = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        shapes[name] = tuple(param.to_local().shape)
    return shapes


def test_rows_are_cut_like_torch_chunk_and_may_be_none(run_on_ranks: RunOnRanks) -> None:
    first, second, third = run_on_ranks(shard_shapes, 3)

    assert [s["head.weight"] for s in (first, second, third)] == [(4, 7), (4, 7), (3, 7)]
    assert [s["blocks.0.up.weight"] for s in (first, second, third)] == [(2, 7), (2, 7), (1, 7)]
    assert [s["scale"] for s in (first, second, third)] == [(1,), (0,), (0,)]


def make_the_optimizer_too_early(when: str) -> None:
    net, reference = net_and_reference()
    if when == "before sharding":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = sharded(net)
    if when == "while whole":
        assert isinstance(model, FSDPModule)
        model.unshard()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.reshard()
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        model.zero_grad()
        reference_optimizer.zero_grad()
        backward(loss_of(model, own(batches(step))))
        mean_backward(reference, batches(step))
        if step == 0:
            with pytest.warns(UserWarning, match=r"AdamW was made with whole .* after fully_shard"):
                optimizer.step()
        else:
            optimizer.step()
        reference_optimizer.step()
    assert_same_values(model, reference, 1e-5)


@pytest.mark.parametrize("when", ["before sharding", "while whole"])
def test_an_optimizer_made_with_whole_parameters_trains_the_sharded_ones_and_warns(
    run_on_ranks: RunOnRanks, when: str
) -> None:
    run_on_ranks(make_the_optimizer_too_early, 2, when)


def keep_old_optimizer_state() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()

    with pytest.warns(UserWarning, match=r"holds state for whole .*weight, bias"):
        optimizer.step()


def test_an_optimizer_with_state_for_whole_parameters_is_told_to_be_made_anew(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(keep_old_optimizer_state, 1)


# --- accumulation ----------------------------------------------------------------------


def accumulate(sync: bool, param_dtype: torch.dtype | None, tolerance: float) -> None:
    net, reference = net_and_reference()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = sharded(net, mp_policy=policy)
    for round_ in range(2):  # the second finds the buffers of the first
        model.zero_grad()
        reference.zero_grad()
        for micro in range(3):
            if not sync:
                assert isinstance(model, FSDPModule)
                model.set_requires_gradient_sync(micro == 2)
            backward(loss_of(model, own(batches(10 * round_ + micro))))
            mean_backward(reference, batches(10 * round_ + micro))
            if not sync and micro < 2:
                assert all(param.grad is None for param in model.parameters())
        assert_same_gradients(model, reference, tolerance)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    ("param_dtype", "tolerance"), [(None, 3 * FP32), (torch.bfloat16, 3 * BF16)]
)
def test_accumulated_gradients_are_those_of_all_micro_batches(
    run_on_ranks: RunOnRanks, sync: bool, param_dtype: torch.dtype | None, tolerance: float
) -> None:
    run_on_ranks(accumulate, 2, sync, param_dtype, tolerance)


def keep_a_gradient() -> None:
    model = sharded(net_and_reference()[0])
    backward(loss_of(model, own(batches(0))))
    kept = model.head.weight.grad
    local = model.head.bias.grad.to_local()  # type: ignore[union-attr]  # a DTensor
    assert kept is not None
    before, before_local = whole(kept.clone()), local.clone()

    with torch.no_grad():
        inner = model.embedding.weight.grad.to_local()  # type: ignore[union-attr]  # no view
    before_inner = inner.clone()

    model.zero_grad()
    backward(loss_of(model, own(batches(1))))

    torch.testing.assert_close(inner, before_inner, rtol=0, atol=0)
    torch.testing.assert_close(whole(kept), before, rtol=0, atol=0)
    torch.testing.assert_close(local, before_local, rtol=0, atol=0)
    assert not torch.equal(whole(model.head.weight.grad), before)  # type: ignore[arg-type]


def test_a_gradient_that_the_user_keeps_is_not_overwritten(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(keep_a_gradient, 2)


def zero_in_place() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    for step in range(3):
        model.zero_grad(set_to_none=False)
        reference.zero_grad(set_to_none=False)
        backward(loss_of(model, own(batches(step))))
        mean_backward(reference, batches(step))
        assert_same_gradients(model, reference)


def test_gradients_zeroed_in_place_are_added_to(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(zero_in_place, 2)


def zero_between_forward_and_backward(set_to_none: bool) -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    for step in range(2):
        loss = loss_of(model, own(batches(step)))  # leaves the root's parameters whole
        model.zero_grad(set_to_none)
        reference.zero_grad(set_to_none)
        backward(loss)
        mean_backward(reference, batches(step))
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_reaches_parameters_that_are_whole_at_the_moment(
    run_on_ranks: RunOnRanks, set_to_none: bool
) -> None:
    run_on_ranks(zero_between_forward_and_backward, 2, set_to_none)


# --- mixed precision -------------------------------------------------------------------


class Named(NamedTuple):
    x: Tensor
    indices: Tensor


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, named: Named, *, more: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        self.seen = [
            named.x.dtype,
            named.indices.dtype,
            more["deep"][0].dtype,
            self.linear.weight.dtype,
        ]
        return {"out": self.linear(named.x) + self.linear(more["deep"][0])}


def cast_inputs() -> None:
    model = fully_shard(
        Nested(),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64),
    )
    named, deep = Named(torch.ones(2, 4), torch.arange(2)), [torch.ones(2, 4)]

    out = model(named, more={"deep": deep})

    assert model.seen == [torch.bfloat16, torch.int64, torch.bfloat16, torch.bfloat16]
    assert (named.x.dtype, deep[0].dtype) == (torch.float32, torch.float32)
    assert out["out"].dtype is torch.float64


def test_inputs_in_any_container_are_cast_and_the_callers_are_not_changed(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(cast_inputs, 2)


def train_in_bf16(reduce_dtype: torch.dtype | None) -> None:
    net, reference = net_and_reference()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = sharded(net, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        backward(loss_of(model, own(batches(step))))
        mean_backward(reference, batches(step))
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
        assert_same_gradients(model, reference, BF16)
        optimizer.step()
        reference_optimizer.step()


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_bf16_training_stays_within_bf16_of_the_whole_model(
    run_on_ranks: RunOnRanks, reduce_dtype: torch.dtype | None
) -> None:
    run_on_ranks(train_in_bf16, 3, reduce_dtype)


def two_dtypes() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3).double())
    model = copy.deepcopy(reference)

    class Convert(nn.Module):
        def __init__(self, inner: nn.Sequential) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner[1](self.inner[0](x).double())
            return out

    sharded_model, whole_model = fully_shard(Convert(model)), Convert(reference)
    xs = [torch.full((2, 4), float(rank + 1)) for rank in range(dist.get_world_size())]
    backward(sharded_model(own(xs)).square().sum())
    backward(torch.stack([whole_model(x).square().sum() for x in xs]).mean())
    # The fp32 gradients reach 1e3, where one unit in the last place is 6e-5.
    assert_same_gradients(sharded_model, whole_model, 1e-5)


def test_parameters_of_two_dtypes_in_one_module_keep_theirs(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(two_dtypes, 2)


# --- which parameters ------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.middle = Block()
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embedding(tokens)))
        return logits


def train_tied() -> None:
    torch.manual_seed(0)
    reference = Tied()
    model = copy.deepcopy(reference)
    fully_shard(model.middle)
    fully_shard(model)
    compare_steps(model, reference, 3, lr=0.1)
    assert model.head.weight is model.embedding.weight
    assert_same_values(model, reference)


def test_a_parameter_tied_inside_one_group_trains_as_one(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(train_tied, 3)


class Choosy(nn.Module):
    """Uses `early` on rank 0 only, `always` everywhere and `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.early, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, use_early: bool) -> Tensor:
        out: Tensor = self.always(self.early(x) if use_early else x)
        return out


def use_different_parameters() -> None:
    torch.manual_seed(0)
    reference = Choosy()
    model = fully_shard(copy.deepcopy(reference))
    xs = [torch.full((2, 3), rank + 1.0) for rank in range(dist.get_world_size())]

    backward(model(own(xs), dist.get_rank() == 0).sum())
    backward(torch.stack([reference(x, rank == 0).sum() for rank, x in enumerate(xs)]).mean())

    assert model.never.weight.grad is None
    assert_same_gradients(model, reference, 1e-5)  # gradients of order 10


@WORLD_SIZES
def test_ranks_that_use_different_parameters_agree_and_unused_ones_get_no_gradient(
    run_on_ranks: RunOnRanks, world_size: int
) -> None:
    run_on_ranks(use_different_parameters, world_size)


def freeze_and_unfreeze() -> None:
    net, reference = net_and_reference()
    for each in (net, reference):
        each.requires_grad_(False)
        each.blocks[1].requires_grad_(True)
    model = sharded(net)
    for unfrozen in (False, True):
        if unfrozen:
            model.requires_grad_(True)
            reference.requires_grad_(True)
        model.zero_grad()
        reference.zero_grad()
        backward(loss_of(model, own(batches())))
        mean_backward(reference, batches())
        assert_same_gradients(model, reference)


def test_frozen_parameters_get_no_gradient_until_they_are_unfrozen(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(freeze_and_unfreeze, 2)


def unfreeze_while_whole() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    for each in (model, reference):
        each.head.requires_grad_(False)
        loss_of(each, own(batches()))  # leaves the root's parameters whole
        each.head.requires_grad_(True)
        each.embedding.requires_grad_(False)
    backward(loss_of(model, own(batches())))
    mean_backward(reference, batches())
    assert_same_gradients(model, reference)
    assert not model.embedding.weight.requires_grad


def test_freezing_and_unfreezing_work_while_parameters_are_whole(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(unfreeze_while_whole, 2)


# --- forward and backward in unusual order ---------------------------------------------


class Checkpointed(Net):
    """Recomputes each block in backward: around the sharded block, or inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x * self.scale)
        return logits


class CheckpointedInside(nn.Module):
    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return out


def train_checkpointed(reentrant: bool, inside: bool) -> None:
    _, reference = net_and_reference()
    torch.manual_seed(0)
    net = Net() if inside else Checkpointed(reentrant)
    if inside:
        for index, block in enumerate(net.blocks):
            net.blocks[index] = CheckpointedInside(block, reentrant)
    model = sharded(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        backward(loss_of(model, own(batches(step))))
        mean_backward(reference, batches(step))
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=FP32, atol=FP32)
        optimizer.step()
        reference_optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_activation_checkpointing_changes_no_gradient(
    run_on_ranks: RunOnRanks, reentrant: bool, inside: bool
) -> None:
    run_on_ranks(train_checkpointed, 2, reentrant, inside)


def two_forwards_one_backward() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        first, second = batches(2 * step), batches(2 * step + 1)
        backward(loss_of(model, own(first)) + loss_of(model, own(second)))
        mean_backward(reference, first)
        mean_backward(reference, second)
        assert_same_gradients(model, reference, 2 * FP32)


def test_two_forwards_before_one_backward_give_the_sum(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(two_forwards_one_backward, 2)


def backward_twice() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    loss = loss_of(model, own(batches()))
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch's own
    backward(loss)
    mean_backward(reference, batches())
    mean_backward(reference, batches())
    assert_same_gradients(model, reference, 2 * FP32)


def test_two_backwards_through_one_graph_give_twice_the_gradient(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(backward_twice, 2)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 7), Block(), nn.Linear(7, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.block(self.embedding(tokens))))
        return logits


def reuse_a_module() -> None:
    torch.manual_seed(0)
    reference = Reused()
    model = copy.deepcopy(reference)
    fully_shard(model.block)
    fully_shard(model)
    compare_steps(model, reference, 2)


def test_a_module_used_twice_in_one_forward_gets_both_gradients(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(reuse_a_module, 2)


class Memory(nn.Module):
    """One encoder output feeds every decoder layer, each with two inputs that need gradients."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Bilinear(7, 7, 7)

        def forward(self, x: Tensor, *, memory: dict[str, Tensor]) -> Tensor:
            out: Tensor = x + self.mix(x, memory["encoded"])
            return out

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 7), nn.Linear(7, 11)
        self.encoder = Block()
        self.layers = nn.ModuleList(Memory.Layer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        memory = {"encoded": self.encoder(x)}
        for layer in self.layers:
            x = layer(x, memory=memory)
        logits: Tensor = self.head(x)
        return logits


def share_an_input() -> None:
    torch.manual_seed(0)
    reference = Memory()
    model = copy.deepcopy(reference)
    for part in (model.encoder, *model.layers):
        fully_shard(part)
    fully_shard(model)
    compare_steps(model, reference, 2)


def test_modules_that_share_an_input_reduce_the_right_gradients(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(share_an_input, 2)


def use_a_part_alone() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    x = torch.full((2, 7), 0.5)

    def part(each: Net) -> None:
        backward(each.blocks[0](x).square().mean())

    for before in (True, False):
        model.zero_grad()
        reference.zero_grad()
        if before:
            part(model)
            part(reference)
        backward(loss_of(model, own(batches())))
        mean_backward(reference, batches())
        if not before:
            part(model)
            part(reference)
        assert_same_gradients(model, reference, 2 * FP32)


def test_a_part_may_be_used_on_its_own_before_and_after_the_root(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(use_a_part_alone, 2)


def evaluate_between(reshard_after_forward: bool | None) -> None:
    net, reference = net_and_reference()
    model = sharded(net, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    backward(loss_of(model, own(batches())))
    mean_backward(reference, batches())
    with torch.no_grad():
        model(own(batches()))  # leaves parameters gathered, if anything does
    optimizer.step()
    reference_optimizer.step()

    with torch.no_grad():
        out, expected = model(own(batches())), reference(own(batches()))

    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reshard_after_forward", [None, False, True])
def test_forward_sees_a_step_that_was_made_while_parameters_were_whole(
    run_on_ranks: RunOnRanks, reshard_after_forward: bool | None
) -> None:
    run_on_ranks(evaluate_between, 2, reshard_after_forward)


def infer_then_train() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    with torch.inference_mode():
        model(own(batches()))
    backward(loss_of(model, own(batches())))
    mean_backward(reference, batches())
    assert_same_gradients(model, reference)


def test_a_model_first_used_in_inference_mode_trains(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(infer_then_train, 2)


class Opaque:
    """Tensors inside it cannot be found."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hides(Block):
    def forward(self, x: Tensor) -> Opaque:  # type: ignore[override]  # that is the point
        return Opaque(super().forward(x))


class Finds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 7), Hides(), nn.Linear(7, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embedding(tokens)).value)
        return logits


def hide_outputs() -> None:
    torch.manual_seed(0)
    reference = Finds()
    model = copy.deepcopy(reference)
    fully_shard(model.block)
    fully_shard(model)
    compare_steps(model, reference, 2)


def test_outputs_in_which_no_tensor_can_be_found_train_all_the_same(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(hide_outputs, 2)


def differentiate_forward() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model = copy.deepcopy(reference)
    fully_shard(model[0])
    fully_shard(model)

    def both(each: nn.Module, x: Tensor) -> Tensor:
        results = torch.func.jvp(each, (x,), (x.flip(0),))  # the output and its tangent
        loss: Tensor = results[0].square().mean() + results[1].square().mean()
        return loss

    xs = [torch.full((3, 4), 0.1 * (rank + 1)) for rank in range(dist.get_world_size())]
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        backward(both(model, own(xs)))
        backward(torch.stack([both(reference, x) for x in xs]).mean())
        assert_same_gradients(model, reference)


def test_losses_on_forward_mode_derivatives_give_the_right_gradients(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(differentiate_forward, 2)


class ReturnsNothing(Block):
    def forward(self, x: Tensor, out: list[Tensor]) -> None:  # type: ignore[override]
        out.append(super().forward(x))


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(11, 7), ReturnsNothing()
        self.head = nn.Linear(7, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        collected: list[Tensor] = []
        self.block(self.embedding(tokens), collected)
        logits: Tensor = self.head(collected[0])
        return logits


class Context(dict[str, Tensor]):
    pass


class WritesIntoInputs(nn.Module):
    """A block that leaves results in the containers that it was given."""

    class Inner(Block):
        def forward(self, context: Context) -> Tensor:  # type: ignore[override]
            out = super().forward(context["x"])
            context["extra"] = context["extra"] + out.square()
            return out

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 7), nn.Linear(7, 11)
        self.inner = WritesIntoInputs.Inner()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        context = Context(x=x, extra=torch.zeros_like(x))
        logits: Tensor = self.head(self.inner(context) + context["extra"])
        return logits


class ChangesOutputs(nn.Module):
    """Outputs of sharded modules, which are views here, are written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 7), nn.Linear(7, 11)
        self.middle = nn.Linear(7, 7)  # of 3-D inputs a Linear makes a view of a 2-D result

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.relu_(self.middle(self.embedding(tokens)).mul_(3.0))
        logits: Tensor = self.head(x)
        return logits


def train_unusual(make: Callable[[], nn.Module], unit: str) -> None:
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    fully_shard(model.get_submodule(unit))
    fully_shard(model)
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        for each, per_rank in ((model, [own(batches(step))]), (reference, batches(step))):
            losses = []
            for tokens in per_rank:
                logits = each(tokens)
                logits.div_(2.0)  # the root's output too
                losses.append(
                    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())
                )
            backward(torch.stack(losses).mean())
        assert_same_gradients(model, reference)


@pytest.mark.parametrize(
    ("make", "unit"),
    [(Collects, "block"), (WritesIntoInputs, "inner"), (ChangesOutputs, "middle")],
)
def test_results_that_leave_a_module_by_other_ways_keep_their_gradients(
    run_on_ranks: RunOnRanks, make: Callable[[], nn.Module], unit: str
) -> None:
    run_on_ranks(train_unusual, 2, make, unit)


def _hook(param: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    param.register_hook(function)  # type: ignore[no-untyped-call]  # torch's own


def _hook_after(param: Tensor, function: Callable[[Tensor], None]) -> None:
    param.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]


def hook_gradients() -> None:
    net, reference = net_and_reference()
    _hook(net.head.weight, lambda grad: grad * 3)
    called: list[str] = []
    _hook_after(net.scale, lambda param: called.append("before"))
    model = sharded(net)
    _hook(model.head.bias, lambda grad: grad * 5)
    for param in model.blocks.parameters():
        _hook_after(param, lambda param: called.append("after"))

    backward(loss_of(model, own(batches())))

    mean_backward(reference, batches())
    assert reference.head.weight.grad is not None
    assert reference.head.bias.grad is not None
    reference.head.weight.grad.mul_(3)
    reference.head.bias.grad.mul_(5)
    assert_same_gradients(model, reference, 5 * FP32)
    assert called.count("before") == 1
    assert called.count("after") == len(list(model.blocks.parameters()))


def test_hooks_on_parameters_are_called_with_the_sharded_gradients(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(hook_gradients, 2)


def step_in_backward() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]  # a parameter
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        _hook_after(param, step)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        backward(loss_of(model, own(batches(number))))
        mean_backward(reference, batches(number))
        optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    assert_same_values(model, reference)


def test_optimizers_may_step_in_backward(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(step_in_backward, 2)


def write_by_hand() -> None:
    net, reference = net_and_reference()
    model = sharded(net, reshard_after_forward=False)
    sharded_params = list(model.parameters())
    with torch.no_grad():
        model(own(batches()))  # leaves everything whole
        assert not isinstance(model.head.weight, DTensor)
        for ours, theirs in zip(sharded_params, reference.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            ours.mul_(1.5)
            theirs.mul_(1.5)

        out, expected = model(own(batches())), reference(own(batches()))

    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_forward_sees_what_was_written_by_hand_while_parameters_were_whole(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(write_by_hand, 2)


def write_between_passes() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    sharded_params = list(net.parameters())
    loss = loss_of(model, own(batches()))
    with torch.no_grad():
        for ours, theirs in zip(sharded_params, reference.parameters(), strict=True):
            ours.mul_(1.5)
            theirs.mul_(1.5)

    backward(loss)  # leaves everything whole

    with torch.no_grad():
        out, expected = model(own(batches())), reference(own(batches()))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_forward_sees_what_was_written_by_hand_between_forward_and_backward(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(write_between_passes, 2)


def exchange_between_passes() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    block, reference_block = model.blocks[0], reference.blocks[0]
    other = {name: value * 1.5 for name, value in block.state_dict().items()}
    loss = loss_of(model, own(batches()))
    block.load_state_dict(other, assign=True)
    backward(loss)
    mean_backward(reference, batches())

    with torch.no_grad():
        for param in reference_block.parameters():
            param.mul_(1.5)
        out, expected = model(own(batches())), reference(own(batches()))

    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if not name.startswith("blocks.0."):
            assert isinstance(ours.grad, DTensor), name
            torch.testing.assert_close(
                ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5, msg=name
            )


def test_backward_computes_with_what_forward_did_and_the_next_forward_with_what_was_exchanged(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(exchange_between_passes, 2)


def fail_then_use_another_graph() -> None:
    net, reference = net_and_reference()
    breaks = Breaks()
    breaks.load_state_dict(net.blocks[1].state_dict())
    net.blocks[1] = breaks
    model = sharded(net)
    breaks.where = "backward"
    broken = loss_of(model, own(batches(1)))
    breaks.where = "nowhere"
    good = loss_of(model, own(batches(2)))
    with pytest.raises(MemoryError):
        backward(broken)
    model.zero_grad()

    backward(good)

    mean_backward(reference, batches(2))
    assert_same_gradients(model, reference)


def test_a_graph_made_before_another_ones_backward_raised_gives_its_own_gradients(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(fail_then_use_another_graph, 2)


def save_with_torch() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    backward(loss_of(model, own(batches())))
    file = io.BytesIO()

    torch.save(model.state_dict(), file)
    whole_file = io.BytesIO()
    torch.save({"bias": model.head.bias}, whole_file)

    file.seek(0)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(torch.load(file, weights_only=False))
    assert_same_values(model, reference, 0)
    # 11 numbers over 2 ranks, and the format around them: not the group's whole buffer.
    assert whole_file.getbuffer().nbytes < 4096


def test_sharded_state_can_be_saved_by_torch_one_tensor_at_a_time(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(save_with_torch, 2)


def use_only_a_part() -> None:
    model = sharded(net_and_reference()[0])
    backward(loss_of(model, own(batches())))
    block = model.blocks[0]
    x = torch.ones(1, 7)
    objects = 0
    for number in range(600):
        backward(block(x).sum())
        if number == 299:
            gc.collect()
            objects = len(gc.get_objects())
    gc.collect()
    # Lists of the schedule must not grow with the calls; some objects come and go.
    assert len(gc.get_objects()) < objects + 100
    state = vars(block)["_trine_fsdp_state"]
    assert len(state.schedule._begun) <= 64 * len(state.schedule.units)


def test_using_a_part_over_and_over_keeps_nothing_of_it(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(use_only_a_part, 1)


def train_complex(reduce_dtype: torch.dtype | None) -> None:
    class Rotates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
            self.unused = nn.Parameter(torch.randn(2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.phase).abs().sum()

    torch.manual_seed(0)
    reference = Rotates()
    model = fully_shard(
        copy.deepcopy(reference), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    )
    xs = [torch.full((3, 2), rank + 1.0) for rank in range(dist.get_world_size())]
    backward(model(own(xs)))
    backward(torch.stack([reference(x) for x in xs]).mean())
    assert_same_gradients(model, reference, 1e-5)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_complex_parameters_keep_their_imaginary_parts(
    run_on_ranks: RunOnRanks, reduce_dtype: torch.dtype | None
) -> None:
    run_on_ranks(train_complex, 2, reduce_dtype)


# --- exceptions ------------------------------------------------------------------------


class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError("no room in backward")


class Breaks(Block):
    where = "nowhere"

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise MemoryError("no room in forward")
        out = super().forward(x)
        if self.where == "backward":
            broken: Tensor = Fragile.apply(out)  # type: ignore[no-untyped-call]  # torch's own
            return broken
        return out


def raise_and_retry(where: str, trained_before: bool) -> None:
    net, reference = net_and_reference()
    breaks = Breaks()
    breaks.load_state_dict(net.blocks[1].state_dict())
    net.blocks[1] = breaks
    model = sharded(net)
    if trained_before:
        backward(loss_of(model, own(batches(1))))
    breaks.where = where

    with pytest.raises(MemoryError, match=f"no room in {where}"):
        backward(loss_of(model, own(batches(2))))

    breaks.where = "nowhere"
    model.zero_grad()
    backward(loss_of(model, own(batches())))
    mean_backward(reference, batches())
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("trained_before", [False, True])
def test_after_an_exception_zero_grad_and_a_retry_give_the_right_gradients(
    run_on_ranks: RunOnRanks, where: str, trained_before: bool
) -> None:
    run_on_ranks(raise_and_retry, 2, where, trained_before)


def lose_a_rank() -> None:
    model = sharded(net_and_reference()[0])
    backward(loss_of(model, own(batches())))
    if dist.get_rank() == 1:
        os._exit(7)
    for _ in range(3):  # what was in the sockets already may still arrive
        model(own(batches()))


@pytest.mark.only_gloo(
    "over MPI the job ends as soon as a rank is gone, before the others can raise"
)
def test_a_rank_that_is_gone_is_reported_with_the_unit_that_missed_it(
    run_on_ranks: RunOnRanks,
) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(lose_a_rank, 2)

    message = str(failure.value)
    assert message.startswith("Rank 1 of 2")
    assert re.search(
        r"CommError: all_gather of (\(root\)|blocks\.\d) failed on rank 0 of 2", message
    )


# --- gathered and freed ----------------------------------------------------------------


class Peeking(Block):
    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["seen"] = self.up.weight  # past nn.Module, which would register it
        return super().forward(x)


def free_after_forward() -> None:
    net, _ = net_and_reference()
    peeking = Peeking()
    net.blocks[0] = peeking
    model = sharded(net)

    model(own(batches()))

    seen = peeking.seen
    assert seen.shape == (5, 7)
    assert not isinstance(seen, DTensor)
    assert seen.untyped_storage().nbytes() == 0
    assert isinstance(peeking.up.weight, DTensor)


def test_whole_parameters_are_plain_tensors_whose_memory_is_given_back(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(free_after_forward, 2)


def unshard_by_hand() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.blocks[0], FSDPModule)

    model.unshard()
    handle = model.blocks[0].unshard(async_op=True)
    assert handle is not None
    handle.wait()
    handle.wait()

    torch.testing.assert_close(model.head.weight, reference.head.weight, rtol=0, atol=0)
    shown = dict(model.named_parameters())["blocks.0.up.weight"]
    expected = dict(reference.named_parameters())["blocks.0.up.weight"]
    torch.testing.assert_close(shown, expected, rtol=0, atol=0)
    saved = model.state_dict()
    assert all(isinstance(value, DTensor) for value in saved.values())
    model.unshard()
    model.reshard()
    assert isinstance(model.head.weight, DTensor)
    backward(loss_of(model, own(batches())))
    mean_backward(reference, batches())
    assert_same_gradients(model, reference)


def test_unshard_shows_whole_parameters_and_state_dicts_stay_sharded(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(unshard_by_hand, 2)


def load_and_cast() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    backward(loss_of(model, own(batches())))
    model.zero_grad()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(saved)
    assert_same_values(model, reference, 0)

    model.to(torch.float64)
    reference.to(torch.float64)
    backward(loss_of(model, own(batches())))
    mean_backward(reference, batches())

    assert model.head.weight.grad is not None
    assert model.head.weight.grad.dtype is torch.float64
    # The cast happened after rounding to fp32, so both start from the same doubles.
    assert_same_gradients(model, reference, 1e-14)


def test_a_model_that_was_loaded_and_cast_computes_with_what_it_holds_now(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(load_and_cast, 2)


def start_on_meta() -> None:
    with torch.device("meta"):
        model = Net()
    sharded(model)
    with pytest.raises(
        RuntimeError,
        match=r"meta.*head\.bias, blocks\.0\.up\.weight and 11 more.*to_empty\(device='cpu'\)",
    ):
        model(own(batches()))
    _, reference = net_and_reference()

    model.to_empty(device="cpu")
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            rows = ours.to_local()
            size, rank = -(-theirs.shape[0] // dist.get_world_size()), dist.get_rank()
            rows.copy_(theirs[rank * size : rank * size + rows.shape[0]])
    compare_steps(model, reference, 2, lr=0.1)


def test_a_model_made_on_meta_is_refused_by_name_and_trains_once_it_has_memory(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(start_on_meta, 2)


def collect_the_model() -> None:
    model = sharded(net_and_reference()[0])
    backward(loss_of(model, own(batches())))
    names = {id(param) for param in model.parameters()}

    del model
    gc.collect()

    left = [o for o in gc.get_objects() if isinstance(o, nn.Parameter) and id(o) in names]
    assert left == []


def test_a_model_that_is_dropped_leaves_no_parameters_behind(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(collect_the_model, 1)
