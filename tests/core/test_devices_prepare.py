"""Preparing a device, which only reads the state it is shown; and what a checkpoint holds of it."""

from __future__ import annotations

import copy
import dataclasses
import io
import random
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from trine.core import CPUDevice, CUDADevice, Precision, Serializable, State, TrineError
from trine.core import precision as precision_module
from trine.core.devices import device as device_module


def a_run(precision: Precision | str = Precision.FP32) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    return State(model, (optimizer,), precision)


class ReadOnly:
    """Stands for any trainer's state: it can be read, and every change fails the test."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        pytest.fail(f"prepare set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        pytest.fail(f"prepare deleted {name}")


def test_preparing_leaves_every_part_of_the_state_as_it_was() -> None:
    state = a_run()
    model, (optimizer,) = state.model, state.optimizers
    assert model is not None
    model.train()
    before = dataclasses.replace(state)
    weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    params = [(param, param._version) for param in model.parameters()]
    rng, python_rng = torch.get_rng_state(), random.getstate()

    CPUDevice().prepare(state)
    CPUDevice().prepare(ReadOnly(state))  # type: ignore[arg-type]  # by its attributes

    assert state == before
    assert all(torch.equal(model.state_dict()[name], old) for name, old in weights.items())
    assert str(optimizer.state_dict()) == str(moments)
    new = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(new, grads, strict=True))
    assert all(p._version == version for p, version in params)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), rng)
    assert random.getstate() == python_rng


def test_what_a_further_kind_of_device_does_to_start_is_not_shown_the_state() -> None:
    started: list[tuple[Any, ...]] = []

    class Own(CPUDevice):
        def initialize(self, *args: Any) -> None:
            started.append(args)

    Own().prepare(a_run())

    assert started == [()]


def test_a_state_cannot_be_changed_by_whoever_it_is_shown_to() -> None:
    state = a_run()

    with pytest.raises(dataclasses.FrozenInstanceError):
        state.model = None  # type: ignore[misc]  # the mistake under test


@pytest.mark.parametrize("state", [State(), SimpleNamespace(), SimpleNamespace(model=None)])
def test_a_state_may_be_empty(state: Any) -> None:
    CPUDevice().prepare(state)


def test_preparing_twice_is_preparing() -> None:
    device = CPUDevice()
    device.prepare(a_run())

    device.prepare(a_run())


def test_a_precision_the_device_cannot_do_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"cpu cannot compute in amp_fp8.*It can compute in: fp32"):
        CPUDevice().prepare(a_run("amp_fp8"))


@pytest.mark.parametrize("precision", ["bf16", Precision.FP16])
def test_a_model_left_in_fp32_is_refused_where_its_parameters_should_be_smaller(
    precision: Precision | str,
) -> None:
    with pytest.raises(ValueError, match=r"model's are in torch\.float32. Convert it first") as no:
        CPUDevice().prepare(a_run(precision))

    assert f"amp_{Precision(precision)}" in str(no.value)


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16", "amp_bf16"])
@pytest.mark.parametrize(("dtype", "fitting"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_a_model_in_a_smaller_dtype_is_refused_where_its_parameters_should_be_in_fp32(
    precision: str, dtype: torch.dtype, fitting: str
) -> None:
    model = nn.Linear(2, 2).to(dtype)

    with pytest.raises(
        ValueError, match=rf"{precision} means .* torch\.float32, but .* {dtype}\. "
    ):
        CPUDevice().prepare(State(model, precision=precision))
    with pytest.raises(ValueError, match=rf"model\.to\(torch\.float32\), or ask for {fitting}\.$"):
        CPUDevice().prepare(State(model, precision=precision))
    CPUDevice().prepare(State(model, precision=fitting))
    CPUDevice().prepare(State(model.to(torch.float32), precision=precision))


def test_a_model_in_the_other_small_dtype_is_told_its_own() -> None:
    with pytest.raises(ValueError, match=r"model\.to\(torch\.float16\), or ask for bf16\.$"):
        CPUDevice().prepare(State(nn.Linear(2, 2).bfloat16(), precision="fp16"))


def test_a_model_in_fp64_is_refused_and_no_precision_is_named_that_would_suit_it() -> None:
    with pytest.raises(ValueError, match=r"in torch\.float64\. .* model\.to\(torch\.float32\)\.$"):
        CPUDevice().prepare(State(nn.Linear(2, 2).double()))


def test_a_model_is_taken_as_it_is_where_no_precision_is_named() -> None:
    CPUDevice().prepare(SimpleNamespace(model=nn.Linear(2, 2).half()))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16", "amp_bf16"])
def test_frozen_layers_in_a_smaller_dtype_below_trained_ones_in_fp32_are_a_choice(
    precision: str,
) -> None:
    frozen = nn.Linear(2, 2).half().requires_grad_(False)

    CPUDevice().prepare(State(nn.Sequential(frozen, nn.Linear(2, 2)), precision=precision))


def test_a_model_with_some_layers_in_fp32_is_taken_as_it_is() -> None:
    state = a_run("bf16")
    assert isinstance(state.model, nn.Sequential)
    state.model[0].to(torch.bfloat16)

    CPUDevice().prepare(state)


@pytest.mark.parametrize("precision", ["bf16", "amp_bf16", "fp32"])
def test_a_model_without_parameters_suits_every_precision(precision: str) -> None:
    CPUDevice().prepare(State(model=nn.ReLU(), precision=precision))


def test_a_model_that_torchao_has_not_converted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "fp8_library", lambda: "torchao")
    monkeypatch.setattr(CPUDevice, "_has_fp8", lambda device: True)
    Converted = type("Float8Linear", (nn.Linear,), {"__module__": "torchao.float8.layers"})

    with pytest.raises(ValueError, match="convert_to_float8_training"):
        CPUDevice().prepare(a_run("amp_fp8"))
    CPUDevice().prepare(State(nn.Sequential(Converted(2, 2)), precision="amp_fp8"))


def test_fp8_by_transformer_engine_asks_nothing_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision_module, "find_spec", lambda name: name)
    monkeypatch.setattr(CPUDevice, "_has_fp8", lambda device: True)

    CPUDevice().prepare(a_run("amp_fp8"))


def test_a_device_that_does_not_work_is_told_with_what_torch_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(device: CPUDevice) -> None:
        raise RuntimeError("driver too old\nand a long story")

    monkeypatch.setattr(CPUDevice, "synchronize", broken)

    with pytest.raises(TrineError, match="cpu does not work: driver too old Does a sum"):
        CPUDevice().prepare(a_run())


# What is global changes in prepare, and only if it was asked for.


@pytest.fixture
def cuda_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A GPU by double: what was asked of torch.cuda. TF32 is off before, and as it was after."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "ones", lambda *size, device: _Two())
    before = tf32()
    set_tf32(False, False)
    yield calls
    set_tf32(*before)


class _Two:
    def sum(self) -> int:
        return 2


def tf32() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def set_tf32(matmul: bool, cudnn: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = cudnn


def test_making_a_cuda_device_changes_nothing_and_preparing_it_makes_it_current(
    cuda_calls: list[Any],
) -> None:
    device = CUDADevice(1, allow_tf32=True)
    assert (cuda_calls, tf32()) == ([], (False, False))

    device.prepare(State())

    assert (cuda_calls, tf32()) == (["cuda:1"], (True, True))


@pytest.mark.usefixtures("cuda_calls")
@pytest.mark.parametrize("already", [False, True])
def test_tf32_is_left_alone_unless_it_was_asked_for(already: bool) -> None:
    set_tf32(already, False)

    CUDADevice(0).prepare(State())

    assert tf32() == (already, False)


@pytest.mark.usefixtures("cuda_calls")
def test_tf32_is_switched_off_where_that_was_asked_for() -> None:
    set_tf32(True, True)

    CUDADevice(0, allow_tf32=False).prepare(State())

    assert tf32() == (False, False)


# Checkpoints.


def test_a_device_continues_with_the_random_numbers_of_its_state() -> None:
    device = CPUDevice()
    state = device.state_dict()
    drawn = torch.rand(4)

    device.load_state_dict(state)

    assert torch.equal(torch.rand(4), drawn)


def test_the_state_goes_through_a_file_that_holds_no_code() -> None:
    device, file = CPUDevice(), io.BytesIO()
    torch.save(device.state_dict(), file)
    drawn = torch.rand(4)
    file.seek(0)

    device.load_state_dict(torch.load(file, weights_only=True))

    assert torch.equal(torch.rand(4), drawn)


def test_an_empty_state_changes_nothing() -> None:
    rng = torch.get_rng_state()

    CPUDevice().load_state_dict({})

    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize(
    "state", [{"kind": "cuda", "rng": torch.zeros(1)}, {"kind": "cpu"}, {"something": 1}]
)
def test_the_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected the state of a device of kind 'cpu'"):
        CPUDevice().load_state_dict(state)


def test_an_accelerators_random_numbers_are_those_of_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, calls = ModuleType("maker"), []
    rng = torch.tensor([1, 2], dtype=torch.uint8)
    module.get_rng_state = lambda device: rng  # type: ignore[attr-defined]
    module.set_rng_state = lambda *args: calls.append(args)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = CUDADevice(1)

    state = device.state_dict()
    device.load_state_dict(state)

    assert state == {"kind": "cuda", "rng": rng}
    assert calls == [(rng, torch.device("cuda", 1))]


@pytest.mark.gpu
def test_a_gpu_prepares_and_continues_with_its_random_numbers() -> None:
    device = CUDADevice()
    device.prepare(State())
    state = device.state_dict()
    drawn = torch.rand(4, device=device.torch_device)

    device.load_state_dict(state)

    assert torch.equal(torch.rand(4, device=device.torch_device), drawn)
    assert isinstance(device, Serializable)
