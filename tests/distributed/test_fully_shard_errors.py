"""What fully_shard refuses, and in which words. One rank: the checks come before any other."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed does not re-export it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trine.distributed.fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_without_parameters_computes_as_before() -> None:
    # Programs go over all layers, some of which only compute.
    layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    torch.manual_seed(0)
    x = torch.randn(4, 2)
    expected = layers(x).square().mean()
    expected.backward()
    gradients = [param.grad for param in layers.parameters()]
    layers.zero_grad()
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)

    loss = layers(x).square().mean()
    loss.backward()

    assert loss.item() == expected.item()
    for param, gradient in zip(layers.parameters(), gradients, strict=True):
        assert isinstance(param.grad, DTensor)
        assert gradient is not None
        torch.testing.assert_close(param.grad.full_tensor(), gradient, rtol=0, atol=0)
    tanh = layers[1]
    assert isinstance(tanh, FSDPModule)
    tanh.unshard()
    tanh.reshard()


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"shards an nn\.Module or a list of them, got int"):
        fully_shard(3)


def test_a_second_call_on_one_module_is_refused() -> None:
    model = fully_shard(nn.Linear(2, 2))

    with pytest.raises(ValueError, match=r"called on this FSDPLinear before"):
        fully_shard(model)


def test_a_container_without_forward_is_refused_and_one_with_forward_is_not() -> None:
    class WithForward(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    with pytest.raises(ValueError, match="ModuleList has no forward of its own"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    fully_shard(WithForward([nn.Linear(2, 2)]))(torch.ones(1, 2))


def test_a_parameter_shared_across_calls_is_refused_naming_both_places() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embedding(x))
            return out

    model = Tied()
    fully_shard(model.embedding)

    with pytest.raises(ValueError, match=r"head\.weight is shared with weight, which another"):
        fully_shard(model)


@pytest.mark.parametrize("axes", [{"shard": 1}, {"replicate": 1, "shard": 1}])
def test_a_module_inside_a_sharded_one_is_refused_whatever_the_mesh(axes: dict[str, int]) -> None:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=mesh)

    with pytest.raises(
        ValueError, match=r"^weight belongs to .* as 0\.weight\. .*inside out.*ignored_params"
    ):
        fully_shard(model[0], mesh=mesh)

    assert type(model[0]) is nn.Linear


def test_a_refused_call_leaves_the_module_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = {name: id(param) for name, param in model.named_parameters()}

    with pytest.raises(ValueError, match=r"Shard\(dim=2\) for 0\.weight, which has 2 dims"):
        fully_shard(model, shard_placement_fn=lambda param: Shard(2))
    with pytest.raises(TypeError, match=r"returned 'rows' \(str\) for 0\.weight; expected"):
        fully_shard(model, shard_placement_fn=lambda param: "rows")  # type: ignore[arg-type, return-value]

    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert type(model) is nn.Sequential
    fully_shard(model)
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_a_mesh_of_three_axes_needs_names_for_its_parts() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pp", "dp", "tp"))

    with pytest.raises(ValueError, match=r"3 axes .*dp_mesh_dims"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ValueError, match=r"no axis 'fsdp'; its axes are \['pp', 'dp', 'tp'\]"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("fsdp"))


def test_dims_that_name_no_axis_or_one_twice_are_refused_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="names no axis"):
        DataParallelMeshDims()
    with pytest.raises(ValueError, match=r"\['dp'\] for sharding and for replicating"):
        DataParallelMeshDims(shard="dp", replicate=("dp", "ddp"))


def test_lists_that_cannot_be_one_unit_are_refused() -> None:
    outer = nn.Sequential(nn.Linear(2, 2))

    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    with pytest.raises(ValueError, match="holds one module twice"):
        fully_shard([outer, outer])
    with pytest.raises(ValueError, match="the Sequential contains the Linear"):
        fully_shard([outer, outer[0]])


def test_ignored_params_that_are_no_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match=r"ignored_params holds parameters, got str"):
        fully_shard(nn.Linear(2, 2), ignored_params={"weight"})  # type: ignore[arg-type]


def test_a_policy_that_is_no_dtype_is_refused_where_it_is_made() -> None:
    with pytest.raises(TypeError, match=r"MixedPrecisionPolicy\.param_dtype .* got 'bf16'"):
        MixedPrecisionPolicy(param_dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reduce_dtype must be a floating-point dtype"):
        MixedPrecisionPolicy(reduce_dtype=torch.int32)


def test_a_sharded_module_cannot_be_copied_and_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"cannot be copied.*before fully_shard"):
        copy.deepcopy(fully_shard(nn.Linear(2, 2)))


def test_a_parameter_exchanged_for_a_plain_one_is_refused_by_name() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    model.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(ValueError, match="weight was replaced by a Parameter"):
        model(torch.ones(1, 2))


def test_a_sparse_gradient_is_refused_by_full_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)

    with pytest.raises(NotImplementedError, match=r"gradient of 0\.weight is sparse.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_a_sharded_module_keeps_its_class_as_a_base_and_gains_the_methods() -> None:
    model = fully_shard(nn.Linear(2, 3))

    assert isinstance(model, nn.Linear)
    assert isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPLinear"
    assert type(type(model)(4, 5)) is nn.Linear  # a new one is a plain one
