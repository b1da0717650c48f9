"""reshard_after_forward as a number of ranks, torch's own objects as arguments, and refusals."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore  # torch.distributed does not re-export it
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from trine.core.tracing import TraceEvent, add_sink, remove_sink
from trine.distributed import fsdp, init_mesh
from trine.distributed._fsdp.arguments import as_dims, as_offload_policy, as_precision_policy
from trine.distributed.fsdp import DataParallelMeshDims, FSDPModule, ShardPlacement, fully_shard
from trine.distributed.fsdp.comm import ReduceScatter

RunOnRanks = Callable[..., list[Any]]

needs_torchs_dims = pytest.mark.skipif(
    not hasattr(torch_fsdp, "DataParallelMeshDims"),
    reason=f"torch {torch.__version__} has no DataParallelMeshDims of its own",
)
needs_torchs_placements = pytest.mark.skipif(
    not hasattr(torch_common, "ShardPlacementResult"),
    reason=f"torch {torch.__version__} has no ShardPlacementResult of its own",
)

# fp32: gradients of order 1, sums of a few dozen terms in another order.
FP32 = 2e-6


class Block(nn.Module):
    """Its parameters have rows that 2 and 4 ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.up.weight]  # in a list: not as a parameter of its own
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


SHAPES = [(10, 6), (10,), (6, 10), (6,)]


def gathered_numel(ranks: int) -> int:
    """Elements of a gathered block, with the padding of rows that are not shared evenly."""
    return sum(ranks * ceil(rows / ranks) * (rest[0] if rest else 1) for rows, *rest in SHAPES)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))


def shard_all(model: nn.Sequential, api: Any = fsdp, **options: Any) -> Any:
    for block in (model[0], model[1]):
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def own_batch(step: int = 0) -> Tensor:
    return batch(dist.get_rank(), step)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def backward_over_all_ranks(reference: nn.Module, step: int = 0) -> None:
    losses = [reference(batch(rank, step)).square().mean() for rank in range(dist.get_world_size())]
    backward(torch.stack(losses).mean())


def assert_same_gradients(model: nn.Module, reference: nn.Module, factor: float = 1.0) -> None:
    for (name, ours), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert isinstance(ours.grad, DTensor), name
        assert expected.grad is not None
        torch.testing.assert_close(
            ours.grad.full_tensor(), factor * expected.grad, rtol=FP32, atol=FP32, msg=name
        )


Gathered = tuple[str, int]


@contextmanager
def gathers() -> Iterator[list[Gathered]]:
    """The unit of each all-gather in the block, and the bytes that this rank sent for it."""
    found: list[Gathered] = []

    class Gathers:
        def record(self, event: TraceEvent) -> None:
            if event.name == "all_gather":
                found.append((event.unit, event.nbytes))

    sink = Gathers()
    add_sink(sink)
    try:
        yield found
    finally:
        remove_sink(sink)


# --- reshard_after_forward as a number ---------------------------------------------------


def train_beside_torch(cases: list[tuple[int, dict[str, int]]]) -> None:
    for n, axes in cases:
        mesh = init_mesh(axes)
        ours, theirs = (
            shard_all(copy.deepcopy(build()), api, mesh=mesh, reshard_after_forward=n)
            for api in (fsdp, torch_fsdp)
        )
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
        for step in range(4):
            losses = []
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(own_batch(step)).square().mean()
                backward(loss)
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
            expected = dict(theirs.named_parameters())
            for name, param in ours.named_parameters():
                grad, other = param.grad, expected[name].grad
                assert grad.placements == other.placements
                torch.testing.assert_close(
                    grad.to_local(), other.to_local(), rtol=1e-5, atol=1e-5, msg=f"{name}, {n=}"
                )
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [(1, {"fsdp": 2}), (2, {"fsdp": 2})]),
        (
            4,
            [
                (1, {"fsdp": 4}),
                (2, {"fsdp": 4}),
                (4, {"fsdp": 4}),
                (2, {"ddp": 1, "fsdp": 4}),
                (2, {"ddp": 2, "fsdp": 2}),
            ],
        ),
    ],
)
def test_training_with_a_number_equals_that_of_torch(
    run_on_ranks: RunOnRanks, ranks: int, cases: list[tuple[int, dict[str, int]]]
) -> None:
    run_on_ranks(train_beside_torch, ranks, cases)


