"""The names that can be relied on, and the signatures that other programs were written for.

The reference of `Device` is `composer.devices`, that of runtimes, handlers and the profiler
is pytorch-pfn-extras 0.9. A program written for either moves over by changing the import,
so every call that they accept has to be accepted here: their parameters come first, with
their names, in their order, and whatever we add is optional.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import trine.core
from trine.core import CPUDevice, Device, profiler, tracing
from trine.core.handler import (
    BaseHandler,
    BaseLogic,
    ClosureLogic,
    CodeBlock,
    CodeBlockLogic,
    Handler,
    Logic,
    forward,
    update_parameters,
)
from trine.core.runtime import BaseRuntime, PyTorchRuntime, runtime_registry

REQUIRED = inspect.Parameter.empty
Parameters = Mapping[str, object]


def required(*names: str) -> dict[str, object]:
    return dict.fromkeys(names, REQUIRED)


def accepts(function: Callable[..., Any], wanted: Parameters, *, bound: bool = False) -> None:
    """Assert that each call of the reference is one of ours too.

    Args:
        function: ours.
        wanted: the reference's parameters, in order, with their defaults.
        bound: whether the first parameter of ours is the object itself.
    """
    ours = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    positional = [p.name for p in ours if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional[: len(wanted)] == list(wanted)
    for parameter, default in zip(ours, wanted.values(), strict=False):
        # One that the reference requires may be optional here.
        assert default is REQUIRED or parameter.default == default, parameter
    for parameter in ours[len(wanted) :]:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert variadic or parameter.default is not REQUIRED, parameter


# Names.


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "trine.core",
            "Device CPUDevice CUDADevice MPSDevice XPUDevice get_device register_device "
            "Precision Serializable State to map trace",
        ),
        ("trine.core.runtime", "BaseRuntime PyTorchRuntime runtime_registry DeviceLike"),
        (
            "trine.core.handler",
            "CodeBlock forward update_parameters BaseHandler Handler BaseLogic Logic "
            "CodeBlockLogic ClosureLogic",
        ),
        ("trine.core.training", "Trainer Evaluator"),
        (
            "trine.core.profiler",
            "record record_function record_iterable TimeSummary get_time_summary",
        ),
        ("trine.core.tracing", "TraceEvent TraceSink span instant counter record_span add_sink"),
        ("trine.core.doctor", "examine main"),
    ],
)
def test_every_promised_name_is_there_and_declared_public(module: str, names: str) -> None:
    found = importlib.import_module(module)

    assert [name for name in names.split() if not hasattr(found, name)] == []
    assert set(names.split()) <= set(found.__all__)


def test_the_submodules_come_with_the_package() -> None:
    for name in ("runtime", "handler", "training", "profiler", "tracing", "batches"):
        assert getattr(trine.core, name).__name__ == f"trine.core.{name}"
        assert name in trine.core.__all__


@pytest.mark.parametrize("module", ["", ".runtime", ".handler", ".training", ".profiler"])
def test_whatever_is_declared_public_exists(module: str) -> None:
    found = importlib.import_module(f"trine.core{module}")

    assert [name for name in found.__all__ if not hasattr(found, name)] == []
    assert list(found.__all__) == sorted(found.__all__)


def test_the_class_names_of_composer_are_aliases() -> None:
    assert trine.core.DeviceCPU is trine.core.CPUDevice
    assert trine.core.DeviceGPU is trine.core.CUDADevice
    assert trine.core.DeviceMPS is trine.core.MPSDevice


def test_the_misspelt_name_of_pytorch_pfn_extras_is_an_alias() -> None:
    handler = importlib.import_module("trine.core.handler")
    misspelt = "ClousureLogic"  # codespell:ignore clousure

    assert getattr(handler, misspelt) is ClosureLogic


# Device, after Composer.

DEVICE_METHODS: dict[str, Parameters] = {
    "dataloader_to_device": required("dataloader", "prefetch_fn"),
    "module_to_device": required("module"),
    "optimizer_to_device": required("optimizer"),
    "precision_context": required("precision"),
    "prepare": required("state"),
    "tensor_to_device": required("tensor"),
    "batch_to_device": required("batch"),
    "state_dict": {},
}


@pytest.mark.parametrize("method", DEVICE_METHODS)
@pytest.mark.parametrize(
    "kind",
    [Device, CPUDevice, trine.core.CUDADevice, trine.core.MPSDevice, trine.core.XPUDevice],
)
def test_every_kind_of_device_takes_the_calls_of_the_reference(
    kind: type[Device], method: str
) -> None:
    accepts(getattr(kind, method), DEVICE_METHODS[method], bound=True)


def test_a_checkpoint_is_loaded_as_the_reference_does() -> None:
    device = CPUDevice()
    state = device.state_dict()
    drawn = torch.rand(3)

    device.load_state_dict(state)

    assert torch.equal(torch.rand(3), drawn)


def test_the_backend_is_a_property_under_both_names() -> None:
    for name in ("ddp_backend", "dist_backend"):
        assert isinstance(inspect.getattr_static(Device, name), property)
    assert CPUDevice(dist_backend="mpi").ddp_backend == "mpi"


def test_a_device_is_serializable_as_in_the_reference() -> None:
    assert issubclass(Device, trine.core.Serializable)


# Runtime, after pytorch-pfn-extras.

STEP = required("module", "batch_idx", "batch")
RUNTIME_METHODS: dict[str, Parameters] = {
    "__init__": required("device_spec", "options"),
    "convert_batch": required("args"),
    "eval_post_step": required("evaluator", *STEP, "outs"),
    "eval_pre_step": required("evaluator", *STEP),
    "execute": required("code_block", "batch"),
    "initialize_module": required("module", "loader_or_batch") | {"optimizer": None},
    "map": required("func", "iterable") | {"out_keys": None, "device": "cpu"},
    "move_module": required("module"),
    "move_tensor": required("tensor"),
    "trace": required("event_name", "arg"),
    "train_cleanup": required("module"),
    "train_epoch_begin": required("module"),
    "train_epoch_end": required("module"),
    "train_post_step": required("trainer", *STEP, "outs"),
    "train_pre_step": required("trainer", *STEP),
    "train_validation_begin": required("module"),
    "train_validation_end": required("module"),
}


@pytest.mark.parametrize("method", RUNTIME_METHODS)
@pytest.mark.parametrize("runtime", [BaseRuntime, PyTorchRuntime])
def test_a_runtime_has_the_17_methods_of_the_reference(
    runtime: type[BaseRuntime], method: str
) -> None:
    assert len(RUNTIME_METHODS) == 17
    accepts(getattr(runtime, method), RUNTIME_METHODS[method], bound=method != "trace")


def test_trace_is_a_method_of_the_class() -> None:
    assert isinstance(inspect.getattr_static(BaseRuntime, "trace"), classmethod)


def test_the_registry_and_the_functions_around_it_take_the_calls_of_the_reference() -> None:
    accepts(runtime_registry.register, required("device_type", "runtime_class"))
    accepts(runtime_registry.get_runtime_class_for_device_spec, required("device"))
    accepts(trine.core.to, required("module_or_tensor", "device"))
    accepts(trine.core.map, required("func", "iterable") | {"out_keys": None, "device": "cpu"})


def test_the_options_of_to_are_given_by_name() -> None:
    parameters = inspect.signature(trine.core.to).parameters

    for name in ("options", "runtime_class", "config"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None


# Handler and Logic, after pytorch-pfn-extras.

HANDLER_METHODS: dict[str, Sequence[str]] = {
    "consume_options": ("options",),
    "train_setup": ("trainer", "loader"),
    "train_epoch_begin": ("trainer", "loader"),
    "train_epoch_end": ("trainer",),
    "train_cleanup": ("trainer",),
    "train_validation_begin": ("trainer", "evaluator"),
    "train_validation_end": ("trainer", "evaluator"),
    "train_step": ("trainer", "batch_idx", "batch", "complete_fn"),
    "train_post_step": ("trainer", "batch_idx", "batch", "outputs"),
    "eval_setup": ("evaluator", "loader"),
    "eval_loop_begin": ("evaluator",),
    "eval_step": ("evaluator", "batch_idx", "batch", "complete_fn"),
    "eval_loop_end": ("evaluator",),
    "eval_post_step": ("evaluator", "batch_idx", "batch", "outputs"),
}
LOGIC_METHODS: dict[str, Sequence[str]] = {
    "consume_options": ("options",),
    "train_epoch_begin": ("models", "epoch", "loader"),
    "train_epoch_end": ("models", "epoch"),
    "train_step": ("models", "optimizers", "batch_idx", "batch"),
    "train_step_optimizers": ("models", "optimizers", "batch_idx"),
    "train_validation_begin": ("models",),
    "train_validation_end": ("models",),
    "eval_step": ("models", "batch_idx", "batch"),
}


@pytest.mark.parametrize("method", HANDLER_METHODS)
@pytest.mark.parametrize("handler", [BaseHandler, Handler])
def test_a_handler_takes_the_calls_of_the_reference(
    handler: type[BaseHandler], method: str
) -> None:
    accepts(getattr(handler, method), required(*HANDLER_METHODS[method]), bound=True)


@pytest.mark.parametrize("method", LOGIC_METHODS)
@pytest.mark.parametrize("logic", [BaseLogic, Logic, CodeBlockLogic, ClosureLogic])
def test_a_logic_takes_the_calls_of_the_reference(logic: type[BaseLogic], method: str) -> None:
    accepts(getattr(logic, method), required(*LOGIC_METHODS[method]), bound=True)


def test_handlers_and_logics_are_made_as_in_the_reference() -> None:
    accepts(BaseHandler, required("logic", "options"))
    accepts(Handler, required("logic", "entry_runtime", "options"))
    accepts(BaseLogic, {"options": None})
    for logic in (Logic, CodeBlockLogic, ClosureLogic):
        accepts(logic, {"model_name": "main", "options": None})


def test_code_blocks_are_made_as_in_the_reference() -> None:
    accepts(
        CodeBlock,
        required(
            "func", "optimizers", "backprop", "backprop_from", "backprop_to", "state", "runtime"
        ),
    )
    accepts(forward, required("block"))
    accepts(
        update_parameters,
        required("block", "optimizers") | {"backprop_from": None, "backprop_to": None},
    )


# The profiler, after pytorch-pfn-extras.


def test_the_profiler_takes_the_calls_of_the_reference() -> None:
    rest: dict[str, object] = {"use_cuda": False, "enable": True, "device": "cpu", "trace": False}
    accepts(profiler.record, required("tag") | {"metric": None, **rest})
    accepts(profiler.record_function, required("tag") | rest)
    accepts(profiler.record_iterable, required("tag", "iter") | {"divide_metric": False, **rest})
    accepts(profiler.get_time_summary, {})


def test_a_time_summary_takes_the_calls_of_the_reference() -> None:
    summary = profiler.TimeSummary
    options = inspect.signature(summary).parameters

    assert {name: option.default for name, option in options.items()} == {
        "max_queue_size": 1000,
        "auto_init": True,
    }
    accepts(summary.add, required("name", "value"), bound=True)
    accepts(summary.summary, {"clear": False}, bound=True)
    accepts(summary.report, required("tag") | {"use_cuda": False}, bound=True)
    for name in ("initialize", "finalize", "synchronize"):
        accepts(getattr(summary, name), {}, bound=True)


# The seam.


def test_the_seam_keeps_the_calls_that_the_engine_makes() -> None:
    more: dict[str, object] = {"category": "user", "unit": "", "nbytes": 0, "args": None}
    accepts(tracing.span, required("name") | more)
    accepts(tracing.record_span, required("name", "start_ns", "end_ns") | more)
    accepts(tracing.set_step, required("step"))


def test_a_missing_parameter_would_be_noticed() -> None:
    def renamed(dataloader: object, prefetch: object = None) -> None: ...

    def too_much(dataloader: object, prefetch_fn: object, depth: int) -> None: ...

    for function in (renamed, too_much):
        with pytest.raises(AssertionError):
            accepts(function, DEVICE_METHODS["dataloader_to_device"])
