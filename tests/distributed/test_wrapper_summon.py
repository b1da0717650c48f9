"""summon_full_params and apply: the parameters of the unsharded model, and edits of them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trine.distributed import init_mesh
from trine.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)

RunOnRanks = Callable[..., list[Any]]

summon = FullyShardedDataParallel.summon_full_params

# fp32: means over ranks instead of over one batch.
FP32 = 1e-5


class Net(nn.Module):
    """Rows that do not divide, fewer rows than ranks, no dims, a shared and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5, bias=False))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.25]), requires_grad=False)
        self.inner[2].weight = self.inner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(torch.tanh(self.first(x))) * self.scale + self.shift
        return out


def pair(
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **options: Any
) -> tuple[FullyShardedDataParallel, Net]:
    """A wrapped model, its inner part wrapped by itself, and the same unwrapped."""
    torch.manual_seed(0)
    reference = Net()
    net = copy.deepcopy(reference)
    for each in (reference, net):
        each.first.weight.note = "kept"  # type: ignore[attr-defined]
    if strategy.is_hybrid:
        copies = dist.get_world_size() // 2
        options["device_mesh"] = init_mesh({"replicate": copies, "shard": 2})
    options.update(sharding_strategy=strategy, device_id="cpu")
    net.inner = FullyShardedDataParallel(net.inner, **options)  # type: ignore[assignment]
    return FullyShardedDataParallel(net, **options), reference


def batch(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def accumulate(model: FullyShardedDataParallel, reference: Net, times: float = 1.0) -> None:
    """Backward on this rank's batch, and of the mean over all batches without sharding."""
    backward((model(batch(dist.get_rank())) * times).square().mean())
    ranks = dist.get_world_size()
    everything = torch.cat([batch(rank) for rank in range(ranks)])
    backward((reference(everything) * times).square().mean())


def assert_shows(model: nn.Module, reference: nn.Module, *, grads: bool = False) -> None:
    """Names, order, values, identity, what is trained and attributes as in the unsharded model."""
    ours, theirs = list(model.named_parameters()), list(reference.named_parameters())
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, param), (_, expected) in zip(ours, theirs, strict=True):
        assert type(param) is nn.Parameter, name
        torch.testing.assert_close(param, expected, rtol=0, atol=0)
        assert param.requires_grad is expected.requires_grad, name
        assert vars(param) == vars(expected), (name, vars(param))
        if grads:
            torch.testing.assert_close(param.grad, expected.grad, rtol=FP32, atol=FP32)
        else:
            assert param.grad is None, name


