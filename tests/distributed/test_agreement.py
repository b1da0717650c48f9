"""Ranks that did not shard the same model alike are told at the first forward, all of them.

Every rank catches the error and returns its words. The time limit of the runs is far below
the process group's, so a rank that hangs fails its test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trine.distributed import testing
from trine.distributed._fsdp import agreement
from trine.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, RanksDisagree, fully_shard

RunOnRanks = Callable[..., list[Any]]

LIMIT_S = 90.0  # gloo's own is half an hour


class Net(nn.Module):
    def __init__(self, width: int = 4, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def sharded(net: Net, **options: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def said_by(model: nn.Module, width: int = 4) -> str:
    """What the first forward is refused with, "" if it is not."""
    try:
        model(torch.ones(2, width))
    except RanksDisagree as error:
        return str(error)
    return ""


def odd() -> bool:
    return dist.get_rank() == 1


# --- what may differ ---------------------------------------------------------------------


def another_shape() -> str:
    width = 5 if odd() else 4
    return said_by(sharded(Net(width)), width)


def more_blocks() -> str:
    return said_by(sharded(Net(blocks=4 if odd() else 3)))


def another_dtype() -> str:
    net = Net()
    if odd():
        net.blocks[1].to(torch.float64)
    return said_by(sharded(net))


def one_that_is_frozen() -> str:
    net = Net()
    net.head.bias.requires_grad_(not odd())
    return said_by(sharded(net))


def another_dim() -> str:
    dim = 1 if odd() else 0
    return said_by(
        sharded(Net(), shard_placement_fn=lambda param: Shard(dim) if param.dim() == 2 else None)
    )


def another_policy() -> str:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if odd() else None)
    return said_by(sharded(Net(), mp_policy=policy))


def another_reshard() -> str:
    return said_by(sharded(Net(), reshard_after_forward=not odd()))


def another_prefetch() -> str:
    net = sharded(Net())
    if odd():
        first, _, last = net.blocks
        assert isinstance(first, FSDPModule)
        assert isinstance(last, FSDPModule)
        first.set_modules_to_forward_prefetch([last])
    return said_by(net)


def a_call_that_is_missing() -> str:
    net = Net()
    for block in list(net.blocks)[: 2 if odd() else 3]:
        fully_shard(block)
    return said_by(fully_shard(net))


def a_root_that_is_missing() -> str:
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    if not odd():
        fully_shard(net)
    return said_by(net)


def another_order_of_modules() -> str:
    net = Net()
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    net.blocks = nn.ModuleList()
    for name, module in (("b", second), ("a", first)) if odd() else (("a", first), ("b", second)):
        net.blocks.add_module(name, module)
    return said_by(sharded(net))


def one_without_memory() -> str:
    with torch.device("meta"):
        net = sharded(Net())
    if not odd():
        net.to_empty(device="cpu")
    return said_by(net)


DIFFERENCES = [
    (another_shape, r"parameter blocks\.0\.weight: shape is \(4, 4\) on {0}; \(5, 5\) on {1}"),
    (more_blocks, r"unit blocks\.3 is there on {1}, not on {0}"),
    (another_dtype, r"parameter blocks\.1\.weight: dtype is float32 on {0}; float64 on {1}"),
    (one_that_is_frozen, r"parameter head\.bias: requires_grad is True on {0}; False on {1}"),
    (another_dim, r"parameter blocks\.0\.weight: cut along dim is 0 on {0}; 1 on {1}"),
    (another_policy, r"unit \(root\): reduce_dtype is None on {0}; bfloat16 on {1}"),
    (another_reshard, r"unit \(root\): reshard_after_forward is True on {0}; False on {1}"),
    (another_prefetch, r"unit blocks\.0: ahead_in_forward is None on {0}; \['blocks\.2'\] on {1}"),
    (a_call_that_is_missing, r"unit blocks\.2 is there on {0}, not on {1}"),
    (a_root_that_is_missing, r"unit blocks\.0 is there on {0}, not on {1}"),
    (another_order_of_modules, r"order: number 1 is unit blocks\.a on {0}; unit blocks\.b on {1}"),
    (one_without_memory, r"blocks\.0\.weight: on the meta device is False on {0}; True on {1}"),
]


def each_difference() -> list[str]:
    return [differ() for differ, _ in DIFFERENCES]


@pytest.fixture(scope="module")
def said_about() -> dict[Callable[[], str], list[str]]:
    """What each of three ranks said about each difference; one run for all."""
    by_rank = testing.run_on_ranks(each_difference, 3, timeout_s=LIMIT_S)
    differences = [differ for differ, _ in DIFFERENCES]
    return dict(zip(differences, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize(("differ", "words"), DIFFERENCES)
def test_a_difference_is_named_on_every_rank(
    said_about: dict[Callable[[], str], list[str]], differ: Callable[[], str], words: str
) -> None:
    said = said_about[differ]

    expected = words.replace("{0}", "ranks 0, 2").replace("{1}", "rank 1")
    assert said[0].startswith("The ranks of this model did not shard it alike:")
    assert re.search(expected, said[0]), said[0]
    assert "Every rank must build the same model" in said[0]
    assert said == [said[0]] * 3


# --- meshes ------------------------------------------------------------------------------


def hybrid_here_flat_there() -> str:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    flat = init_device_mesh("cpu", (4,))
    return said_by(sharded(Net(), mesh=flat if odd() else both))


def test_a_mesh_of_another_form_is_named_on_every_rank(run_on_ranks: RunOnRanks) -> None:
    for message in run_on_ranks(hybrid_here_flat_there, 4, timeout_s=LIMIT_S):
        assert re.search(
            r"unit \(root\): mesh is 2 shards x 2 copies on cpu .* on ranks 0, 2, 3; "
            r"4 shards x 1 copies on cpu .* on rank 1",
            message,
        ), message


def half_here_all_there() -> str:
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    everyone = init_device_mesh("cpu", (4,))
    return said_by(sharded(Net(), mesh=halves["shards"] if odd() else everyone))


def test_a_mesh_of_fewer_ranks_is_found_out_without_waiting_for_the_process_group(
    run_on_ranks: RunOnRanks,
) -> None:
    said = run_on_ranks(half_here_all_there, 4, timeout_s=LIMIT_S)

    for rank in (0, 2, 3):
        assert "Ranks are about to do different things (number 0 among ranks 0-3)" in said[rank]
        assert re.search(r"rank 1: was last at: .*, among ranks 0, 1", said[rank])
    assert "(number 0 among ranks 0, 1)" in said[1]
    assert re.search(r"rank 0: was last at: .*, among ranks 0-3", said[1])


# --- what may well differ ----------------------------------------------------------------


def train_two_stages() -> list[str]:
    """Each half of the world has its own model; ranks 0 and 1 have a second one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))["shards"]
    late = dist.get_rank() >= 2
    said = [said_by(sharded(Net(blocks=2 if late else 3), mesh=mesh))]
    if not late:
        said.append(said_by(sharded(Net(width=6), mesh=mesh), 6))
    everyone = init_device_mesh("cpu", (4,))
    said.append(said_by(sharded(Net(), mesh=everyone)))
    return said


