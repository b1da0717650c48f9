"""Plans against closed forms, for worlds of any size; that runs agree is tests/together's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trine.core.planning import Plan, PlanError, PlanRequest
from trine.distributed.demo.model import GPT, GPTConfig
from trine.distributed.planning import plan
from trine.distributed.planning.activations import saved_by

SMALL = GPTConfig(width=48, depth=3, heads=6, context=32)


def on_meta(config: GPTConfig = SMALL) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def plan_of(model: nn.Module, **request: Any) -> Plan:
    return plan(model, PlanRequest(**request))


worlds = st.integers(1, 100_000)


@given(rows=st.lists(st.integers(1, 50), min_size=1, max_size=4), shard=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_what_the_ranks_hold_adds_up_to_the_whole(rows: list[int], shard: int) -> None:
    with torch.device("meta"):
        sizes = [3, *rows]
        layers = [nn.Linear(sizes[i], sizes[i + 1]) for i in range(len(rows))]
        model = nn.Sequential(*layers)

    plans = [plan_of(model, shard=shard, rank=rank) for rank in range(shard)]

    numel = sum(param.numel() for param in model.parameters())
    params = 2 * len(rows)
    assert plans[0].parameters == numel
    assert sum(unit.own for each in plans for unit in each.units) == numel
    # Two moments of four bytes each, and on every rank a count of steps for each parameter.
    states = sum(each.between_steps.optimizer for each in plans)
    assert states == 8 * numel + 4 * shard * params


@given(shard=worlds, replicate=st.integers(1, 1000))
@settings(max_examples=40, deadline=None)
def test_a_world_of_any_size_holds_each_copy_once_and_sends_all_but_its_own_part(
    shard: int, replicate: int
) -> None:
    model = on_meta()

    made = plan_of(model, shard=shard, replicate=replicate, param_dtype=torch.bfloat16)

    padded = {
        name: sum(-(-p.shape[0] // shard) * (p.numel() // p.shape[0]) for p in params)
        for name, params in {
            "(root)": [p for n, p in model.named_parameters() if not n.startswith("blocks")],
            **{f"blocks.{i}": list(block.parameters()) for i, block in enumerate(model.blocks)},
        }.items()
    }
    assert made.between_steps.sharded == 4 * sum(padded.values())
    for unit in made.units:
        part = padded[unit.unit]
        gathers = 1 if unit.unit == "(root)" else 2
        assert unit.sent["all_gather"] == gathers * 2 * part * (shard - 1)
        marks = sum(1 for n, _ in model.named_parameters() if n.startswith(unit.unit + "."))
        if unit.unit == "(root)":
            marks = sum(1 for n, _ in model.named_parameters() if not n.startswith("blocks"))
        assert unit.sent["reduce_scatter"] == 2 * (part + marks) * (shard - 1)
        if replicate > 1:
            wire = 2 * (part + marks)
            assert unit.sent["all_reduce"] == 2 * wire * (replicate - 1) // replicate


def test_more_ranks_never_take_more_memory_while_they_divide_the_rows() -> None:
    totals = [plan_of(on_meta(), shard=shard).peak.total for shard in (1, 2, 4, 8, 16)]

    assert totals == sorted(totals, reverse=True)


def test_with_offload_only_what_is_gathered_and_reduced_is_on_the_device() -> None:
    model = on_meta()
    numel = sum(param.numel() for param in model.parameters())

    made = plan_of(model, shard=2, offload=True)

    assert made.between_steps.total == 0
    assert made.host.sharded == pytest.approx(4 * numel / 2, rel=0.01)
    assert made.host.optimizer == pytest.approx(8 * numel / 2, rel=0.01)
    assert made.peak.optimizer == made.peak.sharded == 0
    assert made.peak.unsharded > 0


@pytest.mark.parametrize(
    ("optimizer", "nbytes"), [("sgd", 0), ("SGD:momentum=0.9", 4), ("adamw:amsgrad=True", 12)]
)
def test_optimizer_state_is_that_of_torchs_optimizer(optimizer: str, nbytes: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(1000, 1000, bias=False)

    made = plan_of(model, shard=4, optimizer=optimizer)

    assert made.between_steps.optimizer == pytest.approx(nbytes * 250 * 1000, abs=4)


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)

    made = plan_of(model, shard=1, units=("Linear",))

    first, second = made.units[1:]
    assert first.most.gradients == first.most.optimizer == 0
    assert "reduce_scatter" not in first.sent
    assert second.most.gradients > 0


class _Checked(nn.Module):
    """Two layers with attention between them, in a list, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.register_buffer("scale", torch.ones(10))


def test_units_are_members_of_lists_unless_classes_or_a_size_are_named() -> None:
    with torch.device("meta"):
        model = _Checked()
    gpt = on_meta()

    assert [u.unit for u in plan_of(model, shard=1).units] == ["(root)", "layers.0", "layers.1"]
    by_class = plan_of(gpt, shard=1, units=("Block", "Embedding")).units
    assert [unit.unit for unit in by_class][1:3] == ["byte_embedding", "position_embedding"]
    by_size = plan_of(gpt, shard=1, units=20_000).units
    assert [u.unit for u in by_size] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert sum(unit.parameters for unit in by_size) == sum(p.numel() for p in gpt.parameters())
    assert plan_of(model, shard=2).peak.replicated == 40


def test_activations_are_what_a_real_forward_saves() -> None:
    model = GPT(SMALL)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    params = {id(param.untyped_storage()) for param in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in params:
            storages[id(storage)] = storage
        return tensor.detach()

    with saved_tensors_hooks(save, lambda saved: saved):
        model(tokens)
    seen = sum(storage.nbytes() for storage in storages.values())

    inside = {"": ["blocks.0", "blocks.1", "blocks.2"]} | {f"blocks.{i}": [] for i in range(3)}
    found = saved_by(on_meta(), inside, (tokens.to("meta"),), None)

    assert sum(sum(each.values()) for each in found.values()) == pytest.approx(seen, rel=0.05)
    blocks = [sum(found[f"blocks.{i}"].values()) for i in range(3)]
    assert blocks[0] == blocks[1] == blocks[2] > 0
    made = plan_of(on_meta(), shard=2, inputs=(tokens.to("meta"),))
    assert made.peak.activations > 0.5 * seen


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"shard": 0}, "shard is 0"),
        ({"shard": 2, "rank": 2}, "rank is 2"),
        ({"shard": 2, "backend": "carrier pigeon"}, "carrier pigeon"),
        ({"shard": 2, "units": ("Nothing",)}, "No module is a Nothing. The model has Block"),
        ({"shard": 2, "optimizer": "nadamax"}, "torch.optim has no optimizer 'nadamax'"),
        ({"shard": 2, "optimizer": "sgd:momentum"}, "'momentum' of the optimizer"),
        ({"shard": 2, "optimizer": "lbfgs"}, "cannot be found out"),
        ({"shard": 3, "reshard_after_forward": 2}, "reshard_after_forward=2"),
        ({"shard": 2, "inputs": (torch.empty(3, device="meta"),)}, "does not run on the meta"),
    ],
)
def test_what_cannot_be_planned_is_said(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(on_meta(), **request_)


def test_units_that_share_a_parameter_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight

    with pytest.raises(PlanError, match=r"1\.weight is shared with 0\.weight"):
        plan_of(model, shard=2, units=("Linear",))
