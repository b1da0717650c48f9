"""FullyShardedDataParallel as a module: its arguments, names, attributes and what it refuses."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trine.distributed.fsdp import (
    CommError,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from trine.distributed.fsdp.wrap import ModuleWrapPolicy

RunOnRanks = Callable[..., list[Any]]

# What is wrapped shows through, which no type says.
FSDP: Any = FullyShardedDataParallel


class Tied(nn.Module):
    """An embedding that is the output too, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.note = "mine"

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(self.embedding(tokens)) * self.scale)
        return logits

    def count(self) -> int:
        return sum(1 for _ in self.inner)


def made() -> Tied:
    torch.manual_seed(0)
    return Tied()


def whole(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def has_the_names_and_attributes_of_what_it_wraps() -> None:
    plain, model = made(), made()
    model.inner = FullyShardedDataParallel(model.inner)  # type: ignore[assignment]
    wrapped = FSDP(model)

    assert type(wrapped) is FullyShardedDataParallel
    assert wrapped.module is model
    assert dict(wrapped.named_children()) == {"_fsdp_wrapped_module": model}
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (list(getattr(each, kind)()) for each in (wrapped, plain))
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert all(torch.equal(whole(a), b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    everywhere = dict(wrapped.named_parameters(remove_duplicate=False))
    assert everywhere["head.weight"] is everywhere["embedding.weight"]
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert wrapped.note == "mine"
    assert wrapped.count() == 3
    assert wrapped.inner[2] is wrapped.get_submodule("inner.2")
    for name, module in wrapped.named_modules():
        assert wrapped.get_submodule(name) is module
    assert wrapped.get_parameter("inner.0.bias") is everywhere["inner.0.bias"]
    assert wrapped.get_buffer("scale") is model.scale
    assert FullyShardedDataParallel.fsdp_modules(wrapped) == [wrapped, model.inner]
    assert FullyShardedDataParallel.fsdp_modules(wrapped, root_only=True) == [wrapped]
    assert not wrapped._has_params
    assert wrapped.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert wrapped.process_group is dist.group.WORLD
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = wrapped.nothing_like_it
    assert "FULL_SHARD, shards=" in repr(wrapped)


def exchanges_what_it_wraps_in_place() -> None:
    wrapped = FSDP(made())

    # Exchanged modules are not sharded: they would have to be wrapped.
    wrapped.set_submodule("inner.1", nn.ReLU())
    wrapped.scale = torch.ones(5)
    wrapped.other = nn.Identity()

    assert isinstance(wrapped.module.inner[1], nn.ReLU)
    assert torch.equal(wrapped.module.scale, torch.ones(5))
    assert "other" in dict(wrapped.named_children())
    assert "scale" not in dict(nn.Module.named_buffers(wrapped, recurse=False))


def runs_hooks_outside_of_the_engine_as_torchs_does() -> None:
    seen: list[list[str]] = []
    for api in (FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel):
        model = nn.Linear(4, 6)
        order: list[str] = []

        def note(when: str, model: nn.Linear = model, order: list[str] = order) -> Any:
            def hook(*_: object) -> None:
                held = model.weight
                is_whole = held.shape == (6, 4) and not isinstance(held, DTensor)
                order.append(f"{when}: {'whole' if is_whole else 'sharded'}")

            return hook

        wrapped = api(model, device_id=torch.device("cpu"), use_orig_params=True)
        wrapped.register_forward_pre_hook(note("before the wrapper"))
        model.register_forward_pre_hook(note("before the module"))
        model.register_forward_hook(note("after the module"))
        wrapped(torch.randn(2, 4))
        seen.append(order)

    if dist.get_world_size() == 1:
        seen[1][0] = "before the wrapper: sharded"  # a world of one is not sharded by torch
    assert seen[0] == seen[1]


def holds_what_its_strategy_says() -> None:
    size = dist.get_world_size()
    for strategy in ShardingStrategy:
        wrapped = FSDP(nn.Linear(3, 12), sharding_strategy=strategy)
        weight = wrapped.weight
        assert isinstance(weight, DTensor)
        rows = 12 if strategy is ShardingStrategy.NO_SHARD else 12 // size
        assert weight.to_local().shape == (rows, 3), strategy
        # One host holds one copy.
        expected = {
            ShardingStrategy.NO_SHARD: [Replicate()],
            ShardingStrategy.HYBRID_SHARD: [Replicate(), Shard(0)],
            ShardingStrategy._HYBRID_SHARD_ZERO2: [Replicate(), Shard(0)],
        }.get(strategy, [Shard(0)])
        assert list(weight.placements) == expected

        wrapped(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()

        assert weight.grad is not None
        mean = (size + 1) / 2  # of 1 to size
        torch.testing.assert_close(whole(weight.grad), torch.full((12, 3), mean))


def averages_over_all_axes_of_a_mesh() -> None:
    size = dist.get_world_size()
    for shape in ((1, size), (size, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for strategy in (None, ShardingStrategy.HYBRID_SHARD):
            wrapped = FSDP(nn.Linear(3, 12), device_mesh=mesh, sharding_strategy=strategy)
            assert wrapped.sharding_strategy is ShardingStrategy.HYBRID_SHARD

            wrapped(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()

            weight = wrapped.weight
            assert weight.to_local().shape == (12 // shape[1], 3)
            torch.testing.assert_close(whole(weight.grad), torch.full((12, 3), (size + 1) / 2))


def takes_groups_for_a_mesh() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    alone = dist.new_group([rank], use_local_synchronization=True)
    for shard, replicate, rows in ((world, alone, 12 // size), (alone, world, 12)):
        wrapped = FSDP(nn.Linear(3, 12), (shard, replicate), ShardingStrategy.HYBRID_SHARD)

        wrapped(torch.full((1, 3), 1.0 + rank)).sum().backward()

        assert wrapped.weight.to_local().shape == (rows, 3)
        torch.testing.assert_close(whole(wrapped.weight.grad), torch.full((12, 3), (size + 1) / 2))


def takes_objects_of_torchs() -> None:
    wrapped = FSDP(
        made(),
        sharding_strategy=torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=torch_fsdp.CPUOffload(offload_params=True),
        backward_prefetch=torch_fsdp.BackwardPrefetch.BACKWARD_POST,
        mixed_precision=torch_fsdp.MixedPrecision(
            param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
        ),
    )

    assert wrapped.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert wrapped.cpu_offload == CPUOffload(offload_params=True)
    assert wrapped(torch.tensor([1, 2])).dtype is torch.bfloat16
    with FullyShardedDataParallel.state_dict_type(
        wrapped,
        torch_fsdp.StateDictType.SHARDED_STATE_DICT,  # type: ignore[arg-type]
        torch_fsdp.ShardedStateDictConfig(offload_to_cpu=True),  # type: ignore[arg-type]
    ):
        settings = FullyShardedDataParallel.get_state_dict_type(wrapped)
        assert settings.state_dict_type is StateDictType.SHARDED_STATE_DICT


def gives_memory_and_the_first_ranks_values() -> None:
    torch.manual_seed(0)
    expected = Tied().state_dict()
    torch.manual_seed(dist.get_rank())
    wrapped = FSDP(Tied(), sync_module_states=True)
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, expected[name]), name

    with torch.device("meta"):
        on_meta = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    torch.manual_seed(3)
    wrapped = FSDP(on_meta, auto_wrap_policy=ModuleWrapPolicy({nn.BatchNorm1d}))
    torch.manual_seed(3)
    plain: Any = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    torch.manual_seed(3)
    plain[1].reset_parameters()  # wrapped first, but draws nothing
    plain[0].reset_parameters()
    plain[2].reset_parameters()
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name

    with torch.device("meta"):
        tied: Any = Tied()
        tied.register_buffer("scale", torch.empty(5))

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.fill_(tensor.numel())

    wrapped = FSDP(tied, param_init_fn=fill)
    values = wrapped.state_dict()
    assert all(torch.equal(v, torch.full_like(v, v.numel())) for v in values.values())
    assert wrapped.module.head.weight is wrapped.module.embedding.weight


def leaves_what_is_ignored() -> None:
    for option in ("ignored_modules", "ignored_states"):
        model = made()
        params = dict(model.named_parameters())
        wrapped = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Embedding, nn.Sequential}),
            **{option: [model.inner[0], model.embedding, model.head]},
        )
        left = {name for name, param in wrapped.named_parameters() if param is params[name]}
        assert left == {"embedding.weight", "inner.0.weight", "inner.0.bias"}
        assert isinstance(model.inner, FullyShardedDataParallel)
    model = made()
    FSDP(model, ignored_states=[model.embedding.weight])
    assert not isinstance(model.embedding.weight, DTensor)


def casts_what_mixed_precision_says() -> None:
    half = torch.bfloat16

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.inner = nn.Linear(4, 4)
            self.shift, self.calls = nn.Buffer(torch.full((4,), 1 / 3)), nn.Buffer(torch.zeros(()))
            self.steps = nn.Buffer(torch.tensor(3))
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            normed = self.norm(x)
            self.dtypes = [x.dtype, normed.dtype, self.shift.dtype, self.steps.dtype]
            out: Tensor = self.inner(normed) + self.shift
            return out

    torch.manual_seed(0)
    policy = MixedPrecision(half, torch.float32, half, keep_low_precision_grads=False)
    wrapped = FSDP(Seen(), mixed_precision=policy)
    output = wrapped(torch.randn(8, 4))
    output.sum().backward()

    assert wrapped.dtypes == [half, half, half, torch.int64]
    assert output.dtype is half
    values = wrapped.state_dict()
    floating = {k: v.dtype for k, v in values.items() if v.is_floating_point()}
    assert set(floating.values()) == {torch.float32}
    assert values["calls"] == 1
    assert torch.equal(values["shift"], torch.full((4,), 1 / 3))  # not rounded
    # Batch norm computes in full precision, on its own.
    assert isinstance(wrapped.module.norm, FullyShardedDataParallel)
    assert not torch.equal(values["norm.running_mean"], values["norm.running_mean"].to(half))
    assert wrapped.inner.weight.grad.dtype is torch.float32

    policy = MixedPrecision(half, keep_low_precision_grads=True, cast_root_forward_inputs=False)
    wrapped = FSDP(nn.Linear(4, 4), mixed_precision=policy)
    with pytest.raises(RuntimeError, match="dtype"):
        wrapped(torch.randn(8, 4))
    for micro in range(2):
        wrapped(torch.randn(8, 4).to(half)).sum().backward()
        assert wrapped.weight.dtype is torch.float32
        assert wrapped.weight.grad.dtype is half, micro


def follows_casts_and_moves() -> None:
    wrapped = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    x = torch.randn(2, 4)
    for method, arguments, dtype in (
        ("double", (), torch.float64),
        ("bfloat16", (), torch.bfloat16),
        ("type", (torch.float32,), torch.float32),
        ("to", ("cpu", torch.float64), torch.float64),
    ):
        wrapped(x.to(wrapped.weight.dtype)).sum().backward()
        getattr(wrapped, method)(*arguments)
        assert isinstance(wrapped.weight, DTensor)
        assert wrapped(x.to(dtype)).dtype is dtype
    wrapped.to_empty(device="cpu")
    wrapped.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
    torch.testing.assert_close(wrapped(x.double()), x.double().sum(1, keepdim=True).expand(2, 4))
    assert wrapped.train(False).module.training is False
    wrapped(x.double()).sum().backward()
    wrapped.zero_grad()
    assert all(param.grad is None for param in wrapped.parameters())


def computes_in_modules_that_look_into_those_inside() -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    expected = plain(x).detach()
    wrapped = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), expected)


BODIES = [
    computes_in_modules_that_look_into_those_inside,
    has_the_names_and_attributes_of_what_it_wraps,
    exchanges_what_it_wraps_in_place,
    runs_hooks_outside_of_the_engine_as_torchs_does,
    holds_what_its_strategy_says,
    averages_over_all_axes_of_a_mesh,
    takes_groups_for_a_mesh,
    takes_objects_of_torchs,
    gives_memory_and_the_first_ranks_values,
    leaves_what_is_ignored,
    casts_what_mixed_precision_says,
    follows_casts_and_moves,
]


def each_body() -> None:
    for body in BODIES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own wrapper
                warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
                warnings.filterwarnings("ignore", message=".*NumPy")
                body()
        except BaseException as error:
            error.add_note(f"A wrapper {body.__name__.replace('_', ' ')}.")
            raise


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_a_wrapper_is_to_its_user(run_on_ranks: RunOnRanks, world_size: int) -> None:
    run_on_ranks(each_body, world_size)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no module": (lambda: FullyShardedDataParallel(3), TypeError, "got int"),  # type: ignore[arg-type]
    "a list": (
        lambda: FullyShardedDataParallel(nn.ModuleList([nn.Linear(2, 2)])),
        ValueError,
        "ModuleList has no forward",
    ),
    "sharded before": (
        lambda: FullyShardedDataParallel(fully_shard(nn.Linear(2, 2))),
        ValueError,
        "fully_shard was called on this Linear before",
    ),
    "a strategy by name": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy="FULL_SHARD"),  # type: ignore[arg-type]
        TypeError,
        r"sharding_strategy must be a ShardingStrategy or None, got 'FULL_SHARD' \(str\)",
    ),
    "a policy of fully_shard": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2), mixed_precision=torch.bfloat16),  # type: ignore[arg-type]
        TypeError,
        "mixed_precision must be a MixedPrecision",
    ),
    "a dtype that is none": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2), mixed_precision=MixedPrecision("half")),  # type: ignore[arg-type]
        TypeError,
        "MixedPrecision.param_dtype",
    ),
    "a pair for one": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2), (dist.group.WORLD, dist.group.WORLD)),  # type: ignore[arg-type]
        ValueError,
        "FULL_SHARD takes one process_group, got 2",
    ),
    "one for a pair": (
        lambda: FullyShardedDataParallel(
            nn.Linear(2, 2), dist.group.WORLD, ShardingStrategy.HYBRID_SHARD
        ),
        ValueError,
        "the group that holds copies",
    ),
    "a flat mesh for a hybrid": (
        lambda: FullyShardedDataParallel(
            nn.Linear(2, 2),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=init_device_mesh("cpu", (1,)),
        ),
        ValueError,
        "HYBRID_SHARD on a device_mesh of 1 axes",
    ),
    "a hybrid's mesh for a flat one": (
        lambda: FullyShardedDataParallel(
            nn.Linear(2, 2),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            device_mesh=init_device_mesh("cpu", (1, 1)),
        ),
        ValueError,
        "FULL_SHARD on a device_mesh of 2 axes",
    ),
    "both kinds of ignored": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2), ignored_modules=[], ignored_states=[]),
        ValueError,
        "not both",
    ),
    "one ignored module": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2), ignored_modules=nn.Linear(2, 2)),  # type: ignore[arg-type]
        TypeError,
        "ignored_modules must be an iterable",
    ),
    "no way to initialize": (
        lambda: FullyShardedDataParallel(_Bare()),
        ValueError,
        r"_Bare\) is on the meta device and has no reset_parameters",
    ),
    "a function that does nothing": (
        lambda: FullyShardedDataParallel(_Bare(), param_init_fn=lambda module: None),
        ValueError,
        "on the meta device after param_init_fn",
    ),
    "a device that is none": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2), device_id=1.5),  # type: ignore[arg-type]
        TypeError,
        "device_id must be",
    ),
    "a copy": (lambda: copy.deepcopy(_wrapped()), TypeError, "neither copied nor pickled"),
    "a file": (lambda: pickle.dumps(_wrapped()), TypeError, "neither copied nor pickled"),
    "shared memory": (lambda: _wrapped().share_memory(), RuntimeError, "share_memory"),
    "a config of another type": (
        lambda: FullyShardedDataParallel.set_state_dict_type(
            _wrapped(),
            StateDictType.FULL_STATE_DICT,
            torch_fsdp.ShardedStateDictConfig(),  # type: ignore[arg-type]
        ),
        ValueError,
        "state_dict_config must be a FullStateDictConfig for FULL_STATE_DICT",
    ),
    "no wrapper": (
        lambda: FullyShardedDataParallel.get_state_dict_type(nn.Linear(2, 2)),
        ValueError,
        "holds no FullyShardedDataParallel",
    ),
}


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _wrapped() -> FullyShardedDataParallel:
    return FullyShardedDataParallel(nn.Linear(2, 2))


def refuses_all() -> None:
    for name, (call, kind, words) in REFUSED.items():
        try:
            with pytest.raises(kind, match=words):
                call()
        except BaseException as error:
            error.add_note(f"Refused: {name}.")
            raise


def test_what_is_refused_is_refused_in_words(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(refuses_all, 1)


def test_it_takes_what_torchs_takes() -> None:
    theirs = inspect.signature(torch_fsdp.FullyShardedDataParallel.__init__).parameters
    ours = inspect.signature(FullyShardedDataParallel.__init__).parameters

    assert list(ours) == list(theirs)
    for name in ours:
        default, wanted = ours[name].default, theirs[name].default
        assert default == wanted or getattr(default, "name", default) == wanted.name, name


def ask_alone() -> str:
    model = FSDP(nn.Linear(3, 4))
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(CommError) as refusal:
        model.state_dict()
    return str(refusal.value)


@pytest.mark.only_gloo("over MPI, ranks that leave wait for each other")
def test_a_rank_that_asks_for_whole_state_alone_is_told_so(run_on_ranks: RunOnRanks) -> None:
    said, _ = run_on_ranks(ask_alone, 2)

    assert said.startswith("weight could not be collected on rank 0")
    assert "Every rank must ask for whole state dicts together" in said
