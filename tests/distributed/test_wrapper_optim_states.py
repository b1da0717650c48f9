"""The optimizer's state of a wrapped model: saved by name, and back into an optimizer."""

from __future__ import annotations

import copy
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.training import train_alike
from trine.distributed import init_mesh
from trine.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)

RunOnRanks = Callable[..., list[Any]]
Wrapper = FullyShardedDataParallel
StateDict = dict[str, Any]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

FULL = StateDictType.FULL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam with amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "Adam, lr a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2)),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "ASGD": lambda params: torch.optim.ASGD(params),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2]),
}


class Odd(nn.Module):
    """Sizes that two ranks do not divide, one row, no dims, a tied weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(self.embed(tokens)) * self.scale) + self.one
        return made


def wrapped(model: nn.Module) -> Wrapper:
    for name, child in list(model.named_modules()):
        if isinstance(child, nn.Linear) and name.startswith("body"):
            model.set_submodule(name, Wrapper(child))
    return Wrapper(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(seed: int = 0) -> tuple[Wrapper, torch.optim.Optimizer]:
    model = wrapped(Odd(seed))
    optimizer = adamw(model)
    train_alike(model, optimizer)
    return model, optimizer


def tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors(value)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_of(values: Any) -> set[int]:
    """Where tensors that have any memory lie, on this rank."""
    return {local(each).data_ptr() for each in tensors(values)} - {0}


def assert_same(ours: Any, expected: Any, where: str = "", **tolerance: float) -> None:
    """Equal, with equal keys and dtypes; exactly unless said."""
    if isinstance(expected, Tensor):
        assert isinstance(ours, Tensor), where
        assert isinstance(ours, DTensor) == isinstance(expected, DTensor), where
        rtol, atol = tolerance.get("rtol", 0), tolerance.get("atol", 0)
        torch.testing.assert_close(local(ours), local(expected), rtol=rtol, atol=atol, msg=where)
    elif isinstance(expected, dict):
        assert ours.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(ours[key], value, f"{where}.{key}", **tolerance)
    elif isinstance(expected, list | tuple):
        assert len(ours) == len(expected), where
        for number, (one, other) in enumerate(zip(ours, expected, strict=True)):
            assert_same(one, other, f"{where}.{number}", **tolerance)
    else:
        assert ours == expected, where


# --- every optimizer ------------------------------------------------------------------------


def save_like_one_process_and_load() -> None:
    for name, make in OPTIMIZERS.items():
        plain, model, other = Odd(), wrapped(Odd()), wrapped(Odd(1))
        expected, optimizer, loaded = (make(list(m.parameters())) for m in (plain, model, other))
        train_alike(plain, expected)
        train_alike(model, optimizer)

        full = Wrapper.full_optim_state_dict(model, optimizer)
        sent = Wrapper.scatter_full_optim_state_dict(full or None, other, optim=loaded)
        loaded.load_state_dict(sent)

        if dist.get_rank() == 0:
            named = Wrapper.rekey_optim_state_dict(
                expected.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=expected
            )
            # Gradients of two ranks are added up in another order than those of one; Muon makes
            # its updates in bfloat16.
            allowed = 1e-2 if name == "Muon" else 1e-6
            assert_same(full, named, name, rtol=1e-4, atol=allowed)
        else:
            assert full == {}, name
        assert_same(loaded.state_dict(), optimizer.state_dict(), name)
        other.load_state_dict(model.state_dict())
        assert train_alike(other, loaded) == train_alike(model, optimizer), name


def test_the_state_of_every_optimizer_is_that_of_one_process_and_loads(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(save_like_one_process_and_load, 2, timeout_s=110)


# --- the types of state dict ------------------------------------------------------------------


def every_type() -> None:
    model, optimizer = trained()
    expected = optimizer.state_dict()
    for kind in (FULL, SHARDED, LOCAL):
        with Wrapper.state_dict_type(model, kind):
            given = Wrapper.optim_state_dict(model, optimizer)
            packed = Wrapper.optim_state_dict(model, optimizer, optimizer.state_dict())
        before = copy.deepcopy(given)
        other = wrapped(Odd(1))
        loaded = adamw(other)
        with Wrapper.state_dict_type(other, kind):
            made = Wrapper.optim_state_dict_to_load(other, loaded, given, load_directly=True)
            named = Wrapper.optim_state_dict_to_load(other, loaded, given, is_named_optimizer=True)

        assert_same(packed, given, kind.name)
        assert_same(made, expected, kind.name)
        assert_same(loaded.state_dict(), expected, kind.name)
        assert list(named["state"]) == list(given["state"]), kind.name
        assert_same(given, before, kind.name)  # what is loaded is not changed
        assert not memory_of(given) & memory_of(loaded.state_dict()), kind.name
        moment = given["state"]["body.0.weight"]["exp_avg"]
        live = before_of(model, optimizer)["body.0.weight"]["exp_avg"]
        assert isinstance(moment, DTensor) == (kind is SHARDED)
        assert moment.shape == (local(live) if kind is LOCAL else live).shape
    sharded = Wrapper.sharded_optim_state_dict(model, optimizer)
    assert_same(sharded["state"], before_of(model, optimizer))
    assert_same(Wrapper.flatten_sharded_optim_state_dict(sharded, model, optimizer), expected)


def before_of(model: Wrapper, optimizer: torch.optim.Optimizer) -> StateDict:
    """The live state under names."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param)]: state for param, state in optimizer.state.items()}


