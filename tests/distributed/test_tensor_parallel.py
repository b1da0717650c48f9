"""Parameters that tensor parallelism has dealt out before: 2-D parallel trains like one rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trine.distributed import init_mesh
from trine.distributed.fsdp import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
)

RunOnRanks = Callable[..., list[Any]]

# fp32: sums of a few dozen terms in another order, over two kinds of ranks.
FP32 = 1e-5
HIDDEN = 6  # dealt out over 2 ranks, each part goes unevenly over 2 more


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, HIDDEN), nn.Linear(HIDDEN, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def deal_out(net: Net, tp: DeviceMesh) -> None:
    """Megatron's cut of each block; the other parameters stay plain."""
    for block in net.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def pair(mesh: DeviceMesh, **options: Any) -> tuple[Net, Net]:
    torch.manual_seed(0)
    reference = Net()
    net = copy.deepcopy(reference)
    deal_out(net, mesh["tp"])
    axes = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    for block in net.blocks:
        fully_shard(block, mesh=mesh[axes], **options)
    fully_shard(net, mesh=mesh[axes], **options)
    return net, reference


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Which data-parallel rank this is, and of how many; tensor-parallel ones see one batch."""
    rank, count = 0, 1
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name != "tp":
            rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
            count *= mesh.size(axis)
    return rank, count


def step(net: nn.Module, reference: nn.Module, mesh: DeviceMesh, number: int) -> None:
    rank, count = data_rank(mesh)
    batches = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(number))
    backward(net(batches[rank]).square().mean())
    backward(torch.stack([reference(x).square().mean() for x in batches]).mean())


def whole(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def assert_same(net: nn.Module, reference: nn.Module, tolerance: float = FP32) -> None:
    expected = dict(reference.named_parameters())
    for name, param in net.named_parameters():
        for ours, theirs in ((param, expected[name]), (param.grad, expected[name].grad)):
            torch.testing.assert_close(
                whole(ours),
                theirs,
                rtol=tolerance,
                atol=tolerance,
                msg=name,
            )


def train(axes: dict[str, int]) -> None:
    mesh = init_mesh(axes)
    net, reference = pair(mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (net, reference)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        step(net, reference, mesh, number)
        norms = [clip_grad_norm_(each.parameters(), 0.1) for each in (net, reference)]
        torch.testing.assert_close(*norms, rtol=FP32, atol=FP32)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(net, reference)


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "tp": 2},
        {"dp": 1, "tp": 2},
        {"dp": 2, "tp": 1},
        {"replicate": 2, "dp": 1, "tp": 2},
        {"replicate": 2, "dp": 2, "tp": 1},
        {"dp": 1, "tp": 3},
    ],
    ids=str,
)
def test_two_kinds_of_parallelism_train_like_one_rank(
    run_on_ranks: RunOnRanks, axes: dict[str, int]
) -> None:
    run_on_ranks(train, math.prod(axes.values()), axes)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_of_every_kind_take_parameters_of_both_meshes(
    run_on_ranks: RunOnRanks, kind: str
) -> None:
    run_on_ranks(step_with, 4, kind)


def step_with(kind: str) -> None:
    options: dict[str, Any] = {"lr": 1e-2, kind: True}
    mesh = init_mesh({"dp": 2, "tp": 2})
    net, reference = pair(mesh)
    ours = torch.optim.AdamW(net.parameters(), **options)
    theirs = torch.optim.AdamW(reference.parameters(), **options)
    for number in range(2):
        net.zero_grad()
        reference.zero_grad()
        step(net, reference, mesh, number)
        ours.step()
        theirs.step()
    assert_same(net, reference)


def sequence_parallel() -> None:
    mesh = init_mesh({"dp": 2, "tp": 2})
    torch.manual_seed(0)
    reference = Block()
    block = copy.deepcopy(reference)
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=True),
    }
    parallelize_module(block, mesh["tp"], plan)
    parallelize_module(block.up, mesh["tp"], ColwiseParallel())
    fully_shard(block, mesh=mesh["dp"])
    rank, count = data_rank(mesh)
    batches = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(0))
    half = slice(2 * mesh.get_local_rank("tp"), 2 * mesh.get_local_rank("tp") + 2)

    # Each tensor-parallel rank holds half of the sequence; the loss is the sum of theirs.
    backward(block(batches[rank][half]).square().sum())
    backward(torch.stack([reference(x).square().sum() for x in batches]).mean())

    assert_same(block, reference)


def test_partial_sums_of_a_sequence_parallel_normalization_are_added_up(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(sequence_parallel, 4)


class Gathers(nn.Module):
    """Computes with the whole of a parameter, however it is distributed."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 1 + math.prod(shape)).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        return weight.square() * x


def place(along: Shard, _: nn.Parameter) -> Shard:
    return along