def assert_sharded(model: nn.Module) -> None:
    assert all(isinstance(param, DTensor) for param in model.parameters())


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Values by another way than the one that is tested."""
    values = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        values[name] = param.full_tensor().detach().clone()
    return values


def edited(reference: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in reference.named_parameters()}


STRATEGIES = [each for each in ShardingStrategy if not each.is_hybrid]


def see_what_the_unsharded_model_holds(strategies: list[ShardingStrategy]) -> None:
    for strategy in strategies:
        half = MixedPrecision(param_dtype=torch.bfloat16)
        model, reference = pair(strategy, mixed_precision=half)
        for options in ({}, {"offload_to_cpu": True}, {"writeback": False}):
            with summon(model, **options):
                assert_shows(model, reference)
                assert model.inner[0].weight is model.inner[2].weight
                state = model.state_dict()
            assert list(state) == list(reference.state_dict())
            assert_sharded(model)

        model, reference = pair(strategy)
        accumulate(model, reference)
        with summon(model, with_grads=True):
            assert_shows(model, reference, grads=True)
        accumulate(model, reference)
        with torch.inference_mode(), summon(model, with_grads=True, offload_to_cpu=True):
            assert_shows(model, reference, grads=True)
            model.scale.mul_(2)
        accumulate(model, with_scale(reference, 2))
        with summon(nn.ModuleList([model]), with_grads=True):
            assert_shows(model, reference, grads=True)
        with summon(model, recurse=False):
            assert [type(p) for p in model.inner.parameters()] != [nn.Parameter] * 2
            assert type(model.first.weight) is nn.Parameter
        with summon(nn.ModuleList([model]), recurse=False):
            assert_sharded(model)


def with_scale(reference: Net, factor: float) -> Net:
    with torch.no_grad():
        reference.scale.mul_(factor)
    return reference


@pytest.mark.parametrize("ranks", [1, 3])
def test_parameters_and_gradients_are_those_of_the_unsharded_model(
    run_on_ranks: RunOnRanks, ranks: int
) -> None:
    run_on_ranks(see_what_the_unsharded_model_holds, ranks, STRATEGIES)


def test_so_they_are_with_copies_on_groups_of_ranks(run_on_ranks: RunOnRanks) -> None:
    hybrid = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]

    run_on_ranks(see_what_the_unsharded_model_holds, 4, hybrid)


def change(model: Any) -> None:
    """Edits of each kind, of a wrapped model or of an unwrapped one."""
    with torch.no_grad():
        model.first.weight.mul_(2)
        model.first.bias.data = torch.linspace(-1, 1, 5)
        model.inner[0].weight.data.add_(0.5)
        model.inner[0].bias = nn.Parameter(torch.ones(5), requires_grad=False)
        model.scale.fill_(0.125)
        model.shift.requires_grad_(True)
        model.scale.note = "new"


def keep_edits(strategies: list[ShardingStrategy]) -> None:
    for strategy in strategies:
        half = MixedPrecision(param_dtype=torch.bfloat16)
        model, reference = pair(strategy, mixed_precision=half)
        x = batch(dist.get_rank())
        with torch.no_grad():
            before = model(x)
        with summon(model, writeback=False):
            change(model)
        assert torch.equal(model(x), before)  # which leaves the root gathered
        with summon(model, writeback=False, with_grads=True):
            assert_shows(model, reference)

        with summon(model):
            change(model)

        change(reference)
        assert_sharded(model)
        torch.testing.assert_close(whole(model), edited(reference), rtol=0, atol=0)
        expected = copy.deepcopy(reference).bfloat16()(x.bfloat16())
        torch.testing.assert_close(model(x), expected)
        with summon(model):
            assert_shows(model, reference)

        model, reference = pair(strategy)
        accumulate(model, reference)
        with summon(model, with_grads=True):
            change_grads(model)
        change_grads(reference)
        with summon(model, with_grads=True, writeback=False):
            assert_shows(model, reference, grads=True)
            change_grads(model)
            change_grads(model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(whole(model), edited(reference), rtol=FP32, atol=FP32)


def change_grads(model: Any) -> None:
    model.first.weight.grad.mul_(3)
    model.first.bias.grad = None
    model.scale.grad = torch.tensor(7.0)
    model.shift.grad = torch.tensor([9.0])


@pytest.mark.parametrize("ranks", [1, 3])
def test_edits_last_if_they_are_written_back_and_else_vanish(
    run_on_ranks: RunOnRanks, ranks: int
) -> None:
    run_on_ranks(keep_edits, ranks, STRATEGIES)


def edit_on_the_first_rank(strategy: ShardingStrategy) -> None:
    model, reference = pair(strategy)
    accumulate(model, reference)
    first = dist.get_rank() == 0

    with summon(model, rank0_only=True, with_grads=True, offload_to_cpu=True):
        if first:
            assert_shows(model, reference, grads=True)
            change(model)
            change_grads(model)
            assert "first.weight" in model.state_dict()
        else:
            assert_sharded(model)
            with pytest.raises(RuntimeError, match=r"rank0_only=True.* Ask on the first"):
                model.state_dict()

    change(reference)
    change_grads(reference)
    torch.testing.assert_close(whole(model), edited(reference), rtol=0, atol=0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.requires_grad is theirs.requires_grad
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(grad, theirs.grad, rtol=FP32, atol=FP32)

    with summon(model, rank0_only=True, writeback=False):
        if first:
            model.scale.data.zero_()
    torch.testing.assert_close(whole(model), edited(reference), rtol=0, atol=0)

    refusal = r"scale was given the shape \(2,\)" if first else "writes nothing back"
    with pytest.raises(ValueError, match=refusal):
        give_another_shape(model)
    torch.testing.assert_close(whole(model), edited(reference), rtol=0, atol=0)


def give_another_shape(model: FullyShardedDataParallel) -> None:
    with summon(model, rank0_only=True):
        if dist.get_rank() == 0:
            model.scale = nn.Parameter(torch.ones(2))
            model.first.weight.data.zero_()


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_edits_of_the_first_rank_reach_all(
    run_on_ranks: RunOnRanks, strategy: ShardingStrategy
) -> None:
    run_on_ranks(edit_on_the_first_rank, 3, strategy)


def test_edits_of_the_first_rank_reach_all_copies(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(edit_on_the_first_rank, 4, ShardingStrategy.HYBRID_SHARD)


def refuse_and_go_on() -> None:
    model, reference = pair()
    x = batch(dist.get_rank())

    with pytest.raises(KeyError, match="mine"):
        raise_inside(model)
    reference.scale.data.fill_(3)
    assert_sharded(model)

    loss = model(x).square().mean()
    with summon(model):
        for module, given in ((model, x), (model.inner, torch.ones(2, 5))):
            with pytest.raises(RuntimeError, match="forward was called inside summon_full_params"):
                module(given)
        with pytest.raises(RuntimeError, match="entered inside summon_full_params"):
            enter(model.inner)
        with pytest.raises(RuntimeError, match=r"cannot compute.* inside summon_full_params"):
            backward(loss)
        plain: Any = model.module
        assert torch.equal(plain.first(x), reference.first(x))
    model.zero_grad()

    def enter_model(*_: object) -> None:
        enter(model)

    first, inner = model.first, model.inner[0]
    for register, where in (
        (first.register_forward_pre_hook, "forward"),
        (inner.register_forward_hook, "forward"),
        (inner.register_full_backward_hook, "backward"),
    ):
        handle = register(enter_model)
        with pytest.raises(RuntimeError, match=f"entered inside.* {where}"):
            backward(model(x).square().mean())
        handle.remove()
    with pytest.raises(KeyboardInterrupt):
        interrupted(model, x)
    assert_sharded(model)

    for edit, words in (
        (shape_of_weight, r"first\.weight was given the shape \(4, 5\)"),
        (shape_of_data, r"inner\.0\.bias was given the shape \(6,\)"),
        (without_bias, r"first\.bias was taken away"),
        (two_for_one, r"inner\.0\.weight is shared by 2 places"),
    ):
        with pytest.raises(ValueError, match=words):
            edit(model)
        assert_sharded(model)
    with summon(model, writeback=False):
        model.first.bias = None
    with pytest.raises(TypeError, match=r"takes an nn\.Module, got list"):
        enter([model])

    torch.testing.assert_close(whole(model), edited(reference), rtol=0, atol=0)
    model.zero_grad()
    accumulate(model, reference)
    with summon(model, with_grads=True):
        assert_shows(model, reference, grads=True)


def raise_inside(model: FullyShardedDataParallel) -> None:
    with summon(model):
        model.scale.data.fill_(3)
        raise KeyError("mine")


def shape_of_weight(model: Any) -> None:
    with summon(model):
        model.scale.data.zero_()
        model.first.weight = nn.Parameter(torch.ones(4, 5))


def shape_of_data(model: Any) -> None:
    with summon(model):
        model.scale.data.zero_()
        model.inner[0].bias.data = torch.ones(6)


def without_bias(model: Any) -> None:
    with summon(model):
        model.scale.data.zero_()
        model.first.bias = None


def two_for_one(model: Any) -> None:
    with summon(model):
        model.scale.data.zero_()
        model.inner[0].weight = nn.Parameter(torch.zeros(5, 5))
        model.inner[2].weight = nn.Parameter(torch.ones(5, 5))


def enter(module: Any) -> None:
    with summon(module):
        pass


def interrupted(model: FullyShardedDataParallel, x: Tensor) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.inner[0].register_forward_hook(interrupt)
    try:
        model(x)
    finally:
        handle.remove()


def test_what_cannot_be_is_refused_and_the_model_trains_on(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(refuse_and_go_on, 2)


def tensor_nbytes() -> int:
    storages: dict[int, int] = {}
    gc.collect()
    for each in gc.get_objects():
        # Not isinstance, which wakes up what is deprecated.
        if issubclass(type(each), Tensor) and not issubclass(type(each), DTensor):
            storage = each.untyped_storage()
            address = storage.data_ptr()  # several storages may be over one memory
            storages[address] = max(storages.get(address, 0), storage.nbytes())
    return sum(storages.values())


def leave_nothing_behind() -> None:
    model = FullyShardedDataParallel(nn.Linear(512, 512), device_id="cpu")
    backward(model(torch.ones(1, 512)).sum())
    model.zero_grad()
    with summon(model, writeback=False):
        pass
    before = tensor_nbytes()
    seen: list[weakref.ref[Tensor]] = []
    error: Exception | None = None

    try:
        with summon(model):
            seen += [weakref.ref(param) for param in model.parameters()]
            raise RuntimeError("kept, with all that its traceback holds")
    except RuntimeError as raised:
        error = raised

    assert error is not None
    assert [ref() for ref in seen] == [None, None]
    assert tensor_nbytes() == before


def keep_what_waits() -> None:
    model, reference = pair(ShardingStrategy.SHARD_GRAD_OP)

    with model.no_sync():
        accumulate(model, reference)
        with summon(model):
            model.scale.data.mul_(2)
        with_scale(reference, 2)
        with summon(model, with_grads=True):
            assert all(param.grad is None for param in model.parameters())
    accumulate(model, reference, times=3)
    loss = model(batch(dist.get_rank())).square().mean()
    with summon(model, writeback=False):
        pass  # between forward and backward
    backward(loss)
    everything = torch.cat([batch(rank) for rank in range(dist.get_world_size())])
    backward(reference(everything).square().mean())

    with summon(model, with_grads=True):
        assert_shows(model, reference, grads=True)


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
    if isinstance(module, Net):
        nn.init.uniform_(module.scale)


def initialize_like_the_unsharded_model() -> None:
    model, reference = pair()
    plain = nn.Sequential(model, nn.Linear(5, 2))
    torch.manual_seed(0)
    extra = nn.Linear(5, 2)
    seen: list[str] = []

    torch.manual_seed(7)
    assert plain.apply(initialize) is plain

    torch.manual_seed(7)
    nn.Sequential(reference, extra).apply(initialize)
    torch.testing.assert_close(whole(model), edited(reference), rtol=0, atol=0)
    torch.testing.assert_close(plain[1].weight, extra.weight, rtol=0, atol=0)
    assert model.apply(lambda module: seen.append(type(module).__name__)) is model
    assert seen.count("FullyShardedDataParallel") == 2
    assert seen[-1] == "FullyShardedDataParallel"
    with pytest.raises(RuntimeError, match="entered inside summon_full_params"), summon(model):
        model.apply(initialize)


def leave_wait_and_initialize() -> None:
    leave_nothing_behind()
    keep_what_waits()
    initialize_like_the_unsharded_model()
    show_modules_of_fully_shard_too()


def show_modules_of_fully_shard_too() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model = copy.deepcopy(reference)
    fully_shard(model[0])
    wrapped = FullyShardedDataParallel(model, device_id="cpu")

    with summon(wrapped):
        assert_shows(wrapped, reference)
        with pytest.raises(RuntimeError, match="cannot compute"):
            model[0](torch.ones(1, 4))


def test_nothing_whole_is_left_gradients_wait_and_apply_initializes(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(leave_wait_and_initialize, 2)


def show_what_tensor_parallelism_made() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    mesh = init_mesh({"dp": 2, "tp": 2})
    dealt = copy.deepcopy(reference)
    parallelize_module(dealt, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    expected = {name: param.detach().clone() for name, param in dealt.named_parameters()}
    model = FullyShardedDataParallel(dealt, device_mesh=mesh["dp"], device_id="cpu")
    x = batch(mesh.get_local_rank("dp"))
    backward(model(x).square().mean())
    everything = torch.cat([batch(0), batch(1)])
    backward(reference(everything).square().mean())

    for rank0_only in (False, True):
        with summon(model, with_grads=True, rank0_only=rank0_only):
            if not rank0_only or mesh.get_local_rank("dp") == 0:
                for name, param in model.named_parameters():
                    shown, placed = param.data, expected[name]
                    assert isinstance(shown, DTensor)
                    assert isinstance(placed, DTensor)
                    assert shown.placements == placed.placements
                    assert torch.equal(shown.to_local(), placed.to_local())
                    assert isinstance(param.grad, DTensor)
                    torch.testing.assert_close(
                        param.grad.full_tensor(),
                        reference.get_parameter(name).grad,
                        rtol=FP32,
                        atol=FP32,
                    )
                    with torch.no_grad():
                        param.mul_(2)
        for each in expected.values():
            each.mul_(2)
    four_times = {name: 4 * value for name, value in edited(reference).items()}
    torch.testing.assert_close(whole(model), four_times, rtol=0, atol=0)


def test_tensor_parallel_parameters_are_shown_as_they_were_dealt_out(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(show_what_tensor_parallelism_made, 4)