def test_state_of_every_type_loads_again(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(every_type, 3)


def nothing_shared_and_little_held() -> None:
    model, optimizer = trained()
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    gather = DTensor.full_tensor

    def counting(self: DTensor, **options: Any) -> Tensor:
        nonlocal most
        most = max(most, sum(each() is not None for each in alive))
        made = gather(self, **options)
        alive.append(weakref.ref(made))
        return made

    full = Wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
    found = [*tensors(full["state"])]
    memory = [each.data_ptr() for each in found]
    assert len(set(memory)) == len(memory)
    assert not memory_of(optimizer.state_dict()) & set(memory)
    assert all(each.device.type == "cpu" for each in found)

    DTensor.full_tensor = counting  # type: ignore[method-assign]
    with Wrapper.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        only = Wrapper.optim_state_dict(model, optimizer)
    DTensor.full_tensor = gather  # type: ignore[method-assign]

    if dist.get_rank() == 0:
        assert_same(only, full)
    else:
        assert only == {}
        assert most == 0  # beside the one that is made


def test_whole_state_shares_no_memory_and_ranks_that_need_none_hold_none(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(nothing_shared_and_little_held, 2)
    run_on_ranks(nothing_shared_and_little_held, 1)


def every_strategy() -> None:
    ways: dict[str, dict[str, Any]] = {
        "full": {},
        "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
        "copies": {"device_mesh": init_mesh({"replicate": 2, "shard": 2})},
        "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    }
    expected: StateDict | None = None
    for (source, saved_with), (target, loaded_with) in itertools.product(ways.items(), repeat=2):
        where = f"{source} -> {target}"
        model, other = Wrapper(Odd(), **saved_with), Wrapper(Odd(1), **loaded_with)
        optimizer, loaded = adamw(model), adamw(other)
        train_alike(model, optimizer)

        full = Wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
        loaded.load_state_dict(Wrapper.shard_full_optim_state_dict(full, other, optim=loaded))
        with Wrapper.state_dict_type(other, LOCAL):
            rows = copy.deepcopy(Wrapper.optim_state_dict(other, loaded))
            Wrapper.optim_state_dict_to_load(other, loaded, rows, load_directly=True)

        expected = expected or full
        # Gradients are added up in other orders.
        assert_same(full, expected, where, rtol=1e-5, atol=1e-7)
        assert not memory_of(full) & memory_of(optimizer.state_dict()), where
        again = Wrapper.full_optim_state_dict(other, loaded, rank0_only=False)
        assert_same(again, full, where)
        other.load_state_dict(model.state_dict())
        assert train_alike(other, loaded) == pytest.approx(
            train_alike(model, optimizer), rel=1e-5, abs=0
        )


def test_state_moves_between_all_strategies(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(every_strategy, 4, timeout_s=110)


def only_the_first_has_it() -> None:
    model, optimizer = trained()
    full = Wrapper.full_optim_state_dict(model, optimizer)
    expected = optimizer.state_dict()
    sizes: list[int] = []
    broadcast = dist.broadcast

    def counting(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel() if tensor.is_floating_point() else 0)
        return broadcast(tensor, *args, **options)

    config = FullOptimStateDictConfig(rank0_only=True)
    dist.broadcast = counting
    with Wrapper.state_dict_type(model, FULL, None, config):
        made = Wrapper.optim_state_dict_to_load(model, optimizer, full)
    dist.broadcast = broadcast

    assert_same(made, expected)
    assert max(sizes) == max(param.numel() for param in model.parameters())
    with pytest.raises(ValueError, match=r"^An optimizer state dict has the keys"):
        Wrapper.scatter_full_optim_state_dict({} if full else None, model, optim=optimizer)
    sharded = Wrapper.sharded_optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="holds DTensors"):
        Wrapper.scatter_full_optim_state_dict(sharded, model, optim=optimizer)


def test_what_only_the_first_rank_has_reaches_all_one_tensor_at_a_time(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(only_the_first_has_it, 2)


# --- which parameters -----------------------------------------------------------------------


class Apart(nn.Module):
    """Only parts of it are trained, sharded, used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)
        self.frozen, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
        self.ignored, self.plain = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(self.ignored(self.frozen(self.second(self.first(x)))))
        return x


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Three groups, not in the order of the model; one empty."""
    modules = (model.plain, model.second, model.unused, model.frozen), (model.first, model.ignored)
    made = [[param for module in some for param in module.parameters()] for some in modules]
    return [{"params": made[0]}, {"params": made[1], "lr": 0.5}, {"params": []}]


def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made_apart(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain root, with a wrapper that ignores one module and shares none with the other."""
    model = Apart(seed)
    for name in ("first", "second", "frozen", "unused"):
        model.set_submodule(name, Wrapper(model.get_submodule(name)))
    model.set_submodule("ignored", Wrapper(model.ignored, ignored_modules=[model.ignored]))
    return model, torch.optim.Adam(groups_of(model), lr=1e-2)


def some_parameters() -> None:
    plain = Apart()
    reference = torch.optim.Adam(groups_of(plain), lr=1e-2)
    run(plain, reference)
    expected = Wrapper.rekey_optim_state_dict(
        reference.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=reference
    )
    model, optimizer = made_apart(0)
    run(model, optimizer)

    full = Wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)

    assert_same(full, expected, rtol=1e-4, atol=1e-6)
    assert not any(name.startswith(("frozen", "unused")) for name in full["state"])
    other, loaded = made_apart(1)
    # In another order, which names make right.
    full["param_groups"] = [full["param_groups"][number] for number in (2, 1, 0)]
    loaded.load_state_dict(
        Wrapper.shard_full_optim_state_dict(full, other, optim_input=loaded.param_groups)
    )
    assert_same(loaded.state_dict(), optimizer.state_dict())
    with Wrapper.state_dict_type(model, FULL):
        other.load_state_dict(model.state_dict())
    assert run(other, loaded) == run(model, optimizer)


def test_state_of_frozen_unused_ignored_and_plain_parameters_in_groups(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(some_parameters, 2)


def other_ways_in() -> None:
    model, optimizer = trained()
    full = Wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
    expected = optimizer.state_dict()

    # Under numbers, as one process has them; and a tied parameter under its other name.
    numbered = Wrapper.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, Odd())
    renamed = {
        "state": {n.replace("embed", "head"): each for n, each in full["state"].items()},
        "param_groups": [
            {**group, "params": [name.replace("embed", "head") for name in group["params"]]}
            for group in full["param_groups"]
        ],
    }
    for given in (numbered, renamed):
        assert_same(Wrapper.shard_full_optim_state_dict(given, model), expected)
        assert_same(Wrapper.optim_state_dict_to_load(model, optimizer, given), expected)
    plain = Odd()
    alone = adamw(plain)
    alone.load_state_dict(copy.deepcopy(numbered))
    plain.load_state_dict(model.state_dict())
    # Norms of two ranks' gradients are added up in another order than those of one.
    assert train_alike(plain, alone) == pytest.approx(
        train_alike(model, optimizer), rel=1e-5, abs=0
    )

    # While parameters are gathered, and behind a wrapper for activation checkpointing.
    model(torch.arange(4))
    during = Wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert during["state"].keys() == full["state"].keys()

    # What belongs to no parameter stays; lists and dicts are looked into.
    for state in optimizer.state.values():
        state["history"] = [state["exp_avg"], {"seen": 3, "at": torch.ones(2)}, None]
    optimizer.state["shared"] = {"count": torch.tensor(7)}  # type: ignore[index]
    rich = Wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert rich["state"]["shared"]["count"] == 7
    assert rich["state"]["embed.weight"]["history"][0].shape == (5, 3)
    made = Wrapper.shard_full_optim_state_dict(rich, model, optim=optimizer)
    assert_same(made, optimizer.state_dict())


def test_state_under_numbers_other_names_and_of_other_kinds_loads(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(other_ways_in, 2)


def filed_under_names() -> None:
    # Here, since it warns of what torch itself uses in it.
    named: Any = importlib.import_module("torch.distributed.optim")._NamedOptimizer

    def made(seed: int) -> tuple[Wrapper, Any]:
        model = wrapped(Odd(seed))
        optimizer = named(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
        optimizer.zero_grad = model.zero_grad
        return model, optimizer

    (model, optimizer), (other, loaded) = made(0), made(1)
    train_alike(model, optimizer)
    loaded.init_state()

    full = Wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
    Wrapper.optim_state_dict_to_load(
        other, loaded, full, is_named_optimizer=True, load_directly=True
    )

    assert list(full["state"]) == list(optimizer.state_dict()["state"])
    other.load_state_dict(model.state_dict())
    assert train_alike(other, loaded) == train_alike(model, optimizer)


def test_an_optimizer_that_files_its_state_under_names(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(filed_under_names, 2)


def made_before_wrapping() -> None:
    source, optimizer = trained()
    full = Wrapper.full_optim_state_dict(source, optimizer, rank0_only=False)
    model = Odd(1)
    early = adamw(model)
    outer = wrapped(model)
    with pytest.warns(UserWarning, match="made with whole parameters"):
        made = Wrapper.optim_state_dict_to_load(outer, early, full)
    early.load_state_dict(made)
    outer.load_state_dict(source.state_dict())

    assert train_alike(outer, early) == train_alike(source, optimizer)

    model = Odd(1)
    stale = adamw(model)
    train_alike(model, stale)
    with (
        pytest.warns(UserWarning, match="Make a new optimizer"),
        pytest.raises(ValueError, match=r"of shape \(\), is no parameter of this"),
    ):
        Wrapper.full_optim_state_dict(wrapped(model), stale)


def test_an_optimizer_made_before_wrapping_takes_state(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(made_before_wrapping, 2)


# --- what does not fit ------------------------------------------------------------------------


def refusals() -> None:
    model, optimizer = trained()
    full = Wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)

    def renamed(old: str, new: str) -> StateDict:
        made = copy.deepcopy(full)
        names = made["param_groups"][0]["params"]
        names[names.index(old)] = new
        made["state"][new] = made["state"].pop(old)
        return made

    def reshaped(name: str, shape: tuple[int, ...]) -> StateDict:
        made = copy.deepcopy(full)
        made["state"][name]["exp_avg"] = torch.zeros(shape)
        return made

    fresh = adamw(model)
    for given, expected in (
        (renamed("scale", "gain"), "missing: scale; unexpected, as the optimizer lacks them: gain"),
        (
            reshaped("body.0.weight", (4, 3)),
            r"exp_avg of body.0.weight is a tensor of shape \(4, 3\) on rank \d, but the "
            r"parameter has \(7, 3\)",
        ),
        (reshaped("one", (2, 2)), r"exp_avg of one .* \(2, 2\)"),
        ({"state": {}}, "has the keys 'state' and 'param_groups'; this one"),
        ({}, "scatter_full_optim_state_dict"),
    ):
        with pytest.raises(ValueError, match=expected):
            Wrapper.shard_full_optim_state_dict(given, model, optim=fresh)
        with pytest.raises(ValueError, match=expected):  # on every rank: none waits for another
            Wrapper.scatter_full_optim_state_dict(given, model, optim=fresh)
    narrow = reshaped("body.0.weight", (1, 3))
    with pytest.raises(ValueError, match=r"exp_avg .* the optimizer has \(7, 3\) there"):
        Wrapper.shard_full_optim_state_dict(narrow, model, optim=optimizer)
    with pytest.raises(TypeError, match="is expected, got NoneType"):
        Wrapper.shard_full_optim_state_dict(None, model)  # type: ignore[arg-type]  # on purpose
    parts = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    with pytest.raises(ValueError, match="exactly the parameters of group 0"):
        Wrapper.shard_full_optim_state_dict(full, model, optim=parts)
    with pytest.raises(ValueError, match=r"groups of \[9\] .* groups of \[1, 1"):
        Wrapper.shard_full_optim_state_dict(optimizer.state_dict(), model, optim=parts)
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"Parameter 0 of group 0 .* no parameter of this Fully"):
        Wrapper.full_optim_state_dict(model, stranger)
    with pytest.raises(ValueError, match="holds no FullyShardedDataParallel"):
        Wrapper.optim_state_dict(nn.Linear(2, 2), stranger)
    with (
        Wrapper.state_dict_type(model, LOCAL),
        pytest.raises(ValueError, match="rows of a LOCAL_STATE_DICT of shape"),
    ):
        Wrapper.optim_state_dict_to_load(model, optimizer, reshaped("body.0.weight", (2, 3)))
    with pytest.raises(TypeError, match="optim_state_key_type must be"):
        Wrapper.rekey_optim_state_dict(full, "name", model)  # type: ignore[arg-type]  # on purpose


def test_state_that_does_not_fit_is_refused_with_full_names_on_every_rank(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(refusals, 2)
