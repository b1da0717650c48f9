"""`to` chooses a runtime, moves and remembers; `map` applies a module when asked for results."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trine.core
from trine.core import to
from trine.core.handler import forward
from trine.core.runtime import BaseRuntime, PyTorchRuntime, runtime_of, runtime_registry

Point = namedtuple("Point", ["x", "y"])


class Wrapping(BaseRuntime):
    """Returns another module than the one it was given."""

    def move_module(self, module: nn.Module) -> nn.Module:
        self.knew_itself = runtime_of(module) is self
        return nn.Sequential(module)

    def move_tensor(self, tensor: Tensor) -> Tensor:
        shifted: Tensor = tensor + self.options["shift"]
        return shifted


@pytest.fixture
def wrapping_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runtime_registry._classes, "wrapping", Wrapping)


# to


def test_a_torch_device_gets_torchs_runtime_on_the_module_and_all_below() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    moved = to(model, torch.device("cpu"), options={"autocast": True})

    runtime = runtime_of(model)
    assert moved is model
    assert isinstance(runtime, PyTorchRuntime)
    assert runtime.options == {"autocast": True}
    assert all(runtime_of(each) is runtime for each in model.modules())


@pytest.mark.usefixtures("wrapping_registered")
def test_a_registered_kind_moves_modules_and_tensors_in_its_own_way() -> None:
    model = nn.ReLU()

    moved = to(model, "wrapping:1", options={})
    tensor = to(torch.ones(1), "wrapping", config={"shift": 5})

    runtime = runtime_of(moved)
    assert isinstance(runtime, Wrapping)
    assert runtime.knew_itself
    assert runtime.device_spec == "wrapping:1"
    assert [type(each) for each in moved.modules()] == [nn.Sequential, nn.ReLU]
    assert all(runtime_of(each) is runtime for each in moved.modules())
    assert tensor.item() == 6


def test_a_given_class_goes_before_the_registered_one() -> None:
    assert isinstance(runtime_of(to(nn.ReLU(), "cpu", runtime_class=Wrapping)), Wrapping)


def test_a_module_whose_move_failed_has_the_runtime_it_had() -> None:
    class Failing(BaseRuntime):
        def move_module(self, module: nn.Module) -> nn.Module:
            raise MemoryError("full")

    known, new = to(nn.ReLU(), "cpu"), nn.ReLU()
    before = runtime_of(known)

    with pytest.raises(MemoryError, match="full"):
        to(nn.Sequential(known, new), "cpu", runtime_class=Failing)

    assert runtime_of(known) is before
    assert runtime_of(new) is None


def test_what_cannot_be_moved_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got list.*batch_to_device"):
        to([torch.ones(1)], "cpu")  # type: ignore[type-var]  # the mistake
    with pytest.raises(ValueError, match="give one of them"):
        to(torch.ones(1), "cpu", options={}, config={})


# map


class Ask(nn.Module):
    """Returns what it is told to, made of its input."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.answer(x)

    def twice(self, x: Tensor) -> Tensor:
        return x * 2


def ones() -> list[dict[str, Tensor]]:
    return [{"x": torch.ones(1)}, {"x": torch.full((1,), 2.0)}]


def test_map_computes_when_a_result_is_asked_for() -> None:
    model = to(Ask(lambda x: x + 1), "cpu")

    results = iter(trine.core.map(model, ones()))

    assert model.calls == 0
    assert next(results).item() == 2
    assert model.calls == 1
    assert next(results).item() == 3
    assert next(results, None) is None


def test_map_takes_an_endless_iterable() -> None:
    def endless() -> Iterator[dict[str, Tensor]]:
        while True:
            yield {"x": torch.ones(1)}

    model = to(Ask(lambda x: x), "cpu")

    results = iter(trine.core.map(model, endless()))

    assert [next(results).item() for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: (x, "text"),
        lambda x: Point(x, None),
        lambda x: {"a": [x], "b": 3},
        lambda x: None,
        lambda x: 7,
    ],
)
def test_map_moves_the_tensors_of_any_output_type(answer: Any) -> None:
    model = to(Ask(answer), "cpu")

    (result,) = trine.core.map(model, ones()[:1], device="meta")

    # Compare by shape of the containers: a tensor on meta has no value.
    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, dict):
            return {key: describe(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(describe, value)]
        return value

    expected = answer(torch.ones(1, device="meta"))
    assert describe(result) == describe(expected)


def test_map_keeps_only_the_outputs_asked_for() -> None:
    model = to(Ask(lambda x: {"a": x, "b": x, "c": x}), "cpu")

    results = list(trine.core.map(model, ones(), {"c", "a"}))

    assert [list(each) for each in results] == [["a", "c"], ["a", "c"]]


def test_map_refuses_keys_that_the_outputs_do_not_have() -> None:
    named, plain = to(Ask(lambda x: {"a": x}), "cpu"), to(Ask(lambda x: x), "cpu")

    with pytest.raises(ValueError, match=r"out_keys names 'z'.* among: a"):
        list(trine.core.map(named, ones(), {"z"}))
    with pytest.raises(TypeError, match="returned Tensor"):
        list(trine.core.map(plain, ones(), {"a"}))


def test_map_moves_each_batch_to_the_modules_device() -> None:
    class Shifting(PyTorchRuntime):
        def move_tensor(self, tensor: Tensor) -> Tensor:
            return tensor + 100

    model = to(Ask(lambda x: x), "cpu", runtime_class=Shifting)

    assert [each.item() for each in trine.core.map(model, ones())] == [101, 102]


def test_map_takes_a_method_or_a_block() -> None:
    model = to(Ask(lambda x: x), "cpu")

    by_method = trine.core.map(model.twice, ones())
    by_block = trine.core.map(forward(model.twice), ones(), device=trine.core.get_device("cpu"))

    assert [each.item() for each in by_method] == [each.item() for each in by_block] == [2, 4]


def test_map_needs_a_runtime() -> None:
    with pytest.raises(ValueError, match=r"trine\.core\.to\(model, device\)"):
        trine.core.map(nn.ReLU(), ones())
