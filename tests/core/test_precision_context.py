"""Precision contexts: what is computed in which dtype, and what is back afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
from torch import nn

from trine.core import CPUDevice, CUDADevice, Precision, get_device
from trine.core import precision as precision_module


def product_dtype(dtype: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype in which a matrix product of two matrices of `dtype` comes out."""
    return torch.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype)).dtype


@pytest.mark.parametrize(
    ("precision", "inputs", "computed"),
    [
        (Precision.FP32, torch.float32, torch.float32),
        (Precision.AMP_BF16, torch.float32, torch.bfloat16),
        (Precision.AMP_FP16, torch.float32, torch.float16),
        (Precision.BF16, torch.bfloat16, torch.bfloat16),
        (Precision.FP16, torch.float16, torch.float16),
        ("amp_bf16", torch.float32, torch.bfloat16),
        ("AMP", torch.float32, torch.float16),
    ],
)
def test_the_cpu_computes_in_every_precision_it_names(
    precision: Precision | str, inputs: torch.dtype, computed: torch.dtype
) -> None:
    with CPUDevice().precision_context(precision):
        assert product_dtype(inputs) is computed

    assert product_dtype() is torch.float32


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_plain_precision_inside_amp_computes_in_the_dtypes_of_its_inputs(precision: str) -> None:
    device = CPUDevice()

    with device.precision_context("amp_bf16"):
        with device.precision_context(precision):
            assert product_dtype(torch.float32) is torch.float32
            assert product_dtype(torch.float16) is torch.float16
        assert product_dtype() is torch.bfloat16


def test_contexts_of_different_precisions_nest_and_the_outer_one_is_back() -> None:
    device = CPUDevice()

    with device.precision_context("amp_bf16"):
        with device.precision_context("amp_fp16"):
            assert product_dtype() is torch.float16
        assert product_dtype() is torch.bfloat16
    assert product_dtype() is torch.float32


@pytest.mark.parametrize(
    ("outer", "inner", "dtypes"),
    [
        ("amp_bf16", "amp_fp16", (torch.bfloat16, torch.float16, torch.bfloat16)),
        ("amp_fp16", "amp_bf16", (torch.float16, torch.bfloat16, torch.float16)),
    ],
)
@pytest.mark.parametrize("between", [None, "fp32", "bf16"])
def test_one_model_computes_in_the_dtype_of_each_of_two_nested_contexts(
    outer: str, inner: str, dtypes: tuple[torch.dtype, ...], between: str | None
) -> None:
    device, model, x = CPUDevice(), nn.Linear(4, 4), torch.ones(1, 4)
    middle = nullcontext() if between is None else device.precision_context(between)

    with device.precision_context(outer):
        first = model(x)
        with middle, device.precision_context(inner):
            second = model(x)
        third = model(x)
    sum(y.float().sum() for y in (first, second, third)).backward()

    assert (first.dtype, second.dtype, third.dtype) == dtypes
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((4, 4), 3.0))


def test_a_context_inside_torchs_autocast_of_another_dtype_does_not_meet_its_casts() -> None:
    context, model, x = CPUDevice().precision_context("amp_fp16"), nn.Linear(4, 4), torch.ones(1, 4)
    dtypes = []

    with torch.autocast("cpu", torch.bfloat16):
        dtypes.append(model(x).dtype)
        # Off, yet it names the dtype that is asked for next.
        with torch.autocast("cpu", torch.float16, enabled=False), context:
            dtypes.append(model(x).dtype)
        dtypes.append(model(x).dtype)

    assert dtypes == [torch.bfloat16, torch.float16, torch.bfloat16]


def test_the_inner_contexts_casts_are_gone_after_an_error_too() -> None:
    device, model, x = CPUDevice(), nn.Linear(4, 4), torch.ones(1, 4)

    @device.precision_context("amp_fp16")
    def compute_and_fail() -> None:
        model(x)
        raise LookupError

    with device.precision_context("amp_bf16"):
        with pytest.raises(LookupError):
            compute_and_fail()
        assert model(x).dtype is torch.bfloat16


def test_a_context_in_one_of_the_same_dtype_casts_a_parameter_once() -> None:
    context, model, x = CPUDevice().precision_context("amp_bf16"), nn.Linear(4, 4), torch.ones(1, 4)

    with context:
        outside = model(x)
        with context:
            inside = model(x)

    assert cast_of_weight(outside) is cast_of_weight(inside)


def cast_of_weight(output: torch.Tensor) -> object:
    """The graph node that made the operand which the product took for the weight."""
    assert output.grad_fn is not None
    return output.grad_fn.next_functions[-1][0].next_functions[0][0]  # type: ignore[union-attr]


def test_one_context_can_be_entered_while_it_is_open_and_used_again() -> None:
    context = CPUDevice().precision_context("amp_bf16")

    for _ in range(2):
        with context, CPUDevice().precision_context("fp32"):
            with context:
                assert product_dtype() is torch.bfloat16
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.float32
        assert not torch.is_autocast_enabled("cpu")


def test_what_was_in_force_is_back_after_an_error_at_every_depth() -> None:
    context = CPUDevice().precision_context("amp_fp16")

    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(LookupError, match="inside"), context, context:
            raise LookupError("inside")
        assert product_dtype() is torch.bfloat16
    assert product_dtype() is torch.float32


def test_a_context_that_cannot_be_entered_leaves_nothing_switched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CPUDevice, "_has_fp8", lambda device: True)
    monkeypatch.setattr(precision_module, "_fp8_parts", lambda: [BrokenContext()])
    context = CPUDevice().precision_context("amp_fp8")

    with pytest.raises(LookupError, match="cannot be entered"), context:
        pass

    assert product_dtype() is torch.float32


