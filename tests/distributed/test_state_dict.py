"""State dicts of sharded models: what they hold, what loads, and torch's own functions on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trine.distributed import fsdp
from trine.distributed.fsdp import fully_shard

RunOnRanks = Callable[..., list[Any]]
StateDict = dict[str, Any]

LAYOUTS = [{"fsdp": 1}, {"fsdp": 2}, {"fsdp": 3}, {"ddp": 2, "fsdp": 2}]


class Odd(nn.Module):
    """Shapes that divide by no number of ranks, one row, no dims, a buffer, a tied weight."""

    def __init__(self, seed: int = 0, *, scalar: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 3))
        self.one = nn.Linear(3, 1)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full(() if scalar else (1,), 1.5 + seed))
        self.register_buffer("table", torch.arange(3) + seed)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embed(tokens))
        out: Tensor = self.head(x * self.scale) + self.one(x)
        return out


def sharded(
    axes: dict[str, int], seed: int = 0, *, dim: int = 0, scalar: bool = True, api: Any = fsdp
) -> Odd:
    model = Odd(seed, scalar=scalar)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(dim) if param.dim() > dim else None

    for layer in model.body:
        api.fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    made: Odd = api.fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return made


def whole(state: StateDict) -> StateDict:
    """The values of a state dict, with DTensors gathered; nested dicts too."""
    found: StateDict = {}
    for key, value in state.items():
        if isinstance(value, dict):
            value = whole(value)
        elif isinstance(value, DTensor):
            value = value.full_tensor()
        found[key] = value
    return found


def assert_equal(ours: StateDict, expected: StateDict) -> None:
    """Exactly: state dicts copy values and compute nothing."""
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(ours[key], value)
        elif isinstance(value, Tensor):
            torch.testing.assert_close(ours[key], value, rtol=0, atol=0, msg=key)
        else:
            assert ours[key] == value, key


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """The same batch on every rank: sharded and whole models see the same gradients."""
    for step in range(steps):
        tokens = torch.arange(6).add(step) % 5
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


# --- the module's own state_dict and load_state_dict -------------------------------------


def load_whole(axes: dict[str, int], swap: bool) -> None:
    for dim in (0, 1):
        for assign in (False, True):
            load_whole_once(axes, dim, assign, swap)


def load_whole_once(axes: dict[str, int], dim: int, assign: bool, swap: bool) -> None:
    model = sharded(axes, dim=dim)
    before = dict(model.named_parameters())
    values = Odd(seed=1).state_dict()
    given = dict(values)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    tokens = torch.arange(5)
    expected = Odd(seed=1)(tokens)

    result = model.load_state_dict(values, assign=assign)

    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(values[key] is given[key] for key in given)  # the caller's dict is left alone
    loaded = model.state_dict()
    assert all(isinstance(loaded[key], DTensor) for key, _ in model.named_parameters())
    assert_equal(whole(loaded), values)
    if not assign:
        assert all(param is before[name] for name, param in model.named_parameters())
    # The sum of products of a few fp32 numbers in another order.
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-6)
    assert model.embed.weight is model.head.weight  # still tied, whatever was loaded
    local = model.state_dict()["one.weight"].to_local()
    assert local.untyped_storage().nbytes() == local.nbytes  # not a view that keeps the whole


@pytest.mark.parametrize("axes", LAYOUTS)
def test_a_whole_state_dict_loads_into_a_sharded_model(
    run_on_ranks: RunOnRanks, axes: dict[str, int]
) -> None:
    run_on_ranks(load_whole, math.prod(axes.values()), axes, False)


def test_a_whole_state_dict_loads_also_where_parameters_swap_their_contents(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(load_whole, 2, {"fsdp": 2}, True)


def assign_between_steps() -> None:
    model, reference = sharded({"fsdp": 3}), Odd()
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.1, foreach=False) for each in (model, reference)
    ]
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        train(each, optimizer)
        # Whole, the values go into the parameters: these keep their optimizer.
        each.load_state_dict(Odd(seed=1).state_dict(), assign=each is model)

        train(each, optimizer)

    trained = optimizers[0].param_groups[0]["params"]
    assert list(map(id, trained)) == list(map(id, model.parameters()))
    assert_close(whole(model.state_dict()), reference.state_dict())


def test_an_optimizer_follows_parameters_that_loading_has_replaced_with_its_state(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(assign_between_steps, 3)


def load_while_whole() -> None:
    model = sharded({"fsdp": 2})
    model.unshard()  # type: ignore[operator]  # an FSDPModule
    assert not isinstance(model.scale, DTensor)
    values = Odd(seed=1).state_dict()

    # Modules of the root's unit, each on its own.
    alone = whole(model.one.state_dict())
    model.one.load_state_dict(Odd(seed=1).one.state_dict())

    assert_equal(alone, Odd().one.state_dict())
    assert_equal(whole(model.one.state_dict()), Odd(seed=1).one.state_dict())
    assert isinstance(model.scale, DTensor)
    model.load_state_dict(values)
    assert_equal(whole(model.state_dict()), values)


def test_parts_of_a_gathered_unit_are_saved_and_loaded_sharded(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(load_while_whole, 2)


def load_from_other_layouts() -> None:
    expected = whole(sharded({"fsdp": 4}, seed=1).state_dict())
    for axes, dim in [({"fsdp": 4}, 1), ({"ddp": 2, "fsdp": 2}, 0), ({"all": 4}, 0)]:
        for assign in (False, True):
            source = sharded(axes, seed=1, dim=dim)
            model = sharded({"fsdp": 4})

            model.load_state_dict(source.state_dict(), assign=assign)

            assert_equal(whole(model.state_dict()), expected)
            for name, param in model.named_parameters():
                assert isinstance(param, DTensor)
                placement = Shard(0) if param.dim() else Replicate()
                assert param.placements == (placement,), name


def test_a_state_dict_sharded_otherwise_loads(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(load_from_other_layouts, 4)


def load_onto_fewer_ranks() -> None:
    source = sharded({"fsdp": 3}, seed=1)
    expected = whole(source.state_dict())
    values = source.state_dict()
    first_two = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        for value in values.values():
            if isinstance(value, DTensor):
                value.full_tensor()  # what the other two do as they load
        return
    model = fully_shard(Odd(), mesh=first_two)

    model.load_state_dict(values)

    assert_equal(whole(model.state_dict()), expected)


def test_a_state_dict_of_more_ranks_loads_into_a_model_on_some_of_them(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(load_onto_fewer_ranks, 3)


def refuse_wrong_mesh(tmp: str) -> list[str]:
    model = sharded({"fsdp": 3})
    before = whole(model.state_dict())
    first = DeviceMesh("cpu", [0, 1])
    other = {
        key: distribute_tensor(value, first) if key.endswith("one.weight") else value
        for key, value in Odd(seed=1).state_dict().items()
    }
    messages = []
    with pytest.raises(RuntimeError) as refused:
        model.load_state_dict(other)
    messages.append(str(refused.value))
    assert torch.equal(whole(model.state_dict())["one.weight"], before["one.weight"])

    with pytest.raises(RuntimeError) as refused:
        model.load_state_dict(torch.load(Path(tmp) / "rank0.pt", weights_only=False))
    messages.append(str(refused.value))
    return messages


def save_parts(tmp: str) -> None:
    model = sharded({"fsdp": dist.get_world_size()})
    torch.save(model.state_dict(), Path(tmp) / f"rank{dist.get_rank()}.pt")


@pytest.mark.parametrize("saved_on", [2, 4])
def test_a_value_on_a_wrong_mesh_is_refused_by_name_on_every_rank(
    run_on_ranks: RunOnRanks, tmp_path: Path, saved_on: int
) -> None:
    run_on_ranks(save_parts, saved_on, str(tmp_path))

    results = run_on_ranks(refuse_wrong_mesh, 3, str(tmp_path))

    for rank, (other_mesh, from_file) in enumerate(results):
        assert 'While loading "one.weight": the value is a DTensor over the ranks 0, 1' in (
            other_mesh
        )
        assert f"rank {rank} cannot make whole" in other_mesh
        assert "the ranks 0 to 2 of a world of 3" in other_mesh
        assert other_mesh.count("While loading") == 1
        assert 'While loading "embed.weight"' in from_file
        assert "trine.distributed.checkpoint" in from_file


def refuse_by_name() -> None:
    model = sharded({"fsdp": 2})
    values = Odd(seed=1).state_dict()
    del values["body.0.bias"]
    values["body.0.extra"] = torch.ones(2)
    values["body.2.weight"] = torch.ones(4, 7)
    with pytest.raises(RuntimeError) as refused:
        model.load_state_dict(values)
    message = str(refused.value)
    assert 'Missing key(s) in state_dict: "body.0.bias"' in message
    assert 'Unexpected key(s) in state_dict: "body.0.extra"' in message
    assert "size mismatch for body.2.weight" in message
    assert "torch.Size([4, 7])" in message
    assert "torch.Size([3, 7])" in message
    del values["body.2.weight"]

    result = model.load_state_dict(values, strict=False)

    assert result.missing_keys == ["body.0.bias", "body.2.weight"]
    assert result.unexpected_keys == ["body.0.extra"]


def test_missing_unexpected_and_misshapen_values_are_refused_by_full_name(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(refuse_by_name, 2)


def load_through_a_wrapper() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 5)), nn.Linear(5, 2))
    fully_shard(model)
    torch.manual_seed(1)
    values = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).state_dict()

    model.load_state_dict(values)

    assert_equal(whole(model.state_dict()), values)


def test_a_whole_state_dict_loads_through_wrappers_that_rename(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(load_through_a_wrapper, 2)


# --- torch.distributed.checkpoint.state_dict, with nothing patched -------------------------


def models_after_training(
    axes: dict[str, int], dim: int = 0, *, scalar: bool = True
) -> tuple[Any, ...]:
    """A sharded model and a whole one, each with an AdamW that has made two steps."""
    model, reference = sharded(axes, dim=dim, scalar=scalar), Odd(scalar=scalar)
    made = []
    for each in (model, reference):
        frozen = each.get_submodule("one")
        frozen.requires_grad_(False)
        weight_decay = {"params": list(each.body.parameters()), "weight_decay": 0.5}
        rest = {"params": [each.scale, each.embed.weight, *each.one.parameters()], "lr": 0.02}
        optimizer = torch.optim.AdamW([weight_decay, rest], lr=0.01)
        train(each, optimizer)
        made += [each, optimizer]
    return tuple(made)


def _naming(key: str) -> Callable[[str], str]:
    return lambda text: f"{key}: {text}"


def assert_close(ours: StateDict, expected: StateDict) -> None:
    """For values that were trained: fp32 sums in another order, over a few AdamW steps."""
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(ours[key], value)
        elif isinstance(value, Tensor):
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5, msg=_naming(key))
        elif isinstance(value, list):
            assert len(ours[key]) == len(value)
            for mine, theirs in zip(ours[key], value, strict=True):
                assert mine == theirs, key
        else:
            assert ours[key] == value, key


FULL = StateDictOptions(full_state_dict=True)


def get_with_every_option(axes: dict[str, int], dim: int) -> None:
    model, optimizer, reference, reference_optimizer = models_after_training(axes, dim)
    of_model = get_model_state_dict(reference)
    of_optimizer: Any = get_optimizer_state_dict(reference, reference_optimizer)

    shards = get_model_state_dict(model)
    assert {name for name, value in shards.items() if isinstance(value, DTensor)} == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    assert_close(whole(shards), of_model)
    moments: Any = get_optimizer_state_dict(model, optimizer)
    assert isinstance(moments["state"]["body.0.weight"]["exp_avg"], DTensor)
    assert_close(whole(moments), of_optimizer)
    both = get_state_dict(model, optimizer, options=FULL)
    assert_close(both[0], of_model)
    assert_close(both[1], of_optimizer)
    assert not any(isinstance(value, DTensor) for value in both[0].values())

    to_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered, gathered_moments = get_state_dict(model, optimizer, options=to_host)
    if dist.get_rank() == 0:
        assert_close(gathered, of_model)
        assert_close(gathered_moments, of_optimizer)
    else:
        assert not gathered
        assert not gathered_moments
    assert_close(
        whole(get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))), of_model
    )

    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert of_model.keys() - trained.keys() == {"one.weight", "one.bias"}

    for keeps, prefix in ((True, "body."), (False, "")):
        options = StateDictOptions(keep_submodule_prefixes=keeps)
        with pytest.warns(FutureWarning, match="submodules only"):
            part = get_model_state_dict(model, submodules={model.body}, options=options)
        assert_close(whole(part), {prefix + k: v for k, v in reference.body.state_dict().items()})

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    ours: Any = get_optimizer_state_dict(model, optimizer, options=flat)
    assert "state.body.0.weight.exp_avg" in ours
    assert_close(
        whole(ours), dict(get_optimizer_state_dict(reference, reference_optimizer, options=flat))
    )


@pytest.mark.parametrize(
    ("axes", "dim"), [({"fsdp": 2}, 0), ({"fsdp": 3}, 1), ({"ddp": 2, "fsdp": 2}, 0)]
)
def test_torchs_functions_get_what_they_get_from_a_whole_model(
    run_on_ranks: RunOnRanks, axes: dict[str, int], dim: int
) -> None:
    run_on_ranks(get_with_every_option, math.prod(axes.values()), axes, dim)


def fresh(axes: dict[str, int], dim: int, *, scalar: bool = True) -> tuple[Odd, torch.optim.AdamW]:
    model = sharded(axes, seed=3, dim=dim, scalar=scalar)
    model.one.requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": list(model.body.parameters()), "weight_decay": 0.1},
        {"params": [model.scale, model.embed.weight, *model.one.parameters()]},
    ]
    return model, torch.optim.AdamW(groups, lr=0.5)


def set_with_every_option(axes: dict[str, int], dim: int) -> None:
    # torch's functions take whole optimizer states without dims for step counts, so the
    # moments of a parameter without dims would stay plain; torch's FSDP refuses such ones.
    source, source_optimizer, reference, reference_optimizer = models_after_training(
        axes, dim, scalar=False
    )
    sharded_states = copy.deepcopy(get_state_dict(source, source_optimizer))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = copy.deepcopy(get_state_dict(source, source_optimizer, options=flat))
    full: Any = copy.deepcopy(get_state_dict(reference, reference_optimizer))
    of_rank_0: Any = full if dist.get_rank() == 0 else ({}, {})
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    train(reference, reference_optimizer, steps=3)

    for states, options in [
        (sharded_states, StateDictOptions()),
        (flattened, flat),
        (full, FULL),
        (full, StateDictOptions(full_state_dict=True, cpu_offload=True)),
        (of_rank_0, from_rank_0),
    ]:
        model, optimizer = fresh(axes, dim, scalar=False)
        values, moments = copy.deepcopy(states)
        # One after the other: set_state_dict skips the model where a rank brings nothing.
        result = set_model_state_dict(model, values, options=options)
        set_optimizer_state_dict(model, optimizer, moments, options=options)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.01]
        train(model, optimizer, steps=3)
        assert_close(whole(model.state_dict()), reference.state_dict())

    model, optimizer = fresh(axes, dim, scalar=False)
    values, moments = copy.deepcopy(full)
    set_state_dict(
        model, optimizer, model_state_dict=values, optim_state_dict=moments, options=FULL
    )
    train(model, optimizer, steps=3)
    assert_close(whole(model.state_dict()), reference.state_dict())

    partial = dict(full[0])
    del partial["scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"scale"'):
        set_model_state_dict(model, dict(partial))
    loose = StateDictOptions(strict=False)
    assert set_model_state_dict(model, dict(partial), options=loose).missing_keys == ["scale"]


@pytest.mark.parametrize(
    ("axes", "dim"), [({"fsdp": 2}, 0), ({"fsdp": 3}, 1), ({"ddp": 2, "fsdp": 2}, 0)]
)
def test_training_goes_on_from_what_torchs_functions_have_set(
    run_on_ranks: RunOnRanks, axes: dict[str, int], dim: int
) -> None:
    run_on_ranks(set_with_every_option, math.prod(axes.values()), axes, dim)


def exchange_with_torch() -> None:
    """State dicts of torch's FSDP2 and ours are the same, down to the placements."""
    ours, theirs = Odd(), Odd(seed=1)
    for each, api in ((ours, fsdp), (theirs, torch_fsdp)):
        each.scale = nn.Parameter(torch.ones(1))  # torch's refuses parameters without dims
        api.fully_shard(each.body)
        api.fully_shard(each)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (ours, theirs)]
    train(theirs, optimizers[1])
    both: Any = get_state_dict(theirs, optimizers[1])
    values, moments = both

    set_state_dict(ours, optimizers[0], model_state_dict=values, optim_state_dict=moments)

    both = get_state_dict(ours, optimizers[0])
    mine, my_moments = both
    assert list(mine) == list(values)
    assert_equal(whole(mine), whole(values))
    assert_equal(whole(my_moments), whole(moments))
    for name, value in values.items():
        if isinstance(value, DTensor):
            assert mine[name].placements == value.placements


