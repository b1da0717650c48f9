"""Meshes, lists of modules and the methods of a sharded module, against whole models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from trine.core.tracing import TraceEvent, add_sink, remove_sink
from trine.distributed import init_mesh
from trine.distributed.fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardPlacement,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from trine.distributed.fsdp.comm import AllGather, ReduceScatter

RunOnRanks = Callable[..., list[Any]]

# fp32: gradients of order 1, sums of a few dozen terms in another order.
FP32 = 2e-6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x))
        return x

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


def pair() -> tuple[Net, Net]:
    torch.manual_seed(0)
    reference = Net()
    return copy.deepcopy(reference), reference


def batches(step: int = 0) -> list[Tensor]:
    return [
        torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))
        for rank in range(dist.get_world_size())
    ]


def own(per_rank: Sequence[Tensor]) -> Tensor:
    return per_rank[dist.get_rank()]


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def step(model: nn.Module, reference: nn.Module, number: int = 0) -> None:
    backward(model(own(batches(number))).square().mean())
    backward(torch.stack([reference(x).square().mean() for x in batches(number)]).mean())


def assert_same_gradients(
    model: nn.Module, reference: nn.Module, tolerance: float = FP32, factor: float = 1.0
) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        theirs = expected[name].grad
        assert (param.grad is None) == (theirs is None), name
        if param.grad is not None and theirs is not None:
            ours = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            torch.testing.assert_close(
                ours, theirs * factor, rtol=tolerance, atol=tolerance, msg=name
            )


def shard_all(net: Net, **options: Any) -> Net:
    for layer in net.body:
        fully_shard(layer, **options)
    return fully_shard(net, **options)


# --- meshes ----------------------------------------------------------------------------


def train_on(axes: dict[str, int], dims: DataParallelMeshDims | None, placed: list[str]) -> None:
    net, reference = pair()
    model = shard_all(net, mesh=init_mesh(axes), dp_mesh_dims=dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for number in range(3):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        step(model, reference, number)
        assert_same_gradients(model, reference)
        optimizer.step()
        reference_optimizer.step()
    weight = model.head.weight
    assert isinstance(weight, DTensor)
    kinds = {"S": Shard(0), "R": Replicate()}
    assert list(weight.placements) == [kinds[kind] for kind in placed]
    torch.testing.assert_close(weight.full_tensor(), reference.head.weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "dims", "placed"),
    [
        ({"ddp": 2, "fsdp": 2}, None, "RS"),
        ({"ddp": 1, "fsdp": 3}, None, "RS"),
        ({"ddp": 3, "fsdp": 1}, None, "RS"),
        ({"fsdp": 2, "ddp": 2}, DataParallelMeshDims(shard="fsdp", replicate="ddp"), "SR"),
        ({"ddp": 3}, DataParallelMeshDims(replicate="ddp"), "R"),
        ({"a": 2, "b": 2}, DataParallelMeshDims(shard=("a", "b")), "S"),
        ({"a": 2, "b": 1, "c": 2}, DataParallelMeshDims(shard="c", replicate=("a", "b")), "RS"),
    ],
)
def test_training_on_any_mesh_equals_that_of_the_whole_model(
    run_on_ranks: RunOnRanks,
    axes: dict[str, int],
    dims: DataParallelMeshDims | None,
    placed: str,
) -> None:
    world_size = 1
    for size in axes.values():
        world_size *= size

    run_on_ranks(train_on, world_size, axes, dims, list(placed))


def reduce_in_bf16_over_copies() -> None:
    net, reference = pair()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_all(net, mesh=init_mesh({"ddp": 2, "fsdp": 2}), mp_policy=policy)
    step(model, reference)
    # bf16 keeps 8 bits: 2**-8 relative, on gradients below 1.
    assert_same_gradients(model, reference, 2e-2)
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_half_types_are_reduced_over_copies_too(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(reduce_in_bf16_over_copies, 4)


def put_off_the_all_reduce() -> list[str]:
    net, reference = pair()
    model = shard_all(net, mesh=init_mesh({"ddp": 2, "fsdp": 2}))
    assert isinstance(model, FSDPModule)
    names: list[str] = []

    class Names:
        def record(self, event: TraceEvent) -> None:
            if event.kind == "async":
                names.append(event.name)

    sink = Names()
    add_sink(sink)
    for number in range(3):
        model.set_requires_all_reduce(number == 2)
        step(model, reference, number)
        if number < 2:
            assert all(param.grad is None for param in model.parameters())
    remove_sink(sink)
    assert_same_gradients(model, reference, 3 * FP32)
    return names


def test_sums_may_be_kept_sharded_until_a_later_all_reduce(run_on_ranks: RunOnRanks) -> None:
    for names in run_on_ranks(put_off_the_all_reduce, 4):
        assert names.count("reduce_scatter") == 3 * 3  # units x micro-batches
        assert names.count("all_reduce") == 3


# --- which modules and parameters ------------------------------------------------------


def shard_lists(chunks: int) -> None:
    net, reference = pair()
    fully_shard(list(net.body))
    fully_shard([net.norm, net.head])
    model = fully_shard(net)

    def loss(each: Net, x: Tensor) -> Tensor:
        if not chunks:
            parts = [each(x)]
        else:
            parts = [each.head(part) for part in each.norm(each.encode(x)).chunk(chunks)]
        return torch.stack([part.square().mean() for part in parts]).sum()

    for number in range(2):
        model.zero_grad()
        reference.zero_grad()
        backward(loss(model, own(batches(number))))
        backward(torch.stack([loss(reference, x) for x in batches(number)]).mean())
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("chunks", [0, 3])
def test_several_modules_make_one_unit_also_when_used_in_parts(
    run_on_ranks: RunOnRanks, chunks: int
) -> None:
    run_on_ranks(shard_lists, 2, chunks)


def gather_a_list_once() -> list[str]:
    net, _ = pair()
    fully_shard([net.norm, net.head])
    model = fully_shard(net)
    units: list[str] = []

    class Units:
        def record(self, event: TraceEvent) -> None:
            if event.name == "all_gather":
                units.append(event.unit)

    sink = Units()
    add_sink(sink)
    with torch.no_grad():
        model(own(batches()))
    remove_sink(sink)
    return units


def test_a_list_is_gathered_once_for_all_its_modules(run_on_ranks: RunOnRanks) -> None:
    for units in run_on_ranks(gather_a_list_once, 2):
        assert sorted(units) == ["(root)", "norm"]


def ignore_some() -> None:
    net, reference = pair()
    ignored = {p for name, p in net.named_parameters() if name in ("head.weight", "norm.bias")}
    model = fully_shard(net, ignored_params=ignored)

    backward(model(own(batches())).square().mean())
    backward(reference(own(batches())).square().mean())  # this rank's own: nobody reduces it

    assert type(model.head.weight) is nn.Parameter
    assert isinstance(model.head.bias, DTensor)
    torch.testing.assert_close(model.head.weight.grad, reference.head.weight.grad)
    torch.testing.assert_close(model.norm.bias.grad, reference.norm.bias.grad)


def test_ignored_parameters_stay_whole_and_keep_their_own_gradients(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(ignore_some, 2)


class Scaled(Net):
    """With 0-dim parameters, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def train_scalars(axes: dict[str, int], param_dtype: torch.dtype | None, tolerance: float) -> None:
    torch.manual_seed(0)
    reference = Scaled()
    model = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_mesh(axes), mp_policy=policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        step(model, reference, number)
        assert_same_gradients(model, reference, tolerance)
        for optimizer in optimizers:
            optimizer.step()
    model.reshard()  # type: ignore[operator]  # an FSDPModule
    temperature = dict(model.named_parameters())["temperature"]
    assert isinstance(temperature, DTensor)
    assert temperature.shape == ()
    torch.testing.assert_close(
        temperature.full_tensor(), reference.temperature.detach(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"fsdp": 3}, {"ddp": 2, "fsdp": 2}])
