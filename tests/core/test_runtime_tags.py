"""A module that was moved is a module like any other: the runtime is kept beside it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trine.core import to
from trine.core.runtime import (
    PyTorchRuntime,
    named_runtime_modules,
    runtime_of,
    set_runtime,
)


class Unpicklable(PyTorchRuntime):
    """Nothing of it can end in a pickle or a copy unnoticed."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("a runtime reached a pickle")


class Equal(nn.Linear):
    """Compares by value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and torch.equal(self.weight, other.weight)

    def __hash__(self) -> int:
        return 1


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()))


def moved() -> nn.Module:
    return to(make(), "cpu", runtime_class=Unpicklable)


def pickled(module: nn.Module) -> nn.Module:
    result: nn.Module = pickle.loads(pickle.dumps(module))
    return result


def torch_saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    result: nn.Module = torch.load(file, weights_only=False)
    return result


def test_a_moved_module_has_no_attribute_more_than_one_that_was_not() -> None:
    plain, module = make(), moved()

    assert [set(vars(each)) for each in module.modules()] == [
        set(vars(each)) for each in plain.modules()
    ]


@pytest.mark.parametrize("save", [pickled, copy.deepcopy, copy.copy, torch_saved])
def test_a_moved_module_is_saved_and_copied_as_if_it_had_not_been(
    save: Callable[[nn.Module], nn.Module],
) -> None:
    module = moved()
    x = torch.randn(4, 3)

    twin = save(module)

    assert type(twin) is type(module)
    assert vars(twin).keys() == vars(module).keys()
    torch.testing.assert_close(twin(x), module(x))
    assert runtime_of(twin) is None
    assert isinstance(runtime_of(module), Unpicklable)


def test_the_pickle_of_a_moved_module_names_nothing_of_ours() -> None:
    module = moved()

    assert b"trine" not in pickle.dumps(module)


def test_own_pickling_of_a_module_still_decides() -> None:
    class Own(nn.Linear):
        def __getstate__(self) -> dict[str, Any]:
            return {**self.__dict__, "saved": True}

        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            twin = Own(1, 1)
            twin.__dict__.update(self.__getstate__())
            return twin

    twin = copy.deepcopy(to(Own(2, 2), "cpu", runtime_class=Unpicklable))

    assert vars(twin)["saved"] is True
    assert runtime_of(twin) is None


def test_the_state_dict_of_a_moved_module_loads_into_one_that_was_not() -> None:
    plain, module = make(), moved()

    keys = plain.load_state_dict(module.state_dict())

    assert not keys.missing_keys
    assert not keys.unexpected_keys
    assert list(module.state_dict()) == list(make().state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_moved_module_can_be_scripted_and_a_scripted_one_moved() -> None:
    module = moved().eval()
    x = torch.randn(4, 3)

    scripted = torch.jit.script(module)
    again = to(scripted, "cpu", runtime_class=Unpicklable)

    torch.testing.assert_close(again(x), module(x))
    assert isinstance(runtime_of(again), Unpicklable)


def test_a_moved_module_can_be_exported() -> None:
    module = moved().eval()
    x = torch.randn(4, 3)

    exported = torch.export.export(module, (x,))

    torch.testing.assert_close(exported.module()(x), module(x))


def test_a_module_equal_to_one_that_was_moved_was_not_moved() -> None:
    one, two = Equal(2, 2), Equal(2, 2)
    two.load_state_dict(one.state_dict())

    to(one, "cpu")

    assert one == two
    assert runtime_of(one) is not None
    assert runtime_of(two) is None


def test_a_runtime_does_not_keep_its_module_alive() -> None:
    module = moved()
    alive = [weakref.ref(each) for each in (module, runtime_of(module))]

    del module
    gc.collect()

    assert [each() for each in alive] == [None, None]


def test_a_runtime_given_by_hand_can_be_replaced_and_taken_back() -> None:
    module, first, second = nn.Flatten(), PyTorchRuntime("cpu", {}), PyTorchRuntime("cpu", {})

    set_runtime(module, first)
    set_runtime(module, second)
    gc.collect()
    found = runtime_of(module)
    set_runtime(module, None)

    assert found is second
    assert runtime_of(module) is None


def test_the_attribute_that_older_programs_set_by_hand_is_honoured() -> None:
    module, runtime = nn.Flatten(), PyTorchRuntime("cpu", {})
    module._ppe_runtime = runtime  # type: ignore[assignment]  # modules take any attribute

    assert runtime_of(module) is runtime


# Which modules are told about.


def names_of(module: nn.Module) -> list[str]:
    return [name for name, _ in named_runtime_modules(module, "main")]


def test_a_module_moved_as_a_whole_is_told_about_once() -> None:
    assert names_of(moved()) == ["main"]


def test_submodules_moved_by_themselves_are_found_at_any_depth_under_their_full_name() -> None:
    module = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ModuleDict({"c": nn.Linear(1, 1)})})
    inner = module.get_submodule("b.c")
    to(module["a"], "cpu")
    to(inner, "cpu")

    assert list(named_runtime_modules(module)) == [("a", module["a"]), ("b.c", inner)]


def test_a_submodule_moved_with_another_runtime_is_told_about_beside_its_parent() -> None:
    module = moved()
    to(module.get_submodule("1"), "cpu")

    assert names_of(module) == ["main", "1"]


def test_a_module_moved_after_its_submodule_takes_the_submodule_over() -> None:
    module = make()
    to(module.get_submodule("1"), "cpu")
    to(module, "cpu")

    assert names_of(module) == ["main"]


def test_a_submodule_used_twice_is_told_about_once() -> None:
    shared = to(nn.Linear(2, 2), "cpu")

    assert names_of(nn.Sequential(shared, nn.Sequential(shared))) == ["0"]


def test_a_module_that_was_not_moved_has_nobody_to_tell() -> None:
    assert names_of(make()) == []