class BrokenContext:
    def __enter__(self) -> None:
        raise LookupError("cannot be entered")

    def __exit__(self, *_: object) -> None: ...


def test_a_context_open_in_two_threads_belongs_to_each_of_them() -> None:
    context = CPUDevice().precision_context("amp_bf16")
    seen: list[torch.dtype] = []

    def other() -> None:
        seen.append(product_dtype())
        with context:
            seen.append(product_dtype())
        seen.append(product_dtype())

    with context:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert product_dtype() is torch.bfloat16

    assert seen == [torch.float32, torch.bfloat16, torch.float32]


def test_a_context_decorates_a_function_that_calls_itself() -> None:
    @CPUDevice().precision_context("amp_bf16")
    def depth(levels: int) -> list[torch.dtype]:
        return [product_dtype(), *(depth(levels - 1) if levels else [])]

    assert depth(2) == [torch.bfloat16] * 3
    assert product_dtype() is torch.float32


def test_making_a_context_changes_nothing() -> None:
    context = CPUDevice().precision_context("amp_bf16")

    assert product_dtype() is torch.float32
    assert repr(context) == "<amp_bf16 on cpu>"


def test_training_in_amp_keeps_parameters_and_gradients_in_fp32() -> None:
    model = nn.Linear(4, 2)

    with CPUDevice().precision_context(Precision.AMP_BF16):
        loss = model(torch.ones(3, 4)).sum()
    loss.backward()

    assert loss.dtype is torch.bfloat16
    assert model.weight.dtype is torch.float32
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    assert torch.equal(model.weight.grad, torch.full((2, 4), 3.0))


# What a device cannot do.


def test_a_precision_beyond_a_device_is_refused_with_those_it_has() -> None:
    with pytest.raises(ValueError, match="cpu cannot compute in amp_fp8") as caught:
        CPUDevice().precision_context("amp_fp8")

    text = str(caught.value)
    assert "It can compute in: fp32, amp_fp16, amp_bf16, fp16, bf16." in text
    assert "Transformer Engine or torchao" in text


def test_an_unknown_precision_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"Unknown precision 'int3'\. Choose one of: fp32,"):
        CPUDevice().precision_context("int3")


def test_the_cpu_lists_what_it_can_and_can_what_it_lists() -> None:
    device = CPUDevice()

    assert set(device.supported_precisions()) == set(Precision) - {Precision.AMP_FP8}
    for precision in device.supported_precisions():
        with device.precision_context(precision):
            assert product_dtype(precision.param_dtype) is precision.compute_dtype


def test_a_device_without_autocast_computes_in_fp32_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    device = CPUDevice()

    assert device.supported_precisions() == (Precision.FP32,)
    with device.precision_context("fp32"):
        assert product_dtype() is torch.float32
    with pytest.raises(ValueError, match=r"It can compute in: fp32\."):
        device.precision_context("amp_bf16")


def test_a_device_says_itself_which_dtypes_its_autocast_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("maker")
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)

    assert CPUDevice().supported_precisions() == (
        Precision.FP32,
        Precision.AMP_BF16,
        Precision.BF16,
    )


# CUDA, and fp8, by doubles.


@pytest.fixture
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize("bf16", [False, True])
def test_an_old_gpu_has_no_bf16(monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    able = CUDADevice(0).supported_precisions()

    assert (Precision.AMP_BF16 in able) == (Precision.BF16 in able) == bf16
    assert {Precision.FP32, Precision.AMP_FP16, Precision.FP16} <= set(able)
    assert Precision.AMP_FP8 not in able


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize(
    ("capability", "installed", "able"),
    [
        ((9, 0), "torchao", True),
        ((8, 9), "transformer_engine", True),
        ((8, 6), "torchao", False),
        ((9, 0), None, False),
    ],
)
def test_fp8_takes_both_a_gpu_and_a_library(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: str | None, able: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        precision_module, "find_spec", lambda name: name if name == installed else None
    )

    assert (Precision.AMP_FP8 in CUDADevice(0).supported_precisions()) == able


@pytest.mark.parametrize("name", ["autocast", "fp8_autocast"])
def test_transformer_engine_is_switched_on_inside_bf16_by_its_new_name_or_its_old(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    log: list[object] = []

    @contextmanager
    def switch(enabled: bool) -> Iterator[None]:
        log.append(("on", enabled, product_dtype()))
        yield
        log.append("off")

    engine = ModuleType("transformer_engine.pytorch")
    setattr(engine, name, switch)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setattr(precision_module, "find_spec", lambda name: name)
    monkeypatch.setattr(CPUDevice, "_has_fp8", lambda device: True)

    with CPUDevice().precision_context("amp_fp8"):
        log.append("inside")

    assert log == [("on", True, torch.bfloat16), "inside", "off"]


def test_torchao_computes_in_its_own_modules_and_needs_bf16_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        precision_module, "find_spec", lambda name: name if name == "torchao" else None
    )
    monkeypatch.setattr(CPUDevice, "_has_fp8", lambda device: True)

    with CPUDevice().precision_context("amp_fp8"):
        assert product_dtype() is torch.bfloat16


@pytest.mark.gpu
def test_a_gpu_computes_in_every_precision_it_lists_but_fp8() -> None:
    device = get_device("cuda")

    for precision in set(device.supported_precisions()) - {Precision.AMP_FP8}:
        matrix = torch.ones(2, 2, dtype=precision.param_dtype, device=device.torch_device)
        with device.precision_context(precision):
            assert (matrix @ matrix).dtype is precision.compute_dtype
