"""With TRINE_DEBUG=1 ranks that are about to make different collectives are told, all of them.

Every rank catches the error and returns its words. The time limit of the runs is far below
the process group's, so a rank that hangs fails its test.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trine.distributed import init_mesh
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import comm_for
from trine.distributed._fsdp.labels import transfers_for
from trine.distributed._fsdp.transfers import Transfers
from trine.distributed.fsdp import (
    CommError,
    FSDPModule,
    RanksDisagree,
    clip_grad_norm_,
    fully_shard,
)

RunOnRanks = Callable[..., list[Any]]

LIMIT_S = 90.0  # gloo's own is half an hour


@pytest.fixture(autouse=True)
def debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_DEBUG", "1")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, *, kept: int = 3) -> Tensor:
        """Blocks beyond `kept` compute, and what they compute is dropped."""
        for position, block in enumerate(self.blocks):
            computed = x + torch.tanh(block(x))
            if position < kept:
                x = computed
        out: Tensor = self.head(x)
        return out


def sharded(net: Net, **options: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def train(net: Net, **options: int) -> None:
    net.zero_grad()
    net(torch.ones(3, 4), **options).sum().backward()


def said_by(body: Callable[[], None]) -> tuple[str, str]:
    """The class and the words of the error that ends `body`."""
    try:
        body()
    except (RanksDisagree, CommError) as error:
        return type(error).__name__, str(error)
    return "", ""


def odd() -> bool:
    return dist.get_rank() == 1


# --- ranks that agree --------------------------------------------------------------------


def train_as_the_whole(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    reference = Net()
    net = sharded(copy.deepcopy(reference), mesh=init_mesh(axes))
    assert isinstance(net, FSDPModule)
    net.set_check_finite_gradients()
    for _ in range(3):
        train(net)
        train(reference)
        clip_grad_norm_(net.parameters(), 1e6)
    for (name, ours), whole in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        # Equal batches: the mean over ranks is what one has, up to the order of fp32 sums.
        torch.testing.assert_close(ours.grad.full_tensor(), whole.grad, msg=name)


@pytest.mark.parametrize("axes", [{"shards": 2}, {"copies": 2, "shards": 2}])
def test_ranks_that_agree_train_as_without(run_on_ranks: RunOnRanks, axes: dict[str, int]) -> None:
    world_size = 2 * axes.get("copies", 1)

    run_on_ranks(train_as_the_whole, world_size, axes, timeout_s=LIMIT_S)


def test_without_the_variable_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for off in ("", "0"):
        monkeypatch.setenv("TRINE_DEBUG", off)
        assert type(transfers_for(comm_for(None, BufferPool(), "cpu"))) is Transfers
    monkeypatch.setenv("TRINE_DEBUG", "1")
    assert type(transfers_for(comm_for(None, BufferPool(), "cpu"))) is not Transfers


# --- ranks that do not -------------------------------------------------------------------


def leave_out_a_block() -> tuple[str, str]:
    net = sharded(Net())
    return said_by(lambda: train(net, kept=2 if odd() else 3))


def test_a_loss_that_leaves_out_a_block_is_found_at_the_first_collective_that_differs(
    run_on_ranks: RunOnRanks,
) -> None:
    said = run_on_ranks(leave_out_a_block, 3, timeout_s=LIMIT_S)

    kind, message = said[0]
    assert kind == "RanksDisagree"
    # Three ranks: 2 rows of 4, 2 elements of the bias, and a mark for each of the two.
    assert "ranks 0, 2: reduce_scatter of blocks.2 (36 elements of float32)" in message
    assert "rank 1: all_gather of blocks.0 (30 elements of float32)" in message
    assert "look for a branch, a loop or a loss that depends on the rank" in message
    assert said == [said[0]] * 3


def freeze_on_one_rank() -> tuple[str, str]:
    net = sharded(Net())
    train(net)
    net.head.bias.requires_grad_(not odd())
    return said_by(lambda: train(net))


def test_freezing_later_on_one_rank_is_found_by_the_size_of_the_reduction(
    run_on_ranks: RunOnRanks,
) -> None:
    for kind, message in run_on_ranks(freeze_on_one_rank, 2, timeout_s=LIMIT_S):
        assert kind == "RanksDisagree"
        # Two ranks, 5 elements each, and a mark for each of the two parameters.
        assert "rank 0: reduce_scatter of (root) (14 elements of float32)" in message
        assert "rank 1: reduce_scatter of (root) (10 elements of float32)" in message


def clip_on_one_rank() -> tuple[str, str]:
    net = sharded(Net())
    train(net)

    def go_on() -> None:
        if odd():
            clip_grad_norm_(net.parameters(), 1.0)
        train(net)

    return said_by(go_on)


def test_clipping_on_one_rank_only_is_found(run_on_ranks: RunOnRanks) -> None:
    for kind, message in run_on_ranks(clip_on_one_rank, 2, timeout_s=LIMIT_S):
        assert kind == "RanksDisagree"
        assert "rank 1: all_reduce of the gradient norm (1 elements of float32)" in message
        assert "rank 0: all_gather of (root) (10 elements of float32)" in message


def debug_on_one_rank() -> tuple[str, str]:
    os.environ["TRINE_DEBUG"] = "1" if odd() else "0"
    net = sharded(Net())
    return said_by(lambda: train(net))


def test_the_variable_must_be_set_on_all_ranks(run_on_ranks: RunOnRanks) -> None:
    for kind, message in run_on_ranks(debug_on_one_rank, 2, timeout_s=LIMIT_S):
        assert kind == "RanksDisagree"
        assert "TRINE_DEBUG is 0 on rank 0; 1 on rank 1" in message


# --- ranks that do not come --------------------------------------------------------------


def stop_early() -> tuple[str, str]:
    net = sharded(Net())
    train(net)
    os.environ["TRINE_DEBUG_TIMEOUT_S"] = "2"  # not before: ranks may start far apart
    return ("", "") if odd() else said_by(lambda: train(net))


def test_a_rank_that_stops_early_is_named_by_those_that_wait(run_on_ranks: RunOnRanks) -> None:
    (kind, message), stopped = run_on_ranks(stop_early, 2, timeout_s=LIMIT_S)

    assert kind == "CommError"
    assert message.startswith("Rank 1 did not come within 2 s to all_gather of (root)")
    assert re.search(r"rank 1: was last at: reduce_scatter of \S+ .*, 1 meeting before", message)
    assert stopped == ("", "")


def reduce_over_copies_on_some() -> tuple[str, str]:
    net = sharded(Net(), mesh=init_mesh({"copies": 2, "shards": 2}))
    train(net)
    os.environ["TRINE_DEBUG_TIMEOUT_S"] = "5"
    assert isinstance(net, FSDPModule)
    net.set_requires_all_reduce(not odd())

    def go_on() -> None:
        for _ in range(3):
            train(net)

    return said_by(go_on)


def test_ranks_that_wait_for_each_other_in_a_circle_are_all_told(run_on_ranks: RunOnRanks) -> None:
    said = run_on_ranks(reduce_over_copies_on_some, 4, timeout_s=LIMIT_S)

    assert [kind for kind, _ in said] == ["CommError"] * 4
    assert re.match(r"Rank 1 did not come within 5 s to all_reduce of", said[3][1])
    assert re.search(r"rank 1: was last at: \w+ of .*, among ranks 0, 1", said[3][1])


def test_a_time_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_DEBUG_TIMEOUT_S", "soon")

    with pytest.raises(ValueError, match=r"TRINE_DEBUG_TIMEOUT_S='soon': expected a positive num"):
        transfers_for(comm_for(None, BufferPool(), "cpu"))
