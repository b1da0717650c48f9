"""State dicts of wrapped models: to and from torch's wrappers, one process, and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.training import train_alike
from trine.distributed import fsdp
from trine.distributed.checkpoint import load_checkpoint, save_checkpoint

RunOnRanks = Callable[..., list[Any]]
StateDict = dict[str, Any]
Wrapper = fsdp.FullyShardedDataParallel
Kind = tuple[nn.Module, torch.optim.Optimizer]

OURS = ("wrapper", "fully_shard")
TORCHS = ("fsdp1", "fsdp1_flat", "fsdp2", "ddp", "process")
FULL = StateDictOptions(full_state_dict=True)


class Odd(nn.Module):
    """Sizes that no number of ranks divides, one element, a buffer, a tied weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 7)
        self.norm = nn.LayerNorm(7)
        self.out = nn.Linear(7, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.full((1,), 1.5 + seed))
        self.register_buffer("table", torch.arange(3.0) + seed)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.out(self.norm(torch.tanh(self.body(self.embed(tokens)))))
        made: Tensor = self.head(x) * self.one
        return made


def wrapped(model: nn.Module, **options: Any) -> Wrapper:
    """A wrapper around the norm, and one around the rest."""
    model.norm = Wrapper(model.get_submodule("norm"), **options)
    return Wrapper(model, **options)


def optimizer_of(model: nn.Module, of: str = "adamw") -> torch.optim.Optimizer:
    if of == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)


def make(kind: str, seed: int, optimizer: str = "adamw") -> Kind:
    """A model with an optimizer, sharded or not in one of the ways that exchange state."""
    model: nn.Module = Odd(seed)
    if kind in ("wrapper", "wrapper_by_torch"):
        model = wrapped(model)
    elif kind in ("fully_shard", "fsdp2"):
        shard: Any = fsdp.fully_shard if kind == "fully_shard" else torch_fsdp.fully_shard
        ranks = init_device_mesh("cpu", (dist.get_world_size(),))
        shard(model.norm, mesh=ranks)
        shard(model, mesh=ranks)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind in ("fsdp1", "fsdp1_flat", "fsdp1_mesh"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if kind == "fsdp1_mesh" else None
        model = torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.LayerNorm}),
            use_orig_params=kind != "fsdp1_flat",
            device_id=torch.device("cpu"),
            device_mesh=mesh,
        )
    return model, optimizer_of(model, optimizer)


def full_state(kind: str, made: Kind) -> tuple[StateDict, StateDict]:
    """Model and optimizer as whole tensors by name, as the makers of each kind say to do it."""
    model, optimizer = made
    if kind.startswith("fsdp1") or kind == "wrapper":
        theirs: Any = Wrapper if kind == "wrapper" else torch_fsdp.FullyShardedDataParallel
        api: Any = fsdp if kind == "wrapper" else torch_fsdp
        with quiet(), theirs.state_dict_type(model, api.StateDictType.FULL_STATE_DICT):
            return model.state_dict(), theirs.optim_state_dict(model, optimizer)
    return get_state_dict(model, optimizer, options=FULL)


