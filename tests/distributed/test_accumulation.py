"""Gradients that wait for a later backward to reduce them, and what may happen meanwhile.

They wait whole (no gradient sync) or summed over one copy's ranks (no all-reduce). As in
test_fully_shard.py each value is checked against a whole model that goes through the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.test_fully_shard import (
    FP32,
    Net,
    assert_same_gradients,
    backward,
    batches,
    loss_of,
    mean_backward,
    own,
)
from trine.distributed import init_mesh
from trine.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

RunOnRanks = Callable[..., list[Any]]


class Skipping(Net):
    """Leaves out some of its blocks."""

    skipped: tuple[int, ...] = ()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        logits: Tensor = self.head(x * self.scale)
        return logits


MESHES = {"whole": {"fsdp": 2}, "sums": {"ddp": 2, "fsdp": 2}}
WAITING = pytest.mark.parametrize(("waiting", "world_size"), [("whole", 2), ("sums", 4)])


def waiting_pair(
    waiting: str, reference_class: type[Net] = Skipping, **options: Any
) -> tuple[Any, Net, Callable[[bool], None]]:
    """A sharded model, the same whole, and how to choose whether gradients are reduced at once.

    If not, they wait `whole` on each rank, or as `sums` over the ranks of one copy.
    """
    torch.manual_seed(0)
    reference = reference_class()
    model = copy.deepcopy(reference)
    mesh = init_mesh(MESHES[waiting])
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    assert isinstance(model, FSDPModule)
    if waiting == "whole":
        return model, reference, model.set_requires_gradient_sync
    return model, reference, model.set_requires_all_reduce


def micro_batch(model: nn.Module, reference: nn.Module, number: int) -> None:
    backward(loss_of(model, own(batches(number))))
    mean_backward(reference, batches(number))


def train(models: Sequence[nn.Module], name: str, wanted: bool) -> None:
    for model in models:
        model.get_parameter(name).requires_grad_(wanted)


# --- changes in between ----------------------------------------------------------------


def freeze_one_and_unfreeze_another(model: nn.Module) -> None:
    model.get_parameter("blocks.0.up.weight").requires_grad_(False)
    model.get_parameter("blocks.1.up.weight").requires_grad_(True)


def freeze_all_but_the_head(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("head"))


def cast(model: nn.Module) -> None:
    model.double()


def cast_and_skip_units(model: nn.Module) -> None:
    cast(model)
    assert isinstance(model, Skipping)
    model.skipped = (1, 2)


def exchange(model: nn.Module) -> None:
    if isinstance(model, FSDPModule):  # a plain model would begin anew
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(saved, assign=True)


def exchange_and_skip_units(model: nn.Module) -> None:
    exchange(model)
    assert isinstance(model, Skipping)
    model.skipped = (1, 2)


def accumulate_around(change: Callable[[nn.Module], None], waiting: str) -> None:
    model, reference, reduce_at_once = waiting_pair(waiting)
    train([model, reference], "blocks.1.up.weight", False)
    reduce_at_once(False)
    micro_batch(model, reference, 0)

    change(model)
    change(reference)
    micro_batch(model, reference, 1)
    reduce_at_once(True)
    micro_batch(model, reference, 2)

    assert_same_gradients(model, reference, 3 * FP32)
    model.zero_grad()
    reference.zero_grad()
    micro_batch(model, reference, 3)
    assert_same_gradients(model, reference)


@WAITING
@pytest.mark.parametrize(
    "change",
    [
        freeze_one_and_unfreeze_another,
        freeze_all_but_the_head,
        cast,
        cast_and_skip_units,
        exchange,
        exchange_and_skip_units,
    ],
)
def test_gradients_that_wait_outlast_what_happens_between_micro_batches(
    run_on_ranks: RunOnRanks,
    change: Callable[[nn.Module], None],
    waiting: str,
    world_size: int,
) -> None:
    run_on_ranks(accumulate_around, world_size, change, waiting)


@WAITING
def test_ranks_that_debug_find_nothing_to_complain_of_in_what_waits(
    run_on_ranks: RunOnRanks, monkeypatch: pytest.MonkeyPatch, waiting: str, world_size: int
) -> None:
    monkeypatch.setenv("TRINE_DEBUG", "1")

    run_on_ranks(accumulate_around, world_size, freeze_one_and_unfreeze_another, waiting)


class Scaling(Net):
    """Uses its scale if told to, and never uses `spare`."""

    scales = True

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        logits: Tensor = self.head(x * self.scale if self.scales else x)
        return logits


def use_on_one_rank_then_freeze(waiting: str) -> None:
    model, reference, reduce_at_once = waiting_pair(waiting, Scaling)
    assert isinstance(reference, Scaling)
    reduce_at_once(False)
    model.scales = dist.get_rank() == 0
    backward(loss_of(model, own(batches(0))))
    for rank, tokens in enumerate(batches(0)):
        reference.scales = rank == 0
        backward(loss_of(reference, tokens) / dist.get_world_size())
    model.scales = reference.scales = True

    train([model, reference], "scale", False)
    train([model, reference], "spare", False)
    reduce_at_once(True)
    micro_batch(model, reference, 1)

    assert_same_gradients(model, reference, 2 * FP32)


@WAITING
def test_ranks_agree_on_what_was_used_where_before_it_was_frozen(
    run_on_ranks: RunOnRanks, waiting: str, world_size: int
) -> None:
    run_on_ranks(use_on_one_rank_then_freeze, world_size, waiting)


def change_while_whole(waiting: str) -> None:
    model, reference, reduce_at_once = waiting_pair(waiting, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    train([model, reference], "blocks.0.up.weight", False)
    reduce_at_once(False)
    micro_batch(model, reference, 0)

    for number, wanted in ((1, True), (2, False)):
        train([model, reference], "blocks.0.up.weight", wanted)
        reduce_at_once(number == 2)
        micro_batch(model, reference, number)

    for module in (model, *model.blocks):
        module.reshard()
    assert_same_gradients(model, reference, 3 * FP32)


@WAITING
def test_whole_parameters_may_be_frozen_and_unfrozen_between_micro_batches(
    run_on_ranks: RunOnRanks, waiting: str, world_size: int
) -> None:
    run_on_ranks(change_while_whole, world_size, waiting)


def gradients_in_half_types(between: Callable[[nn.Module], None] | None) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _, reduce_at_once = waiting_pair("whole", mp_policy=policy)
    for number in range(3):
        reduce_at_once(number == 2)
        backward(loss_of(model, own(batches(number))))
        if between is not None and number < 2:
            between(model)
    return [param.grad.full_tensor() for param in model.parameters()]


def exchange_in_half_types() -> None:
    expected = gradients_in_half_types(None)

    found = gradients_in_half_types(exchange)

    # What waits in fp32 goes on in fp32: not a bit is lost.
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradients_that_wait_in_reduce_dtype_lose_nothing_when_parameters_are_exchanged(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(exchange_in_half_types, 2)


# --- what shall not be reduced ---------------------------------------------------------


def freeze_between_forward_and_backward(waiting: str, at_once: bool) -> None:
    model, reference, reduce_at_once = waiting_pair(waiting)
    reduce_at_once(at_once)
    loss = loss_of(model, own(batches(0)))
    expected = torch.stack([loss_of(reference, tokens) for tokens in batches(0)]).mean()

    train([model, reference], "blocks.0.up.weight", False)
    backward(loss)
    backward(expected)
    train([model, reference], "blocks.0.up.weight", True)
    reduce_at_once(True)
    micro_batch(model, reference, 1)

    assert_same_gradients(model, reference, 2 * FP32)


@WAITING
@pytest.mark.parametrize("at_once", [True, False])
def test_a_gradient_that_a_frozen_parameter_did_not_want_does_not_turn_up_later(
    run_on_ranks: RunOnRanks, waiting: str, world_size: int, at_once: bool
) -> None:
    run_on_ranks(freeze_between_forward_and_backward, world_size, waiting, at_once)


def drop_what_waits(waiting: str, how: str) -> None:
    model, reference, reduce_at_once = waiting_pair(waiting)
    if how == "under way":
        model.set_is_last_backward(False)
    else:
        reduce_at_once(False)
    backward(loss_of(model, own(batches(0))))
    if how == "after an exception":
        reduce_at_once(True)
        with pytest.raises(IndexError):
            model(torch.full((4, 6), 11))  # the embedding has 11 rows

    model.zero_grad()
    model.set_is_last_backward(True)
    reduce_at_once(True)
    micro_batch(model, reference, 1)

    assert_same_gradients(model, reference)


@WAITING
@pytest.mark.parametrize("how", ["plainly", "after an exception", "under way"])
def test_zero_grad_of_the_model_forgets_what_waits(
    run_on_ranks: RunOnRanks, waiting: str, world_size: int, how: str
) -> None:
    run_on_ranks(drop_what_waits, world_size, waiting, how)


# --- a reduction under way -------------------------------------------------------------


def cast_while_reducing(waiting: str) -> None:
    model, reference, _ = waiting_pair(waiting)
    micro_batch(model, reference, 0)  # leaves small gradient buffers for the next step
    model.zero_grad()
    reference.zero_grad()
    model.set_is_last_backward(False)
    micro_batch(model, reference, 0)

    cast(model)
    cast(reference)
    model.set_is_last_backward(True)
    micro_batch(model, reference, 1)

    assert_same_gradients(model, reference, 2 * FP32)


@WAITING
def test_a_model_may_be_cast_while_its_gradients_are_under_way(
    run_on_ranks: RunOnRanks, waiting: str, world_size: int
) -> None:
    run_on_ranks(cast_while_reducing, world_size, waiting)


# --- which were used anywhere, in half types -------------------------------------------


def divide_far(waiting: str, factor: float) -> list[str]:
    """Names of the parameters without a gradient, though rank 0 alone has used the scale."""
    model, _, _ = waiting_pair(waiting, Scaling)
    model.half().set_gradient_divide_factor(factor)
    model.scales = dist.get_rank() == 0

    backward(model(own(batches())).float().square().sum() * 2.0**10)

    return [name for name, param in model.named_parameters() if param.grad is None]


# 2.0**-24 is the smallest number of fp16. Its greatest is below 2.0**16.
@WAITING
@pytest.mark.parametrize("factor", [2.0**26, 2.0**36])
def test_ranks_agree_on_what_was_used_however_far_gradients_are_scaled(
    run_on_ranks: RunOnRanks, waiting: str, world_size: int, factor: float
) -> None:
    unused = run_on_ranks(divide_far, world_size, waiting, factor)

    blocks = [f"blocks.{n}.{layer}" for n in range(3) for layer in ("up", "down")]
    expected = ["spare", *(f"{layer}.{kind}" for layer in blocks for kind in ("weight", "bias"))]
    assert [sorted(names) for names in unused] == [sorted(expected)] * world_size