def uneven() -> None:
    mesh = init_mesh({"dp": 2, "tp": 2})
    for shape, tp_dim, dp_dim in product([(5, 3), (1, 7), (3, 4, 2)], (0, 1), (0, 1)):
        reference, model = Gathers(shape), Gathers(shape)
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh["tp"], [Shard(tp_dim)]))
        along = Shard(dp_dim)
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=partial(place, along))
        cell = f"{shape} cut along {tp_dim}, then {dp_dim}"
        torch.testing.assert_close(
            whole(model.weight), reference.weight.detach(), rtol=0, atol=0, msg=cell
        )
        # Each tensor-parallel rank computes with the whole; DTensor counts their losses once.
        x = 1.0 + mesh.get_local_rank("dp")
        for _ in range(2):
            backward(model(torch.tensor(x)).sum())
            backward(reference(torch.tensor(1.5)).sum())
            torch.testing.assert_close(
                whole(model.weight.grad), reference.weight.grad, rtol=0, atol=0, msg=cell
            )


def test_rows_are_dealt_twice_however_uneven_they_are(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(uneven, 4)


def full_mesh(axes: dict[str, int], dims: DataParallelMeshDims) -> None:
    mesh = init_mesh(axes)
    names = tuple(axes)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    net = copy.deepcopy(reference)
    data = [name in dims.shard_names + dims.replicate_names for name in names]

    def deal(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        cut = {"0": (Shard(0), Shard(0)), "2": (Shard(1), Replicate())}.get(name)
        if cut is None:
            return
        for (key, param), kind in zip(list(module.named_parameters()), cut, strict=True):
            placements = [Replicate() if is_data else kind for is_data in data]
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
            )

    distribute_module(net, mesh, deal)
    fully_shard(net, mesh=mesh, dp_mesh_dims=dims)
    rank, count = data_rank(mesh)
    batches = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(0))
    dealt = [Shard(0) if is_data else Replicate() for is_data in data]
    for _ in range(2):
        out = net(DTensor.from_local(batches[rank], mesh, dealt, run_check=False))
        backward(out.redistribute(placements=dealt).to_local().square().mean())
        backward(torch.stack([reference(x).square().mean() for x in batches]).mean())
        assert_same(net, reference)


@pytest.mark.parametrize(
    ("axes", "dims"),
    [
        ({"dp": 2, "tp": 2}, DataParallelMeshDims(shard="dp")),
        ({"ddp": 2, "tp": 2}, DataParallelMeshDims(replicate="ddp")),
        ({"ddp": 2, "fsdp": 1, "tp": 2}, DataParallelMeshDims(shard="fsdp", replicate="ddp")),
        ({"fsdp": 2, "cp": 2, "tp": 1}, DataParallelMeshDims(shard=("fsdp", "cp"))),
    ],
    ids=str,
)
def test_parameters_of_the_full_mesh_are_cut_over_its_data_axes(
    run_on_ranks: RunOnRanks, axes: dict[str, int], dims: DataParallelMeshDims
) -> None:
    run_on_ranks(full_mesh, 4, axes, dims)


def against_torch(dtype: torch.dtype) -> None:
    from torch.distributed import fsdp as torch_fsdp

    mesh = init_mesh({"dp": 2, "tp": 2})
    nets = []
    engines: list[tuple[Any, Any]] = [
        (fully_shard, MixedPrecisionPolicy),
        (torch_fsdp.fully_shard, torch_fsdp.MixedPrecisionPolicy),
    ]
    for engine, policy in engines:
        torch.manual_seed(0)
        net = Net()
        deal_out(net, mesh["tp"])
        for module in (*net.blocks, net):
            engine(
                module,
                mesh=mesh["dp"],
                mp_policy=policy(param_dtype=dtype, reduce_dtype=torch.float32),
            )
        nets.append(net)
    rank, count = data_rank(mesh)
    for number in range(2):
        batches = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(number))
        losses = [net(batches[rank]).square().mean() for net in nets]
        for loss in losses:
            backward(loss)
        # One sum of two terms over each kind of ranks: both engines round alike.
        assert losses[0].item() == losses[1].item()
        for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), whole(theirs.grad), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_is_that_of_torchs_engine(
    run_on_ranks: RunOnRanks, dtype: torch.dtype
) -> None:
    run_on_ranks(against_torch, 4, dtype)


def accumulate(reduce_dtype: torch.dtype, exchanges: bool) -> None:
    mesh = init_mesh({"dp": 2, "tp": 2})
    net, reference = pair(mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    net.set_requires_gradient_sync(False)  # type: ignore[operator]
    step(net, reference, mesh, 0)
    assert all(param.grad is None for param in net.parameters())
    if exchanges:
        saved = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict(saved, assign=True)
    net.set_requires_gradient_sync(True)  # type: ignore[operator]
    step(net, reference, mesh, 1)
    assert_same(net, reference)


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float64])
def test_gradients_accumulate_without_communication(
    run_on_ranks: RunOnRanks, reduce_dtype: torch.dtype, exchanges: bool
) -> None:
    run_on_ranks(accumulate, 4, reduce_dtype, exchanges)