def test_roots_are_compared_among_the_ranks_of_their_own_mesh(run_on_ranks: RunOnRanks) -> None:
    said = run_on_ranks(train_two_stages, 4, timeout_s=LIMIT_S)

    assert said == [["", "", ""], ["", "", ""], ["", ""], ["", ""]]


def use_a_part_before_the_whole() -> list[str]:
    net = sharded(Net())
    said = [said_by(net.blocks[1]), said_by(net.blocks[0])]
    if odd():
        net.blocks[2].weight.requires_grad_(False)
    return [*said, said_by(net)]


def test_a_parent_that_takes_over_is_compared_anew(run_on_ranks: RunOnRanks) -> None:
    for part, other_part, whole in run_on_ranks(use_a_part_before_the_whole, 2, timeout_s=LIMIT_S):
        assert [part, other_part] == ["", ""]
        assert "blocks.2.weight: requires_grad is True on rank 0; False on rank 1" in whole


def mend_and_go_on() -> tuple[str, str]:
    net = sharded(Net())
    net.head.weight.requires_grad_(not odd())
    refused = said_by(net)
    net.head.weight.requires_grad_(True)
    return refused, said_by(net)


def test_after_mending_the_first_forward_can_be_tried_again(run_on_ranks: RunOnRanks) -> None:
    for refused, then in run_on_ranks(mend_and_go_on, 2, timeout_s=LIMIT_S):
        assert "head.weight: requires_grad" in refused
        assert then == ""


def test_ranks_that_are_pretended_are_not_asked() -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        said = said_by(sharded(Net()))
    finally:
        dist.destroy_process_group()

    assert said == ""


# --- words -------------------------------------------------------------------------------


def test_of_many_differences_the_first_five_are_named() -> None:
    ours = {f"unit blocks.{i}": {"modules": "1"} for i in range(9)}
    details = {0: json.dumps(ours), 1: json.dumps({})}

    message = agreement.difference(details)

    assert "unit blocks.4 is there on rank 0, not on rank 1\n  and 4 more" in message