@pytest.mark.parametrize(
    ("param_dtype", "tolerance"),
    [(None, FP32), (torch.bfloat16, 3e-2)],  # bf16: 2**-8 relative
)
def test_parameters_without_dims_train_on_every_mesh(
    run_on_ranks: RunOnRanks,
    axes: dict[str, int],
    param_dtype: torch.dtype | None,
    tolerance: float,
) -> None:
    world_size = 1
    for size in axes.values():
        world_size *= size

    run_on_ranks(train_scalars, world_size, axes, param_dtype, tolerance)


class Wide(nn.Module):
    """3-D and 2-D weights whose dims divide by no number of ranks used here."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 7, 3)
        self.linear = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.conv(x[:, :, None].expand(-1, -1, 3)).squeeze(-1))
        return out


def cut_other_dims() -> None:
    torch.manual_seed(0)
    reference = Wide()
    model = copy.deepcopy(reference)
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.dim() > 1 else None)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        step(model, reference, number)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
    model.reshard()  # type: ignore[operator]  # an FSDPModule
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert ours.placements == (Shard(ours.dim() - 1),)
        # AdamW enlarges rounding where second moments are small.
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_dim_can_be_cut(run_on_ranks: RunOnRanks, world_size: int) -> None:
    run_on_ranks(cut_other_dims, world_size)


def put_on_two_meshes() -> None:
    net, reference = pair()
    mesh = init_mesh({"ddp": 2, "fsdp": 2})
    everyone = init_mesh({"all": 4})
    head = set(map(id, net.head.parameters()))
    model = fully_shard(
        net,
        mesh=mesh,
        shard_placement_fn=lambda p: ShardPlacement(Shard(0), everyone) if id(p) in head else None,
    )
    for number in range(2):
        model.zero_grad()
        reference.zero_grad()
        step(model, reference, number)
        assert_same_gradients(model, reference)
    model.reshard()  # type: ignore[operator]  # an FSDPModule
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight.device_mesh == everyone
    assert isinstance(model.norm.weight, DTensor)
    assert model.norm.weight.device_mesh == mesh


def test_parameters_of_one_module_may_be_on_different_meshes(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(put_on_two_meshes, 4)


# --- methods ---------------------------------------------------------------------------


def divide(mesh: dict[str, int], factor: float) -> None:
    net, reference = pair()
    model = shard_all(net, mesh=init_mesh(mesh))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    step(model, reference)
    assert_same_gradients(model, reference, factor=dist.get_world_size() / factor)


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"ddp": 2, "fsdp": 2}])
def test_a_divide_factor_divides_the_sum_over_all_ranks(
    run_on_ranks: RunOnRanks, mesh: dict[str, int]
) -> None:
    world_size = 2 if len(mesh) == 1 else 4

    run_on_ranks(divide, world_size, mesh, 3.0)


def double(flat: Tensor) -> None:
    flat.mul_(2.0)


def hook_reductions(mesh: dict[str, int]) -> None:
    net, reference = pair()
    model = shard_all(net, mesh=init_mesh(mesh))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(double)
    step(model, reference)
    assert_same_gradients(model, reference, factor=2.0)


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"ddp": 2, "fsdp": 2}])
def test_a_hook_may_change_reduced_gradients(
    run_on_ranks: RunOnRanks, mesh: dict[str, int]
) -> None:
    run_on_ranks(hook_reductions, 2 if len(mesh) == 1 else 4, mesh)


class Gather(AllGather):
    calls = 0

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        parts = list(output_tensor.chunk(group.size()))
        dist.all_gather(parts, input_tensor.clone(), group=group)
        return None


class Scatter(ReduceScatter):
    calls = 0

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        total = input_tensor.clone()
        dist.all_reduce(total, op=op, group=group)
        output_tensor.copy_(total.chunk(group.size())[group.rank()])
        return None


def bring_collectives(apart: bool) -> None:
    net, reference = pair()
    model = shard_all(net)
    assert isinstance(model, FSDPModule)
    gather, scatter = Gather(), Scatter()
    if apart:
        model.set_separate_reduce_scatter_group(True)
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(scatter)
    for number in range(2):
        model.zero_grad()
        reference.zero_grad()
        step(model, reference, number)
        assert_same_gradients(model, reference)
    once_a_step = 2 if dist.get_world_size() > 1 else 0  # the root's; alone there is no need
    assert (gather.calls, scatter.calls) == (once_a_step, once_a_step)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_a_module_communicates_with_collectives_of_the_users(
    run_on_ranks: RunOnRanks, world_size: int, apart: bool
) -> None:
    run_on_ranks(bring_collectives, world_size, apart)


def set_everything() -> None:
    """Settings that change when things happen must not change what comes out."""
    net, reference = pair()
    model = shard_all(net)
    assert isinstance(model, FSDPModule)
    first, second = model.body
    assert isinstance(first, FSDPModule)
    assert isinstance(second, FSDPModule)
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([])
    model.set_modules_to_backward_prefetch([second, first])
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_post_optim_event(object())
    for number in range(3):
        model.zero_grad()
        reference.zero_grad()
        model.set_reshard_after_backward(number == 1)
        model.set_reshard_after_forward(number != 1)
        step(model, reference, number)
        assert isinstance(dict(model.named_parameters())["head.weight"], DTensor) == (number == 1)
        model.reshard()
        for layer in (first, second):
            layer.reshard()
        assert_same_gradients(model, reference)


def test_settings_that_change_the_order_change_no_gradient(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(set_everything, 2)


def put_off_the_last_wait() -> None:
    net, reference = pair()
    model = shard_all(net)
    assert isinstance(model, FSDPModule)
    for number in range(2):
        model.set_is_last_backward(number == 1)
        step(model, reference, number)
    assert_same_gradients(model, reference, 2 * FP32)


def test_reductions_that_were_not_waited_for_join_the_last_backward(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(put_off_the_last_wait, 2)


def embed_without_gathering() -> list[str]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))
    model = copy.deepcopy(reference)
    fully_shard(model[0])
    fully_shard(model)
    embedding = model[0]
    assert isinstance(embedding, FSDPModule)
    embedding.set_unshard_in_backward(False)
    units: list[str] = []

    class Units:
        def record(self, event: TraceEvent) -> None:
            if event.name == "all_gather":
                units.append(event.unit)

    sink = Units()
    add_sink(sink)
    tokens = [torch.tensor([rank, 6, 2]) for rank in range(dist.get_world_size())]
    backward(model(own(tokens)).square().mean())
    backward(torch.stack([reference(t).square().mean() for t in tokens]).mean())
    remove_sink(sink)
    assert_same_gradients(model, reference)
    return units


def test_an_embedding_need_not_be_gathered_for_its_backward(run_on_ranks: RunOnRanks) -> None:
    for units in run_on_ranks(embed_without_gathering, 2):
        assert sorted(units) == ["(root)", "0"]


def differentiate_twice() -> None:
    net, reference = pair()
    model = shard_all(net)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)

    def penalty(each: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    backward(penalty(model, own(batches())))
    model.reshard()
    for layer in model.body:
        assert isinstance(layer, FSDPModule)
        layer.reshard()
    backward(torch.stack([penalty(reference, x) for x in batches()]).mean())
    assert_same_gradients(model, reference, 1e-5)  # second derivatives reach 10


def test_gradients_of_gradients_are_right_while_parameters_stay_whole(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(differentiate_twice, 2)


def use_other_methods() -> None:
    net, reference = pair()
    model = shard_all(net)
    register_fsdp_forward_method(model, "logits")
    register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # not sharded: nothing happens
    with pytest.raises(AttributeError, match="FSDPNet has no method 'decode'"):
        register_fsdp_forward_method(model, "decode")

    backward(model.logits(own(batches())).square().mean())
    backward(torch.stack([reference.logits(x).square().mean() for x in batches()]).mean())

    assert_same_gradients(model, reference)


def test_another_method_computes_like_forward(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(use_other_methods, 2)


def several_roots() -> None:
    (text, text_reference), (main, main_reference) = pair(), pair()
    fully_shard(text)
    shard_all(main)
    share_comm_ctx([text, main])
    with pytest.raises(ValueError, match="got a plain Net"):
        share_comm_ctx([text, text_reference])

    def loss(encoder: Net, model: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = encoder(x).repeat(1, 2)[:, :5]
        out: Tensor = model(frozen) + model(x)
        return out.square().mean()

    for number in range(2):
        main.zero_grad()
        main_reference.zero_grad()
        backward(loss(text, main, own(batches(number))))
        backward(
            torch.stack([loss(text_reference, main_reference, x) for x in batches(number)]).mean()
        )
        assert_same_gradients(main, main_reference, 2 * FP32)
    assert isinstance(text.head.weight, DTensor)


def test_several_roots_in_one_step_are_independent(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(several_roots, 2)
