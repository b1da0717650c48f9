"""Runtimes: what the base class asks for, what torch's own does, and who is chosen."""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trine.core import get_device, tracing
from trine.core.handler import CodeBlock
from trine.core.runtime import BaseRuntime, PyTorchRuntime, RuntimeRegistry, runtime_registry
from trine.core.tracing import TraceEvent, add_sink, remove_sink, span

METHODS = {
    "convert_batch": ("args",),
    "eval_post_step": ("evaluator", "module", "batch_idx", "batch", "outs"),
    "eval_pre_step": ("evaluator", "module", "batch_idx", "batch"),
    "execute": ("code_block", "batch"),
    "initialize_module": ("module", "loader_or_batch", "optimizer"),
    "load_state_dict": ("state_dict",),
    "map": ("func", "iterable", "out_keys", "device"),
    "move_module": ("module",),
    "move_tensor": ("tensor",),
    "state_dict": (),
    "trace": ("cls", "event_name", "arg"),
    "train_cleanup": ("module",),
    "train_epoch_begin": ("module",),
    "train_epoch_end": ("module",),
    "train_post_step": ("trainer", "module", "batch_idx", "batch", "outs"),
    "train_pre_step": ("trainer", "module", "batch_idx", "batch"),
    "train_validation_begin": ("module",),
    "train_validation_end": ("module",),
}


class ListSink:
    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def record(self, event: TraceEvent) -> None:
        self.events.append(event)


@pytest.fixture
def sink() -> Iterator[ListSink]:
    sink = ListSink()
    add_sink(sink)
    yield sink
    remove_sink(sink)


@dataclass
class Pair:
    left: Tensor
    right: object


class Shifting(PyTorchRuntime):
    """Its device is one where every number is greater by 100."""

    def move_tensor(self, tensor: Tensor) -> Tensor:
        return tensor + 100


def block(runtime: BaseRuntime, func: Callable[..., Any], **changes: Any) -> CodeBlock:
    plain: dict[str, Any] = {
        "optimizers": [],
        "backprop": False,
        "backprop_from": None,
        "backprop_to": None,
        "state": {},
    }
    return CodeBlock(func=func, runtime=runtime, **{**plain, **changes})


# The interface.


@pytest.mark.parametrize("name", METHODS)
def test_the_base_class_has_the_methods_of_the_reference(name: str) -> None:
    method = getattr(BaseRuntime, name)

    function = getattr(method, "__func__", method)
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    assert tuple(each for each in arguments if each != "self") == METHODS[name]


def test_a_runtime_remembers_its_device_and_its_options_as_given() -> None:
    options = {"a": 1}

    runtime = BaseRuntime("mine:0", options)

    assert runtime.device_spec == "mine:0"
    assert runtime.options is options


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda runtime: runtime.move_module(nn.Flatten()), "move_module"),
        (lambda runtime: runtime.move_tensor(torch.ones(1)), "move_tensor"),
        (lambda runtime: runtime.execute(block(runtime, nn.Flatten()), {}), "execute"),
        (lambda runtime: runtime.map(block(runtime, nn.Flatten()), []), "map"),
    ],
)
def test_what_only_a_subclass_can_know_says_that_it_is_missing(
    call: Callable[[BaseRuntime], object], method: str
) -> None:
    class Mine(BaseRuntime):
        pass

    with pytest.raises(NotImplementedError, match=rf"Mine has to define {method}\("):
        call(Mine("mine", {}))


def test_callbacks_need_not_be_overridden() -> None:
    runtime, module, trainer = BaseRuntime("mine", {}), nn.Flatten(), None

    runtime.initialize_module(module, None)
    for name, arguments in METHODS.items():
        if name.startswith(("train_", "eval_")):
            getattr(runtime, name)(*[{"module": module}.get(each, trainer) for each in arguments])


# Batches.


def test_a_converted_batch_keeps_every_container_type() -> None:
    batch = [(torch.ones(1), "s"), {"a": [torch.zeros(1)]}, Pair(torch.ones(1), None)]

    moved = Shifting("cpu", {}).convert_batch(batch)

    assert moved == [
        (torch.tensor([101.0]), "s"),
        {"a": [torch.tensor([100.0])]},
        Pair(torch.tensor([101.0]), None),
    ]
    assert [type(each) for each in moved] == [tuple, dict, Pair]


class Moving:
    """Moves itself, and in place if it is told so."""

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place
        self.where: object = None

    def to(self, device: object) -> Moving | None:
        self.where = device
        return None if self.in_place else self


@pytest.mark.parametrize("in_place", [True, False])
def test_an_object_that_can_move_itself_is_asked_to(in_place: bool) -> None:
    thing = Moving(in_place)

    moved = PyTorchRuntime("cpu", {}).convert_batch([thing])

    assert moved == [thing]
    assert thing.where == torch.device("cpu")


# Choosing.


class Registered(BaseRuntime):
    pass


@pytest.mark.parametrize("spec", ["cpu", "cpu:0", torch.device("cpu"), get_device("cpu")])
def test_a_registered_kind_is_found_by_every_spelling(spec: Any) -> None:
    registry = RuntimeRegistry(PyTorchRuntime)
    registry.register("cpu", Registered)

    assert registry.get_runtime_class_for_device_spec(spec) is Registered


@pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="auto is no CPU here"
)
def test_a_kind_is_found_where_the_machine_chooses_the_device() -> None:
    registry = RuntimeRegistry(PyTorchRuntime)
    registry.register("cpu", Registered)

    assert registry.get_runtime_class_for_device_spec("auto") is Registered


def test_an_unregistered_kind_gets_the_fallback() -> None:
    assert runtime_registry.get_runtime_class_for_device_spec("nobody:3") is PyTorchRuntime


def test_the_registry_refuses_what_is_no_kind_or_no_class() -> None:
    registry = RuntimeRegistry(PyTorchRuntime)

    with pytest.raises(ValueError, match="register 'mine'"):
        registry.register("mine:0", Registered)
    with pytest.raises(TypeError, match="Register the class"):
        registry.register("mine", Registered("mine", {}))  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match="got int"):
        registry.get_runtime_class_for_device_spec(3)  # type: ignore[arg-type]  # the mistake


# PyTorchRuntime.


def test_a_device_that_is_absent_fails_where_the_runtime_is_made() -> None:
    with pytest.raises(ValueError, match="This machine has"):
        PyTorchRuntime("nodevice", {})


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(2)

    assert PyTorchRuntime("cpu", {}).move_tensor(tensor) is tensor


def product_dtype(options: dict[str, Any]) -> torch.dtype:
    runtime = PyTorchRuntime("cpu", options)
    model = nn.Linear(3, 3)
    result: Tensor = block(runtime, model)({"input": torch.ones(2, 3)})
    return result.dtype


@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        (True, torch.bfloat16),
        (False, torch.float32),
        ({}, torch.bfloat16),
        ({"enabled": False}, torch.float32),
        ({"dtype": torch.float16}, torch.float16),
        ({"device_type": "cpu", "dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
def test_autocast_is_that_of_the_runtimes_own_device(option: Any, dtype: torch.dtype) -> None:
    assert product_dtype({"autocast": option}) == dtype


def test_autocast_of_the_surroundings_does_not_reach_a_runtime_without_the_option() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product_dtype({}) == torch.float32


def test_autocast_ends_with_the_block_even_if_it_raises() -> None:
    def fail() -> None:
        assert torch.is_autocast_enabled("cpu")
        raise KeyError("inside")

    runtime = PyTorchRuntime("cpu", {"autocast": True})

    with pytest.raises(KeyError, match="inside"):
        block(runtime, fail)({})
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_where_torch_has_none_is_refused_when_the_runtime_is_made() -> None:
    with pytest.raises(ValueError, match="no autocast for 'meta'"):
        PyTorchRuntime("cpu", {"autocast": {"device_type": "meta"}})


def test_no_autocast_is_none_and_anything_else_is_refused() -> None:
    assert product_dtype({"autocast": None}) == torch.float32
    with pytest.raises(TypeError, match=r"'autocast' takes True, False or a dict .* got 'yes'"):
        PyTorchRuntime("cpu", {"autocast": "yes"})


def test_an_unknown_option_is_refused_where_no_subclass_could_know_it() -> None:
    with pytest.raises(ValueError, match=r"no option 'autocasts'.* options: autocast, grad_scaler"):
        PyTorchRuntime("cpu", {"autocasts": True})

    assert Shifting("cpu", {"by": 100}).options == {"by": 100}


def test_autocast_switched_off_where_torch_has_none_is_harmless() -> None:
    option = {"device_type": "meta", "enabled": False}

    assert product_dtype({"autocast": option}) == torch.float32


def test_a_scaler_that_is_none_is_refused_when_the_runtime_is_made() -> None:
    with pytest.raises(TypeError, match=r"torch\.amp\.GradScaler.*got int"):
        PyTorchRuntime("cpu", {"grad_scaler": 3})


# Tracing.


def test_the_argument_of_a_trace_reaches_the_sinks(sink: ListSink) -> None:
    with PyTorchRuntime.trace("copy", {"bytes": 3}):
        pass
    with BaseRuntime.trace(None, None):
        pass

    first, second = sink.events
    assert (first.name, first.category, first.args) == ("copy", "user", {"arg": {"bytes": 3}})
    assert (second.name, second.args) == ("BaseRuntime", None)


def test_a_trace_with_nobody_listening_costs_little_more_than_a_span() -> None:
    names = {"trace": PyTorchRuntime.trace, "span": span}
    statements = ["with trace('x', 1): pass", "with span('x'): pass"]
    timers = [timeit.Timer(text, globals=names) for text in statements]
    tracer = sys.gettrace()
    sys.settrace(None)  # a coverage tracer charges for every Python line
    try:
        rounds = [[timer.timeit(2000) for timer in timers] for _ in range(25)]
    finally:
        sys.settrace(tracer)
    traced, spanned = (min(times) for times in zip(*rounds, strict=True))

    # Measured: about 1.5; a @contextmanager would be at 6.
    assert not tracing.enabled
    assert traced < spanned * 3
