"""Adam and AdamW step on plain tensors, with the values, the state and the lifetimes of before."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Adam, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from trine.distributed.fsdp import fully_shard

RunOnRanks = Callable[..., list[Any]]


class ByDTensor(AdamW):
    """A subclass, which the engine leaves to DTensor: it could do anything."""


class AdamByDTensor(Adam):
    """The same of Adam."""


class SeesDTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes which operations were called with a DTensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
        if any(isinstance(item, DTensor) for item in flat):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    # 5 rows: ranks hold different numbers of them, one of two ranks none of the last bias.
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    fully_shard(model[0])
    fully_shard(model)
    return model


def backward(model: nn.Module, step: int) -> None:
    seed = 10 * step + dist.get_rank()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def shards(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        assert isinstance(value, DTensor)
        found.append(value.to_local())
    return found


def steps_as_dtensor_does(ours: type[Adam], theirs: type[Adam], options: dict[str, Any]) -> None:
    models = sharded(), sharded()
    optimizers = [
        kind(model.parameters(), **{"lr": 1e-2, **options})
        for kind, model in zip((ours, theirs), models, strict=True)
    ]

    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()

    # Element by element the same operations, so the same bits.
    for found, expected in zip(*map(shards, (m.parameters() for m in models)), strict=True):
        assert torch.equal(found, expected)
    for param, other in zip(*(m.parameters() for m in models), strict=True):
        states = [o.state[p] for o, p in zip(optimizers, (param, other), strict=True)]
        assert states[0].keys() == states[1].keys()
        for name in states[0].keys() - {"step"}:
            found, expected = shards([states[0][name], states[1][name]])
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("kinds", [(AdamW, ByDTensor), (Adam, AdamByDTensor)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"foreach": True, "weight_decay": 0.1},
        {"fused": True},
        {"amsgrad": True, "maximize": True},
        {"lr": torch.tensor(0.05)},
    ],
    ids=str,
)
def test_values_and_state_are_those_that_dtensor_computes(
    run_on_ranks: RunOnRanks, kinds: tuple[type[Adam], type[Adam]], options: dict[str, Any]
) -> None:
    run_on_ranks(steps_as_dtensor_does, 2, *kinds, options)


def sees_no_dtensor() -> None:
    model = sharded()
    optimizer = AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()  # makes the state

    versions = [param._version for param in model.parameters()]
    with SeesDTensors() as seen:
        optimizer.step()

    assert not seen.found
    # Who has saved a parameter for a backward learns that it was written to.
    assert all(
        param._version > version
        for param, version in zip(model.parameters(), versions, strict=True)
    )


def test_no_operation_of_a_step_is_given_a_dtensor(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(sees_no_dtensor, 2)


def leaves_a_gradient_that_is_laid_otherwise() -> None:
    models = sharded(), sharded()
    optimizers = AdamW(models[0].parameters(), lr=0.1), ByDTensor(models[1].parameters(), lr=0.1)

    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model, 0)
        weight = next(model.parameters())
        assert isinstance(weight, DTensor)
        weight.grad = distribute_tensor(torch.ones(5, 3), weight.device_mesh, [Replicate()])
        optimizer.step()

    for found, expected in zip(*map(shards, (m.parameters() for m in models)), strict=True):
        assert torch.equal(found, expected)


def test_a_gradient_that_is_laid_otherwise_is_left_to_dtensor(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(leaves_a_gradient_that_is_laid_otherwise, 2)


def lives_as_before() -> None:
    model = sharded()
    optimizer = AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()

    twin = copy.deepcopy(optimizer.state_dict())
    gone = weakref.ref(optimizer)
    del optimizer

    assert gone() is None
    assert set(twin) == {"state", "param_groups"}


def test_an_optimizer_is_freed_with_its_last_reference(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(lives_as_before, 1)


def test_an_optimizer_of_plain_parameters_is_left_alone(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(steps_beside_a_sharded_model, 1)


def steps_beside_a_sharded_model() -> None:
    sharded()
    param, reference = nn.Parameter(torch.ones(3)), torch.ones(3)
    optimizer = AdamW([param], lr=0.1, weight_decay=0.0)
    param.grad = torch.ones(3)

    optimizer.step()

    # The first step of Adam is lr, in the direction of the gradient.
    torch.testing.assert_close(param.detach(), reference - 0.1)