def from_meta() -> None:
    mesh = init_mesh({"dp": 2, "tp": 2})
    torch.manual_seed(0)
    reference = Net()
    with torch.device("meta"):
        net = Net()
    deal_out(net, mesh["tp"])
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh["dp"])
    net.to_empty(device="cpu")
    for name, param in net.named_parameters():
        assert isinstance(param, DTensor)
        value = distribute_tensor(
            reference.get_parameter(name).detach(), param.device_mesh, param.placements
        )
        with torch.no_grad():
            param.copy_(value)
    step(net, reference, mesh, 0)
    assert_same(net, reference)


def test_a_model_of_the_meta_device_gets_memory_and_values_afterwards(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(from_meta, 4)


def overlap(which: str) -> str:
    mesh = init_mesh({"dp": 2, "tp": 2})
    module = nn.Linear(4, 4)
    on, cut = (mesh["dp"], [Shard(0)]) if which == "same" else (mesh, [Shard(0), Replicate()])
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), on, cut))
    with pytest.raises(ValueError, match="once more") as caught:
        fully_shard(nn.Sequential(module), mesh=mesh["dp"])
    return str(caught.value)


@pytest.mark.parametrize("which", ["same", "full"])
def test_a_parameter_dealt_out_over_the_same_ranks_is_refused_by_name(
    run_on_ranks: RunOnRanks, which: str
) -> None:
    for message in run_on_ranks(overlap, 4, which):
        assert message.startswith("0.weight is a DTensor with placements (Shard(dim=0),")
        assert "over the ranks of dp" in message


def axes_by_name() -> None:
    mesh = init_mesh({"dp": 2, "tp": 2})
    net, _ = pair(mesh)
    weight = net.blocks[0].get_parameter("up.weight")
    assert isinstance(weight, DTensor)
    assert weight.device_mesh.mesh_dim_names == ("tp", "shard")
    assert tuple(weight.placements) == (Shard(0), Shard(0))
    ranks = dist.get_process_group_ranks(weight.device_mesh["tp"].get_group())
    assert ranks == dist.get_process_group_ranks(mesh["tp"].get_group())
    with torch.no_grad():
        # In the forward it is what it was: a DTensor over the tensor-parallel ranks.
        net.blocks[0].unshard()  # type: ignore[operator]
        shown = net.blocks[0].get_parameter("up.weight")
    assert isinstance(shown, DTensor)
    assert shown.device_mesh == mesh["tp"]
    assert tuple(shown.placements) == (Shard(0),)


def test_a_sharded_parameter_names_its_axes_the_data_parallel_one_last(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(axes_by_name, 4)


def no_grid() -> str:
    dp = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("other", "dp"))["dp"]
    tp = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("other", "tp"))["tp"]
    module = nn.Linear(4, 4)
    parallelize_module(module, tp, ColwiseParallel())
    if dist.get_rank() in (1, 2):
        return "a grid by chance"
    with pytest.raises(ValueError, match="no grid") as caught:
        fully_shard(module, mesh=dp)
    return str(caught.value)


def test_meshes_that_form_no_grid_are_refused(run_on_ranks: RunOnRanks) -> None:
    message = run_on_ranks(no_grid, 4)[0]
    assert "Take both meshes from one" in message


def trained(mesh: DeviceMesh) -> tuple[Net, Net, torch.optim.Optimizer, torch.optim.Optimizer]:
    net, reference = pair(mesh)
    ours = torch.optim.AdamW(net.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    return net, reference, ours, theirs


def train_one_step(
    mesh: DeviceMesh,
    net: nn.Module,
    reference: nn.Module,
    *optimizers: torch.optim.Optimizer,
    number: int,
) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    step(net, reference, mesh, number)
    for optimizer in optimizers:
        optimizer.step()


def save(axes: dict[str, int], path: Path) -> None:
    mesh = init_mesh(axes)
    net, reference, ours, theirs = trained(mesh)
    train_one_step(mesh, net, reference, ours, theirs, number=0)
    model_state, optimizer_state = get_state_dict(net, ours)
    state_dict_saver.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load(axes: dict[str, int], path: Path) -> None:
    mesh = init_mesh(axes)
    net, reference, ours, theirs = trained(mesh)
    # The reference goes through the step before the save with as many ranks as it had then.
    rank_batches = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    backward(torch.stack([reference(x).square().mean() for x in rank_batches]).mean())
    theirs.step()
    model_state, optimizer_state = get_state_dict(net, ours)
    state_dict_loader.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(net, ours, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train_one_step(mesh, net, reference, ours, theirs, number=1)
    assert_same(net, reference)


@pytest.mark.parametrize(
    "axes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}, {"dp": 2, "tp": 1}], ids=str
)
def test_model_and_optimizer_load_on_another_grid(
    run_on_ranks: RunOnRanks, axes: dict[str, int], tmp_path: Path
) -> None:
    run_on_ranks(save, 4, {"dp": 2, "tp": 2}, tmp_path)
    run_on_ranks(load, math.prod(axes.values()), axes, tmp_path)