def train_axes_taken_as_one() -> None:
    """Four ranks along two axes, in a policy with a cast and with a parameter cut along dim 1."""
    reference = build()
    dims = DataParallelMeshDims(shard=("a", "b"))
    model = shard_all(
        copy.deepcopy(reference),
        mesh=init_mesh({"a": 2, "b": 2}),
        dp_mesh_dims=dims,
        reshard_after_forward=2,
        mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.float64),
        shard_placement_fn=lambda param: Shard(param.dim() - 1),
    )
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        backward(model(own_batch(step)).square().mean())
        backward_over_all_ranks(reference, step)
        assert_same_gradients(model, reference)


def test_a_number_goes_with_axes_taken_as_one_other_dims_and_casts(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(train_axes_taken_as_one, 4)


def gathers_of_steps(given: bool | int) -> list[tuple[list[Gathered], list[Gathered]]]:
    model = shard_all(build(), reshard_after_forward=given)
    steps = []
    for step in range(2):
        model.zero_grad()
        with gathers() as in_forward:
            loss = model(own_batch(step)).square().mean()
        with gathers() as in_backward:
            backward(loss)
        steps.append((in_forward, in_backward))
    return steps


def count_gathers() -> None:
    whole = 4 * gathered_numel(4)  # bytes of a block
    forward = 3 / 4 * whole
    sent_in_backward = {2: 1 / 2 * whole, 4: forward, 1: 0.0}

    for given in (2, 4, 1, True, False):
        expected = sent_in_backward[given] if type(given) is int else given * forward
        for in_forward, in_backward in gathers_of_steps(given):
            blocks = [gather for gather in in_forward if gather[0] != "(root)"]
            assert blocks == [("0", forward), ("1", forward)]
            blocks = [gather for gather in in_backward if gather[0] != "(root)"]
            assert blocks == ([("1", expected), ("0", expected)] if expected else [])


def test_backward_sends_what_a_gather_among_that_number_needs(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(count_gathers, 4)


def live_nbytes() -> int:
    """Bytes of all storages that a Python object younger than `gc.freeze()` holds."""
    # A thread of gloo tells whoever waits first, and lets go of its tensors a moment later.
    found = -1
    while found != (again := _live_nbytes_now()):
        found = again
        time.sleep(0.01)
    return found


def _live_nbytes_now() -> int:
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter):
            storage = each.untyped_storage()
            # Shards have storages of their own at places in a buffer, also at its start.
            at = storage.data_ptr()
            storages[at] = max(storages.get(at, 0), storage.nbytes())
    return sum(storages.values())


def reshard(model: Any) -> None:
    for block in model:
        block.reshard()


def show_state(model: nn.Sequential) -> None:
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


def reset(model: Any) -> None:
    model.reset_iter_state()


def freed_by(free: Callable[[nn.Sequential], None], given: bool | int) -> int:
    """Bytes that `free` frees between forward and backward of two blocks."""
    gc.freeze()  # what is there already need not be looked at
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, reshard_after_forward=given)
    fully_shard(model)
    freed = []
    for step in range(2):
        loss = model(own_batch(step)).square().mean()
        held = live_nbytes()
        free(model)
        freed.append(held - live_nbytes())
        backward(loss)
    held = live_nbytes()
    reshard(model)
    assert held == live_nbytes()  # backward has freed everything
    assert freed[0] == freed[1]
    return freed[0]


def hold_pieces() -> None:
    whole = 2 * 4 * gathered_numel(4)  # bytes of both blocks

    assert freed_by(reshard, given=2) == whole / 2
    assert freed_by(show_state, given=2) == whole / 2
    assert freed_by(reset, given=2) == whole / 2
    assert freed_by(reshard, given=False) == whole
    assert freed_by(reshard, given=True) == 0
    assert freed_by(reshard, given=4) == 0