def test_state_dicts_are_those_of_torchs_fsdp(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(exchange_with_torch, 2)


# --- torch.distributed.checkpoint ----------------------------------------------------------


def save_with_torch(path: str, asynchronous: bool) -> None:
    world = dist.get_world_size()
    model, optimizer, _, _ = models_after_training({"fsdp": world}, dim=world % 2)
    values, moments = get_state_dict(model, optimizer)
    state = {"model": values, "optimizer": moments}
    if asynchronous:
        # The thread that saves needs a group of its own, or its collectives meet those of training.
        group = dist.new_group()
        pending: Any = async_save(state, checkpoint_id=path, process_group=group)
        train(model, optimizer)  # goes on meanwhile: what is saved is the state before
        pending.result()
    else:
        save(state, checkpoint_id=path)


def reshard_with_torch(before: str, after: str) -> None:
    axes = {"fsdp": dist.get_world_size()}
    model, optimizer = fresh(axes, dim=0)
    values, moments = get_state_dict(model, optimizer)
    state: Any = {"model": values, "optimizer": moments}
    load(state, checkpoint_id=before)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
        checkpoint_id=after,
    )
    _, _, reference, reference_optimizer = models_after_training({"fsdp": dist.get_world_size()})
    assert_close(whole(model.state_dict()), reference.state_dict())
    train(model, optimizer)
    train(reference, reference_optimizer)
    assert_close(whole(model.state_dict()), reference.state_dict())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_torchs_checkpoints_move_from_4_ranks_to_2_to_3_to_1(
    run_on_ranks: RunOnRanks, tmp_path: Path, asynchronous: bool
) -> None:
    run_on_ranks(save_with_torch, 4, str(tmp_path / "4"), asynchronous)

    for before, ranks in ((4, 2), (2, 3), (3, 1)):
        run_on_ranks(
            reshard_with_torch, ranks, str(tmp_path / f"{before}"), str(tmp_path / f"{ranks}")
        )
