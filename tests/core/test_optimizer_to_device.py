"""Moving an optimizer's state: all that belongs on the device, nothing that does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trine.core import CPUDevice


class Elsewhere(CPUDevice):
    """A device whose tensors are told by their values: it adds 100 to what it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[Tensor] = []

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        self.moved.append(tensor)
        return tensor + 100


Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, centered=True, momentum=0.9),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.1),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, history_size=3),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


def a_model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    x = torch.linspace(-1, 1, 15).reshape(5, 3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return float(loss.item())

    for _ in range(steps):
        optimizer.step(closure)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_the_state_had_not_been_moved(name: str) -> None:
    moved, untouched = a_model(), a_model()
    optimizer, twin = (OPTIMIZERS[name](model.parameters()) for model in (moved, untouched))
    train(moved, optimizer)
    train(untouched, twin)

    assert CPUDevice().optimizer_to_device(optimizer) is optimizer
    train(moved, optimizer)
    train(untouched, twin)

    assert torch.equal(moved.weight, untouched.weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_tensor_of_the_state_is_moved_but_scalars_the_host_reads(name: str) -> None:
    model = a_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    scalars = set() if name == "fused AdamW" else {"step", "mu_product"}
    belongs = [
        tensor
        for state in optimizer.state.values()
        for key, value in state.items()
        if key not in scalars
        for tensor in tensors_in(value)
    ]
    device = Elsewhere()

    device.optimizer_to_device(optimizer)

    assert {id(tensor) for tensor in device.moved} == {id(tensor) for tensor in belongs}
    assert len(device.moved) == len(belongs) > 0


def test_the_parameters_themselves_stay_the_objects_they_are() -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    weight, before = model.weight, model.weight.clone()

    Elsewhere().optimizer_to_device(optimizer)

    assert optimizer.param_groups[0]["params"][0] is weight
    assert weight in optimizer.state
    assert torch.equal(weight, before)


def test_the_lists_of_lbfgs_are_moved_item_by_item() -> None:
    model = a_model()
    optimizer = OPTIMIZERS["LBFGS"](model.parameters())
    train(model, optimizer)
    state = optimizer.state[model.weight]
    before = {key: list(state[key]) for key in ("old_dirs", "old_stps", "ro", "al")}

    Elsewhere().optimizer_to_device(optimizer)

    for key, old in before.items():
        assert len(old) == len(state[key]) > 0
        for new, tensor in zip(state[key], old, strict=True):
            assert new is tensor is None or torch.equal(new, tensor + 100)


@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True}])
def test_a_step_that_the_device_counts_moves(options: dict[str, bool]) -> None:
    model = a_model()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    train(model, optimizer, steps=1)
    optimizer.param_groups[0].update({"fused": None, "capturable": False}, **options)

    Elsewhere().optimizer_to_device(optimizer)

    assert [state["step"].item() for state in optimizer.state.values()] == [101.0, 101.0]


def test_each_group_says_for_itself_where_its_steps_are_read() -> None:
    model = a_model()
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer, steps=1)
    optimizer.param_groups[1]["capturable"] = True

    Elsewhere().optimizer_to_device(optimizer)

    assert optimizer.state[model.weight]["step"].item() == 1.0
    assert optimizer.state[model.bias]["step"].item() == 101.0


def test_the_state_of_a_scalar_parameter_moves_beside_a_step_that_stays() -> None:
    param = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.tensor(0.5)
    optimizer.step()

    Elsewhere().optimizer_to_device(optimizer)

    state = optimizer.state[param]
    assert state["step"].item() == 1.0
    assert state["exp_avg"].item() > 99.0
    assert state["exp_avg_sq"].item() > 99.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_has_not_stepped_yet_stays_without_state(name: str) -> None:
    model = a_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    keys = {param: set(state) for param, state in optimizer.state.items()}

    Elsewhere().optimizer_to_device(optimizer)

    assert {param: set(state) for param, state in optimizer.state.items()} == keys


# Tensors in groups.