def test_between_forward_and_backward_a_rank_holds_one_part_of_that_number(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(hold_pieces, 4)


def write_in_between() -> None:
    """Pieces are used as long as they are what a gather from all would give."""
    reference = build()
    model = shard_all(copy.deepcopy(reference), reshard_after_forward=2)
    of_all, of_pieces = 3 * gathered_numel(4), 2 * gathered_numel(4)  # bytes, four an element
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def write() -> None:
        with torch.no_grad():
            for each in (model, reference):
                for param in each.parameters():
                    param.mul_(0.5)

    def gathered_by_a_forward() -> set[int]:
        with gathers() as found:
            model(own_batch()).sum()
        return {nbytes for unit, nbytes in found if unit != "(root)"}

    assert gathered_by_a_forward() == {of_all}
    assert gathered_by_a_forward() == {of_pieces}
    for change in (step, write):
        backward(model(own_batch()).square().mean())
        backward_over_all_ranks(reference)
        model(own_batch()).sum()  # leaves pieces
        change()
        model.zero_grad()
        reference.zero_grad()
        assert gathered_by_a_forward() == {of_all}
        backward(model(own_batch()).square().mean())
        backward_over_all_ranks(reference)
        assert_same_gradients(model, reference)


def test_pieces_of_old_values_are_not_used(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(write_in_between, 4)


def break_off() -> None:
    reference = build()
    model = shard_all(copy.deepcopy(reference), reshard_after_forward=2)
    backward(model(own_batch()).square().mean())

    def fail(*_: object) -> None:
        raise KeyError("on purpose")

    for where in (model[1].down.register_forward_hook, model[0].up.register_full_backward_hook):
        handle = where(fail)
        with pytest.raises(KeyError, match="on purpose"):
            backward(model(own_batch()).square().mean())
        handle.remove()
        model.zero_grad()
        reference.zero_grad()
        backward(model(own_batch()).square().mean())
        backward_over_all_ranks(reference)
        assert_same_gradients(model, reference)


def test_an_iteration_that_broke_off_leaves_no_pieces_that_are_wrong(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(break_off, 4)


class Twice(nn.Module):
    """One block used twice in a forward, the second time recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, torch.tanh(self.block(x)), use_reentrant=False)
        return out


def use_twice() -> None:
    torch.manual_seed(0)
    reference = Twice()
    model = copy.deepcopy(reference)
    fully_shard(model.block, reshard_after_forward=2)
    fully_shard(model)
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        loss = model(own_batch(step)).square().mean()
        with gathers() as found:
            backward(loss)
        assert [nbytes for _, nbytes in found] == [2 * gathered_numel(4)] * 2
        backward_over_all_ranks(reference, step)
        assert_same_gradients(model, reference)


def test_a_block_used_twice_is_gathered_from_pieces_for_both_backwards(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(use_twice, 4)


def set_to_all() -> None:
    model = shard_all(build(), reshard_after_forward=2)
    model[0].set_reshard_after_forward(True)
    model[1].set_reshard_after_forward(False)
    backward(model(own_batch()).square().mean())
    loss = model(own_batch()).square().mean()

    with gathers() as found:
        backward(loss)

    assert [gather for gather in found if gather[0] != "(root)"] == [("0", 3 * gathered_numel(4))]


def test_set_reshard_after_forward_takes_the_place_of_a_number(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(set_to_all, 4)


class CountedAllGather(DefaultAllGather):
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


def gather_with_collectives_of_ones_own() -> None:
    reference = build()
    model = shard_all(copy.deepcopy(reference), reshard_after_forward=2)
    counted = CountedAllGather()
    model[0].set_custom_all_gather(counted)

    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        backward(model(own_batch(step)).square().mean())
        backward_over_all_ranks(reference, step)
        assert_same_gradients(model, reference)
        assert counted.calls == step + 1  # in forward; the one in backward is the engine's


def test_a_custom_all_gather_serves_the_gathers_among_all_ranks(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(gather_with_collectives_of_ones_own, 4)


# --- refusals ----------------------------------------------------------------------------


def refuse_numbers() -> None:
    for given in (0, -1, 3, 8):
        told = rf"reshard_after_forward={given} was given.*divisor of 4 \(1, 2, 4\), True, False"
        with pytest.raises(ValueError, match=told):
            fully_shard(nn.Linear(2, 2), reshard_after_forward=given)

    pairs = init_mesh({"copies": 2, "experts": 2})
    with pytest.raises(ValueError, match=r"the 2 rank\(s\) that weight is sharded over"):
        fully_shard(
            nn.Linear(2, 2),
            reshard_after_forward=4,
            shard_placement_fn=lambda param: (
                ShardPlacement(Shard(0), pairs) if param.dim() > 1 else None
            ),
        )


def test_numbers_that_do_not_divide_the_ranks_are_refused_with_those_that_do(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(refuse_numbers, 4)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("argument", "given", "told"),
    [
        ("mesh", 3, r"a DeviceMesh or None, got 3 \(int\)\. For example mesh=init_mesh"),
        ("reshard_after_forward", "yes", r"True, False, None or a number .* got 'yes'"),
        ("reshard_after_forward", 2.0, r".* a number of ranks, got 2\.0 \(float\)"),
        ("shard_placement_fn", Shard(1), r"a function or None, got .*Shard\)"),
        ("mp_policy", torch.bfloat16, r"a MixedPrecisionPolicy or None, got .*bfloat16"),
        (
            "mp_policy",
            torch_fsdp.MixedPrecision(),
            r".*\(torch.*MixedPrecision\)\. For example",
        ),
        ("offload_policy", True, r"an OffloadPolicy.* got True \(bool\)\. For example"),
        ("offload_policy", torch_fsdp.CPUOffload(), r".*CPUOffload\)"),
        ("ignored_params", torch.ones(1), r"a set of parameters or None, got tensor"),
        ("dp_mesh_dims", "fsdp", r"a DataParallelMeshDims or None, got 'fsdp' \(str\)"),
    ],
)
def test_an_argument_of_another_type_is_refused_with_what_would_do(
    argument: str, given: object, told: str
) -> None:
    arguments: dict[str, Any] = {argument: given}
    model = nn.Linear(2, 2)

    with pytest.raises(TypeError, match=rf"^{argument} must be {told}"):
        fully_shard(model, **arguments)

    assert type(model) is nn.Linear


@pytest.mark.usefixtures("one_rank")
def test_fields_of_another_type_are_refused_where_the_object_is_made() -> None:
    mesh = init_mesh()

    with pytest.raises(TypeError, match=r"ShardPlacement\.placement must be a Shard, got 1"):
        ShardPlacement(1, mesh)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ShardPlacement\.mesh must be a DeviceMesh, got 'mesh'"):
        ShardPlacement(Shard(0), "mesh")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Dims\.shard must be the name of an axis .* got 0\. Name"):
        DataParallelMeshDims(shard=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Dims\.replicate must be the name .* got \('a', 1\)"):
        DataParallelMeshDims(replicate=("a", 1))  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_what_a_sharded_module_cannot_use_is_refused_by_its_methods() -> None:
    model = fully_shard(nn.Linear(2, 2))
    assert isinstance(model, FSDPModule)

    with pytest.raises(TypeError, match=r"takes True or False, got 2\. .* to fully_shard"):
        model.set_reshard_after_forward(2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"class made from AllGather .* got .*all_gather"):
        model.set_custom_all_gather(dist.all_gather)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"class made from ReduceScatter .* got <class"):
        model.set_custom_reduce_scatter(ReduceScatter)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^factor must be a number, got 'a' \(str\)"):
        model.set_gradient_divide_factor("a")  # type: ignore[arg-type]
    for factor in (0.0, -1.0, inf, nan):
        with pytest.raises(ValueError, match="must be positive and finite, got"):
            model.set_reduce_scatter_divide_factor(factor)
    for prefetch in (
        model.set_modules_to_forward_prefetch,
        model.set_modules_to_backward_prefetch,
    ):
        with pytest.raises(TypeError, match=r"got a FSDPLinear\. For one module: \[module\]"):
            prefetch(model)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got a str"):
            prefetch("model")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="gathered ahead, got a Linear"):
            prefetch([nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"^hook must be a function of one tensor or None, got 3"):
        model.set_all_reduce_hook(3)  # type: ignore[arg-type]
    model.set_all_reduce_hook(None)
    for number in ("2", 2.0, True):
        with pytest.raises(TypeError, match="max_input_buffers must be a whole number"):
            model.set_reduce_scatter_max_input_buffers(number)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "switch",
    [
        "set_allocate_memory_from_process_group_for_comm",
        "set_check_finite_gradients",
        "set_force_sum_reduction_for_comms",
        "set_is_last_backward",
        "set_reduce_scatter_unused_params",
        "set_requires_all_reduce",
        "set_requires_gradient_sync",
        "set_reshard_after_backward",
        "set_separate_reduce_scatter_group",
        "set_unshard_in_backward",
        "unshard",
    ],
)
def test_a_switch_takes_what_python_takes_for_a_bool_and_nothing_else(switch: str) -> None:
    call = getattr(fully_shard(nn.Linear(2, 2)), switch)

    for wrong in ("False", None, (), nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=r"^\w+ must be True or False, got"):
            call(wrong)
    for right in (False, 0, torch.tensor(False)):
        call(right)


def test_one_set_of_ignored_parameters_serves_all_calls(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(ignore_by_one_set, 2)


def ignore_by_one_set() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ignored = {param for name, param in model.named_parameters() if name.endswith("bias")}

    for layer in model:
        fully_shard(layer, ignored_params=ignored)

    for name, param in model.named_parameters():
        assert isinstance(param, DTensor) == name.endswith("weight")


# --- torch's own objects -----------------------------------------------------------------


def train_with_torchs_objects() -> None:
    """A program that makes everything but the call itself with torch's FSDP2."""
    reference = build()
    mesh = init_mesh({"copies": 2, "shards": 2})
    columns = FSDPMeshInfo(init_mesh({"all": 4}), shard_mesh_dim=0)
    pairs = HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)

    def place(param: nn.Parameter) -> Any:
        if param.dim() == 1:
            return torch_common.ShardPlacementResult(None, pairs)
        return (
            torch_common.ShardPlacementResult(Shard(1), columns) if param.shape[0] == 10 else None
        )

    model = shard_all(
        copy.deepcopy(reference),
        mesh=mesh,
        dp_mesh_dims=torch_fsdp.DataParallelMeshDims(shard="shards", replicate="copies"),
        mp_policy=torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.float64),
        offload_policy=torch_fsdp.CPUOffloadPolicy(pin_memory=False),
        shard_placement_fn=place,
    )
    placed = {name: param.placements for name, param in model.named_parameters()}
    assert placed["0.up.weight"] == (Shard(1),)
    assert placed["0.up.bias"] == (Shard(0), Replicate())
    assert placed["0.down.weight"] == (Replicate(), Shard(0))
    for block in (model[0], model[1]):
        block.set_custom_all_gather(DefaultAllGather())
        block.set_custom_reduce_scatter(DefaultReduceScatter())
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        out = model(own_batch(step))
        assert out.dtype is torch.float64
        backward(out.square().mean())
        backward_over_all_ranks(reference, step)
        assert_same_gradients(model, reference)


@needs_torchs_dims
@needs_torchs_placements
def test_torchs_own_objects_are_taken_for_ours(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(train_with_torchs_objects, 4)


@needs_torchs_dims
def test_every_field_of_torchs_objects_is_taken() -> None:
    precision: tuple[Any, ...] = (torch.bfloat16, torch.float32, torch.float16, False)

    policy = as_precision_policy(torch_fsdp.MixedPrecisionPolicy(*precision))
    offload = as_offload_policy(torch_fsdp.CPUOffloadPolicy(pin_memory=False))
    no_offload = as_offload_policy(torch_fsdp.OffloadPolicy())
    dims = as_dims(torch_fsdp.DataParallelMeshDims(shard=("a", "b"), replicate="c"))

    assert policy == fsdp.MixedPrecisionPolicy(*precision)
    assert offload == fsdp.CPUOffloadPolicy(pin_memory=False)
    assert no_offload == fsdp.OffloadPolicy()
    assert dims == DataParallelMeshDims(shard=("a", "b"), replicate="c")


@needs_torchs_placements
@pytest.mark.usefixtures("one_rank")
def test_torchs_mesh_of_axes_without_names_must_name_them_unless_the_last_is_sharded() -> None:
    mesh = init_device_mesh("cpu", (1, 1))
    last = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    first = HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)

    def shard_over(info: FSDPMeshInfo) -> None:
        placed: Any = torch_common.ShardPlacementResult(None, info)
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda param: placed)

    shard_over(last)
    with pytest.raises(ValueError, match=r"without names for weight, to be sharded over axis 0 "):
        shard_over(first)