def load_full(kind: str, made: Kind, state: tuple[StateDict, StateDict]) -> None:
    model, optimizer = made
    if kind.startswith("fsdp1") or kind == "wrapper":
        theirs: Any = Wrapper if kind == "wrapper" else torch_fsdp.FullyShardedDataParallel
        api: Any = fsdp if kind == "wrapper" else torch_fsdp
        with quiet(), theirs.state_dict_type(model, api.StateDictType.FULL_STATE_DICT):
            model.load_state_dict(state[0])
            optimizer.load_state_dict(theirs.optim_state_dict_to_load(model, optimizer, state[1]))
        return
    set_state_dict(
        model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=FULL
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Torch's wrapper warns that it is no longer developed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


def copied(values: Any) -> Any:
    """The same with tensors of its own, whole."""
    if isinstance(values, Tensor):
        return (values.full_tensor() if isinstance(values, DTensor) else values).detach().clone()
    if isinstance(values, dict):
        return {key: copied(value) for key, value in values.items()}
    return type(values)(map(copied, values)) if isinstance(values, list | tuple) else values


def assert_same(ours: Any, expected: Any, where: str = "") -> None:
    """Exactly: state dicts copy values and compute nothing."""
    if isinstance(expected, Tensor):
        assert isinstance(ours, Tensor), where
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, msg=where)
    elif isinstance(expected, dict):
        assert ours.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(ours[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):  # torch's functions make lists of tuples
        assert list(ours) == list(expected), where
    else:
        assert ours == expected, where


def by_parameter(optimizer_state: StateDict) -> StateDict:
    """The state, and the settings of each parameter: not all kinds have them in one order."""
    groups = optimizer_state["param_groups"]
    settings = {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for name in group["params"]
    }
    return {"state": optimizer_state["state"], "settings": settings}


# --- whole state dicts, to and from torch's -----------------------------------------------


def exchange(source: str, targets: tuple[str, ...]) -> None:
    with quiet():
        for target in targets:
            # On CPUs, torch's FSDP1 with use_orig_params saves the last tensor of a parameter's
            # state in the place of all: its buffer is used again. So, one tensor.
            kept = "sgd" if "fsdp1" in (source, target) else "adamw"
            trained, loaded = make(source, 0, kept), make(target, 1, kept)
            train_alike(*trained)
            state = copied(full_state(source, trained))
            losses = train_alike(*trained)

            load_full(target, loaded, copied(state))

            model, optimizer = full_state(target, loaded)
            where = f"{source} -> {target}"
            assert_same(model, state[0], where)
            assert_same(by_parameter(optimizer), by_parameter(state[1]), where)
            # Sums over the ranks of a mean, in other orders.
            assert train_alike(*loaded) == pytest.approx(losses, rel=1e-5, abs=0), where


def exchange_with_torchs() -> None:
    for source in TORCHS:
        exchange(source, OURS)


def exchange_with_all() -> None:
    for source in OURS:
        exchange(source, OURS + TORCHS)
    # By torch's functions instead of the wrapper's.
    exchange("wrapper_by_torch", ("wrapper", "process"))
    exchange("process", ("wrapper_by_torch",))


def test_whole_state_of_torchs_wrappers_and_one_process_loads_into_ours(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(exchange_with_torchs, 2, timeout_s=110)


def test_our_whole_state_loads_into_torchs_wrappers_and_one_process(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(exchange_with_all, 2, timeout_s=110)


# --- checkpoints, on another number of ranks, in other processes --------------------------


def sharded_state(made: Kind) -> tuple[StateDict, StateDict]:
    return get_state_dict(*made)


def save_with_torch(path: Path, kinds: dict[str, str]) -> dict[str, Any]:
    """Train, and save what torch's functions, unpatched, find in a model and an optimizer."""
    found = {}
    for kind, kept in kinds.items():
        with quiet():
            made = make(kind, 0, kept)
            train_alike(*made)
            model, optimizer = sharded_state(made)
            if kind in OURS:
                sharded = {name: model[name] for name, _ in made[0].named_parameters()}
                assert all(isinstance(value, DTensor) for value in sharded.values()), kind
                moments = [state["exp_avg"] for state in optimizer["state"].values()]
                assert all(isinstance(moment, DTensor) for moment in moments), kind
            save({"model": model, "optimizer": optimizer}, checkpoint_id=path / kind)
            # One process trains alike, exactly: a mean of equal gradients is that gradient. And
            # torch's FSDP1 cannot be asked, see `exchange`.
            alone = make("process", 0, kept)
            train_alike(*alone)
            found[kind] = copied(full_state("process", alone)), train_alike(*alone)
    return found


def load_with_torch(path: Path, saved: dict[str, Any], kinds: dict[str, str]) -> None:
    for source, kept in kinds.items():
        for target in OURS:
            made = make(target, 1, kept)
            model, optimizer = sharded_state(made)
            values = {"model": model, "optimizer": optimizer}

            with quiet():
                load(values, checkpoint_id=path / source)
            set_state_dict(
                *made, model_state_dict=values["model"], optim_state_dict=values["optimizer"]
            )

            expected, losses = saved[source]
            where = f"{source} -> {target}"
            model, optimizer = full_state(target, made)
            assert_same(model, expected[0], where)
            assert_same(optimizer["state"], expected[1]["state"], where)
            # Gradients of two ranks are added up in another order than those of four.
            assert train_alike(*made) == pytest.approx(losses, rel=1e-4, abs=0), where


def test_torchs_checkpoints_of_four_ranks_load_on_two(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    kinds = dict.fromkeys(OURS, "adamw")

    saved, *_ = run_on_ranks(save_with_torch, 4, tmp_path, kinds)

    run_on_ranks(load_with_torch, 2, tmp_path, saved, kinds)


def test_sharded_checkpoints_of_torchs_wrapper_load_without_conversion(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    # As ShardedTensors, and, where it was given a mesh, as DTensors.
    kinds = dict.fromkeys(("fsdp1", "fsdp1_flat", "fsdp1_mesh"), "adamw")

    saved, *_ = run_on_ranks(save_with_torch, 4, tmp_path, kinds)

    run_on_ranks(load_with_torch, 2, tmp_path, saved, kinds)


def load_by_the_recipe_for_torchs_wrapper(path: Path, saved: dict[str, Any]) -> None:
    for source, (expected, _) in saved.items():
        model, optimizer = make("wrapper", 1)
        with quiet(), Wrapper.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT):
            values = {"model": model.state_dict()}
            load(values, checkpoint_id=path / source)
            # It reads into ShardedTensors, cut evenly over all ranks.
            read = load_sharded_optimizer_state_dict(
                values["model"], "optimizer", FileSystemReader(path / source)
            )
            state = read["optimizer"]
            assert not isinstance(state["state"]["body.weight"]["exp_avg"], DTensor)

            model.load_state_dict(values["model"])
            optimizer.load_state_dict(Wrapper.optim_state_dict_to_load(model, optimizer, state))

        found = full_state("wrapper", (model, optimizer))
        assert_same(found[0], expected[0], source)
        assert_same(found[1]["state"], expected[1]["state"], source)
        copies = Wrapper(Odd(), sharding_strategy=fsdp.ShardingStrategy.NO_SHARD)
        with pytest.raises(ValueError, match=r"exp_avg.* of \S+ is a ShardedTensor that is cut"):
            Wrapper.flatten_sharded_optim_state_dict(state, copies, optimizer_of(copies))


def test_checkpoints_load_by_the_recipe_for_torchs_wrapper(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    kinds = dict.fromkeys(("fsdp1", "wrapper"), "adamw")

    saved, *_ = run_on_ranks(save_with_torch, 2, tmp_path, kinds)

    # Three ranks: some hold no rows of some parameters.
    run_on_ranks(load_by_the_recipe_for_torchs_wrapper, 3, tmp_path, saved)


def save_with_ours(path: Path) -> dict[str, Any]:
    model, optimizer = made = make("wrapper", 0)
    train_alike(*made)
    assert Wrapper.get_state_dict_type(model).state_dict_type.name == "FULL_STATE_DICT"

    whole, DTensor.full_tensor = DTensor.full_tensor, refused  # type: ignore[method-assign]
    save_checkpoint(path, model, optimizer)
    DTensor.full_tensor = whole  # type: ignore[method-assign]

    assert Wrapper.get_state_dict_type(model).state_dict_type.name == "FULL_STATE_DICT"
    return {"state": copied(full_state("wrapper", made)), "losses": train_alike(*made)}


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a tensor was made whole")


def load_with_ours(path: Path, saved: dict[str, Any]) -> None:
    for kind in OURS:
        made = make(kind, 1)
        whole, DTensor.full_tensor = DTensor.full_tensor, refused  # type: ignore[method-assign]

        load_checkpoint(path, *made)

        DTensor.full_tensor = whole  # type: ignore[method-assign]
        model, optimizer = full_state(kind, made)
        assert_same(model, saved["state"][0], kind)
        assert_same(optimizer["state"], saved["state"][1]["state"], kind)
        assert train_alike(*made) == pytest.approx(saved["losses"], rel=1e-4, abs=0), kind


def test_a_checkpoint_of_a_wrapped_model_is_saved_sharded_and_loads_on_other_ranks(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    saved, *_ = run_on_ranks(save_with_ours, 4, tmp_path / "checkpoint")

    run_on_ranks(load_with_ours, 2, tmp_path / "checkpoint", saved)


# --- the module's own state_dict and load_state_dict ---------------------------------------


class Stateful(nn.Module):
    """Beside parameters: buffers, one of which is not saved, state of another kind, a version."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.body = nn.Sequential(nn.Linear(5, 3))
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.seed = seed

    def get_extra_state(self) -> StateDict:
        return {"seed": self.seed}

    def set_extra_state(self, state: StateDict) -> None:
        self.seed = state["seed"]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.tied(self.body(self.norm(self.first(x))))
        return made


TYPES = (
    fsdp.StateDictType.FULL_STATE_DICT,
    fsdp.StateDictType.SHARDED_STATE_DICT,
    fsdp.StateDictType.LOCAL_STATE_DICT,
)


def nested(seed: int = 0) -> Wrapper:
    """A wrapper, below it a plain container, below that another wrapper."""
    model = Stateful(seed)
    model.body[0] = Wrapper(model.body[0])
    model.set_submodule("norm", Wrapper(model.norm))
    return Wrapper(model)


def whole_state(model: nn.Module) -> StateDict:
    with Wrapper.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT):
        found: StateDict = copied(model.state_dict())
    return found


def every_type() -> None:
    expected = Stateful(0).state_dict()
    for kind in TYPES:
        for assign in (False, True):
            model, other = nested(0), nested(1)
            with Wrapper.state_dict_type(model, kind):
                given = model.state_dict()
                kept = model.state_dict(keep_vars=True)
                prefixed = model.state_dict(prefix="model.")

            with Wrapper.state_dict_type(other, kind):
                result = other.load_state_dict(given, assign=assign)

            assert not result.missing_keys
            assert not result.unexpected_keys
            assert_same(whole_state(other), expected, f"{kind.name}, assign={assign}")
            assert other.seed == 0
            assert list(given) == list(expected)
            assert list(prefixed) == [f"model.{name}" for name in expected]
            assert given["first.weight"] is given["tied.weight"]  # gathered once, saved once
            rows = given["first.weight"]
            sharded = kind is fsdp.StateDictType.SHARDED_STATE_DICT
            assert isinstance(rows, DTensor) == sharded
            assert (
                kept["first.weight"] is dict(model.named_parameters())["first.weight"]
            ) == sharded
            assert other(torch.ones(4, 3)).isfinite().all()
            assert other.first.weight is other.tied.weight  # whatever was loaded
    states: tuple[Any, Any] = nested(0).state_dict(), Stateful(0).state_dict()
    wrapper_versions, versions = (each._metadata for each in states)
    assert {name: wrapper_versions[name] for name in versions} == versions


def only_the_first_rank() -> None:
    model = nested(0)
    config = fsdp.FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    kind = fsdp.StateDictType.FULL_STATE_DICT

    with Wrapper.state_dict_type(model, kind, config):
        given = model.state_dict()

    assert given.keys() == (Stateful().state_dict().keys() if dist.get_rank() == 0 else set())
    live = {each.to_local().data_ptr() for each in model.parameters() if isinstance(each, DTensor)}
    names = [name for name, _ in Stateful().named_parameters()] if given else []
    assert not live & {given[name].data_ptr() for name in names}


def test_state_dicts_of_every_type_load_again(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(every_type, 3)


def test_rank0_only_gives_a_copy_to_one_rank_and_nothing_to_others(
    run_on_ranks: RunOnRanks,
) -> None:
    for ranks in (1, 2):  # one rank holds all of it, and must not give its very memory
        run_on_ranks(only_the_first_rank, ranks)


def what_does_not_fit() -> None:
    plain_root = nn.Sequential(nested(0), nn.Linear(5, 2))
    for model, prefix in ((nested(0), ""), (plain_root, "0.")):
        wrong = whole_state(model)
        del wrong[f"{prefix}norm.weight"]
        wrong[f"{prefix}body.0.other"] = torch.ones(1)
        result = model.load_state_dict(wrong, strict=False)
        wrong[f"{prefix}body.0.weight"] = torch.zeros(4, 5)

        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(wrong)

        assert result.missing_keys == [f"{prefix}norm.weight"]
        assert result.unexpected_keys == [f"{prefix}body.0.other"]
        message = str(caught.value)
        assert f'Missing key(s) in state_dict: "{prefix}norm.weight"' in message
        assert f'Unexpected key(s) in state_dict: "{prefix}body.0.other"' in message
        assert f"size mismatch for {prefix}body.0.weight: copying" in message
        assert "_fsdp_wrapped_module" not in message
    model = nested(0)
    with (
        Wrapper.state_dict_type(model, fsdp.StateDictType.LOCAL_STATE_DICT),
        pytest.raises(
            ValueError, match=r"^first\.weight in a LOCAL_STATE_DICT has the shape \(5, 3"
        ),
    ):
        model.load_state_dict(Stateful().state_dict())


def test_what_does_not_fit_is_told_with_plain_names(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(what_does_not_fit, 2)


def types_in_a_tree() -> None:
    full, sharded, local = TYPES
    model = nn.Sequential(nested(0), Wrapper(nn.Linear(5, 2)))
    Wrapper.set_state_dict_type(model[1], sharded)

    given = model.state_dict()
    assert isinstance(given["1.weight"], DTensor)
    assert not isinstance(given["0.first.weight"], DTensor)
    with pytest.raises(ValueError, match=r"differently \(FULL_STATE_DICT, SHARDED_STATE_DICT"):
        Wrapper.get_state_dict_type(model)
    with Wrapper.state_dict_type(model, local):
        assert Wrapper.get_state_dict_type(model).state_dict_type is local
    assert Wrapper.get_state_dict_type(model[1]).state_dict_type is sharded  # each as it was
    assert Wrapper.set_state_dict_type(model, local).state_dict_type is full
    assert Wrapper.get_state_dict_type(model).state_dict_type is local
    with pytest.raises(ValueError, match="holds no FullyShardedDataParallel"):
        Wrapper.set_state_dict_type(nn.Linear(2, 2), full)


def test_types_are_set_for_whole_trees_whatever_was_set_in_them(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(types_in_a_tree, 2)


def hooks_of_the_user() -> None:
    model = nested(0)
    seen: list[tuple[str, Any]] = []
    inner = model.module
    assert isinstance(inner, Stateful)
    # torch's own registrations have no types
    on: Any = model
    inside: Any = inner
    inside.register_state_dict_post_hook(
        lambda module, values, prefix, about: values.__setitem__(f"{prefix}added", torch.ones(2))
    )
    on.register_state_dict_post_hook(
        lambda module, values, prefix, about: seen.append(("saved", values["first.weight"].shape))
    )

    def forgive(module: nn.Module, keys: Any) -> None:
        seen.append(("missing", [*keys.missing_keys]))
        keys.missing_keys.clear()

    on.register_load_state_dict_post_hook(forgive)
    inside.register_load_state_dict_pre_hook(
        lambda module, values, prefix, *others: values.pop(f"{prefix}added")
    )

    given = model.state_dict()
    del given["first.bias"]
    result = model.load_state_dict(given)

    assert seen == [("saved", torch.Size([5, 3])), ("missing", ["first.bias"])]
    assert "added" in given
    assert not result.missing_keys  # the hook took it away, and strict loading does not mind


def test_hooks_of_the_user_see_final_values_and_plain_names(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(hooks_of_the_user, 2)


def other_wrappers() -> None:
    expected = Stateful(1).state_dict()
    around = Stateful(0)
    around.body[0] = checkpoint_wrapper(Wrapper(around.body[0]))
    for model in (Wrapper(checkpoint_wrapper(Stateful(0))), Wrapper(around)):
        for kind in TYPES:
            model.load_state_dict(expected)
            with Wrapper.state_dict_type(model, kind):
                given = model.state_dict()
                model.load_state_dict(given)
            assert list(given) == list(expected)
            assert_same(whole_state(model), expected, kind.name)

    partly = Stateful(0)
    partly.body[0] = Wrapper(partly.body[0])
    # Its parameters differ among ranks, which DDP must not make equal.
    names = [name for name, _ in partly.named_parameters() if name.startswith("body")]
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(partly, names)
    outside = ddp(partly)
    outside.load_state_dict({f"module.{name}": value for name, value in expected.items()})
    outside(torch.ones(4, 3)).sum().backward()
    assert_same(whole_state(outside), {f"module.{n}": v for n, v in whole_state(partly).items()})


def test_wrappers_of_torchs_around_and_inside(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(other_wrappers, 2)


def at_any_moment() -> None:
    model, reference = models = nested(0), nested(0)
    batch = torch.ones(4, 3) * (1 + dist.get_rank())
    found: list[StateDict] = []

    for each in models:
        watched = each is model

        def look(*_: Any, watched: bool = watched) -> None:
            if watched:
                found.append(model.state_dict())

        with each.no_sync():
            each(batch).sum().backward()
            look()  # gradients wait on this rank for a reduction
        output = each(batch)
        look()
        output.register_hook(look)
        output.sum().backward()
        look()

    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        grads = param.grad, expected[name].grad
        assert isinstance(grads[0], DTensor), name
        assert isinstance(grads[1], DTensor), name
        assert_same(grads[0].to_local(), grads[1].to_local(), name)
    assert len(found) == 4
    whole = Stateful(0).state_dict()
    for values in found:
        for name, _ in model.named_parameters():
            assert_same(values[name], whole[name], name)


def test_a_state_dict_may_be_taken_between_and_inside_backwards(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(at_any_moment, 2)