def test_a_learning_rate_the_host_reads_stays_and_one_the_device_reads_moves() -> None:
    model = a_model()
    lr = torch.tensor(0.1)
    on_host = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    on_device = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    for group in (on_device.param_groups[0], on_device.defaults):
        group["capturable"] = True

    device = Elsewhere()
    device.optimizer_to_device(on_host)
    device.optimizer_to_device(on_device)

    assert on_host.param_groups[0]["lr"] is lr
    assert on_device.param_groups[0]["lr"].item() == pytest.approx(100.1)
    # Shared with the defaults, from which a group added later takes it.
    assert on_device.defaults["lr"] is on_device.param_groups[0]["lr"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_rates_of_one_element_stay_in_whatever_shape_the_optimizer_took_them(
    shape: tuple[int, ...],
) -> None:
    model = a_model()
    lr = torch.full(shape, 0.1)
    betas = (torch.full(shape, 0.9), torch.full(shape, 0.99))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=betas, foreach=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # keeps another tensor in the group
    group, device = optimizer.param_groups[0], Elsewhere()
    before = {key: group[key] for key in ("lr", "betas", "initial_lr")}
    assert len(tensors_in(before)) == 4

    device.optimizer_to_device(optimizer)

    assert device.moved == []
    assert all(group[key] is value for key, value in before.items())


@pytest.mark.parametrize("nested", [False, True])
def test_a_tensor_that_happens_to_have_one_element_moves_and_one_without_dimensions_stays(
    nested: bool,
) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask, share = torch.ones(1), torch.tensor(0.5)
    group = optimizer.param_groups[0]
    group.update(mask=[mask] if nested else mask, share=[share] if nested else share)

    Elsewhere().optimizer_to_device(optimizer)

    (moved,), (stayed,) = tensors_in(group["mask"]), tensors_in(group["share"])
    assert moved.tolist() == [101.0]
    assert stayed is share


@pytest.mark.parametrize("option", ["capturable", "fused"])
def test_every_tensor_of_a_group_that_the_device_reads_moves(option: str) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    group.update(
        {option: True}, lr=torch.ones(1), mask=torch.ones(1), share=torch.ones(()), weight_decay=0.5
    )

    Elsewhere().optimizer_to_device(optimizer)

    assert [group[key].item() for key in ("lr", "mask", "share")] == [101.0] * 3
    assert group["weight_decay"] == 0.5


def test_larger_tensors_of_a_group_move_nested_or_not() -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0].update(basis=torch.ones(2), pair=(torch.ones(2), 0.9), words=["a"])

    Elsewhere().optimizer_to_device(optimizer)

    group = optimizer.param_groups[0]
    assert group["basis"].tolist() == [101.0, 101.0]
    assert (group["pair"][0].tolist(), group["pair"][1]) == ([101.0, 101.0], 0.9)
    assert (group["lr"], group["words"]) == (0.1, ["a"])


# State of other shapes.


class Shared(Optimizer):
    """Keeps one buffer for all parameters, and something that belongs to none."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})
        buffer = torch.ones(3)
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"buffer": buffer, "history": [{"at": buffer}], "name": "x"}
        self.state["all"] = {"total": torch.ones(2), "step": torch.tensor(1.0)}  # type: ignore[index]
        self.state["bare"] = torch.ones(2)  # type: ignore[index]  # not even a dict

    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]


def test_a_buffer_shared_by_parameters_stays_shared_and_is_moved_once() -> None:
    model = a_model()
    optimizer = Shared(model.parameters())
    device = Elsewhere()

    device.optimizer_to_device(optimizer)

    weight, bias = optimizer.state[model.weight], optimizer.state[model.bias]
    assert weight["buffer"] is bias["buffer"] is bias["history"][0]["at"]
    assert weight["buffer"].tolist() == [101.0, 101.0, 101.0]
    assert len(device.moved) == 3
    state: Any = optimizer.state
    assert state["all"]["total"].tolist() == [101.0, 101.0]
    assert state["all"]["step"].item() == 1.0
    assert state["bare"].tolist() == [101.0, 101.0]


def test_state_from_a_checkpoint_is_moved_like_any_other() -> None:
    model, resumed = a_model(), a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    resumed.load_state_dict(model.state_dict())
    again = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    CPUDevice().optimizer_to_device(again)
    train(model, optimizer)
    train(resumed, again)

    assert torch.equal(model.weight, resumed.weight)


# Sharded parameters.


@pytest.fixture
def _a_world_of_one() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but torch's stubs miss it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_a_world_of_one")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_state_of_sharded_parameters_moves_and_stays_sharded(name: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

    def shard(_: str, module: nn.Module, mesh: Any) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))

    mesh = init_device_mesh("cpu", (1,))
    model, whole = distribute_module(a_model(), mesh, shard), a_model()
    optimizer, reference = (OPTIMIZERS[name](m.parameters()) for m in (model, whole))

    def step(module: nn.Module, by: Optimizer) -> None:
        for param in module.parameters():
            param.grad = param.detach() * 0.5
        by.step()

    for module, by in ((model, optimizer), (whole, reference)):
        step(module, by)
        Elsewhere().optimizer_to_device(by)
        step(module, by)

    for param, plain in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(param.data, DTensor)
        torch.testing.assert_close(param.data.full_tensor(), plain.data)
        for key, value in optimizer.state[param].items():
            expected = reference.state[plain][key]
            if key == "step":
                assert value == expected == 2
                continue
            assert isinstance(value, DTensor)
            assert value.placements == (Shard(0),)
            torch.testing.assert_close(value.full_tensor(), expected)


@pytest.mark.gpu
def test_after_a_checkpoint_the_moments_are_on_the_gpu_and_steps_are_not() -> None:
    from trine.core import get_device

    device = get_device("cuda")
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)

    device.module_to_device(model)
    device.optimizer_to_device(optimizer)

    state = optimizer.state[model.weight]
    assert state["exp_avg"].device == device.torch_device
    assert state["step"].device == torch.device("cpu")
    model(torch.ones(1, 3, device=device.torch_device)).sum().backward()
    optimizer.step()
