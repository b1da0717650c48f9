"""Accelerators without one: which device a name means, and what torch is asked for, by doubles."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trine.core import CUDADevice, MPSDevice, Precision, State, XPUDevice, get_device
from trine.core.devices import AcceleratorDevice, list_devices
from trine.core.devices.accelerator import AcceleratorEvent, AcceleratorStream
from trine.core.devices.mps import MPSEvent, MPSStream


class Calls:
    """Stands for any object of torch's: remembers what it was asked, and answers itself."""

    def __init__(self, log: list[Any], name: str) -> None:
        self._log, self._name = log, name

    def __getattr__(self, method: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._log.append((f"{self._name}.{method}", *args, *kwargs.items()))
            return Calls(self._log, method)

        return called


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return []


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    """Let torch say that it runs on two devices of a kind of which we have no class."""
    api = SimpleNamespace(
        current_accelerator=lambda check_available=False: torch.device("hpu"),
        device_count=lambda: 2,
        current_device_index=lambda: 1,
        set_device_index=lambda device: log.append(("set_device_index", str(device))),
        current_stream=lambda device: Calls(log, "current"),
        synchronize=lambda device: log.append(("synchronize", str(device))),
    )
    monkeypatch.setattr(torch, "accelerator", api)
    monkeypatch.setattr(torch, "Stream", lambda device: Calls(log, f"stream on {device}"))
    monkeypatch.setattr(
        torch,
        "Event",
        lambda device, enable_timing: Calls(log, f"event on {device}, {enable_timing}"),
    )


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


# Any kind that torch knows.


@pytest.mark.usefixtures("accelerator")
def test_a_kind_only_torch_knows_is_a_device_by_torchs_names() -> None:
    device = get_device("hpu:0")

    assert type(device) is AcceleratorDevice
    assert (device.kind, device.torch_device) == ("hpu", torch.device("hpu", 0))
    assert get_device(torch.device("hpu", 0)) == device
    assert repr(device) == "AcceleratorDevice('hpu:0')"


@pytest.mark.usefixtures("accelerator")
def test_auto_takes_an_accelerator_before_the_cpu_but_a_gpu_is_something_else() -> None:
    assert get_device("auto") == get_device("hpu") == AcceleratorDevice("hpu", 1)
    with pytest.raises(ValueError, match=r"has none\. This machine has: cpu, hpu:0, hpu:1\."):
        get_device("gpu")


@pytest.mark.usefixtures("accelerator")
def test_a_number_beyond_the_last_accelerator_is_refused_with_all_there_are() -> None:
    with pytest.raises(ValueError, match=r"hpu:2 was asked for.* has hpu:0 to hpu:1\."):
        AcceleratorDevice("hpu", 2)
    with pytest.raises(ValueError, match="xla:0"):
        AcceleratorDevice("xla", 0)


@pytest.mark.usefixtures("accelerator")
def test_every_accelerator_of_the_machine_is_listed() -> None:
    assert [str(device.torch_device) for device in list_devices()] == ["cpu", "hpu:0", "hpu:1"]


@pytest.mark.usefixtures("accelerator")
def test_streams_and_events_are_torchs_own_of_its_number(log: list[Any]) -> None:
    device = AcceleratorDevice("hpu", 0)

    stream, event = device.stream(), device.event(timing=True)
    event.record(stream)
    stream.wait_stream(device.current_stream())
    stream.wait_event(event)
    stream.record_event()
    stream.synchronize()
    device.synchronize()

    assert isinstance(stream, AcceleratorStream)
    assert isinstance(event, AcceleratorEvent)
    assert [call[0] for call in log] == [
        "event on hpu:0, True.record",
        "stream on hpu:0.wait_stream",
        "event on hpu:0, True.wait",
        "stream on hpu:0.record_event",
        "stream on hpu:0.synchronize",
        "synchronize",
    ]
    assert log[0][1] is stream.raw
    assert stream.use() is stream.raw


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(("gains", "asked", "pinned"), [(1, 1, 1), (1, 0, 0), (0, 1, 0)])
def test_memory_of_the_host_is_pinned_if_asked_and_if_the_device_gains(
    monkeypatch: pytest.MonkeyPatch, gains: bool, asked: bool, pinned: bool
) -> None:
    device, made = AcceleratorDevice("hpu", 0), []
    monkeypatch.setattr(device, "pins_memory", bool(gains))
    monkeypatch.setattr(torch, "empty", lambda numel, **options: made.append((numel, options)))

    device.host_buffer(3, torch.bfloat16, pinned=bool(asked))

    options = {"dtype": torch.bfloat16, "device": "cpu", "pin_memory": bool(pinned)}
    assert made == [(3, options)]


@pytest.mark.usefixtures("accelerator")
def test_copies_are_queued_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[Tensor, Tensor, bool]] = []
    monkeypatch.setattr(
        Tensor,
        "copy_",
        lambda into, source, non_blocking: copies.append((source, into, non_blocking)),
    )
    source, into = torch.ones(2), torch.empty(2)

    AcceleratorDevice("hpu", 0).copy(source, into)

    ((copied, target, non_blocking),) = copies
    assert copied is source
    assert target is into
    assert non_blocking


def test_a_stream_holds_the_memory_of_a_tensor_of_its_kind_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[tuple[Tensor, object]] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda *args: held.append(args))
    tensor, raw = torch.ones(1, device="meta"), SimpleNamespace(device=torch.device("meta"))

    AcceleratorStream(raw).hold(tensor)
    AcceleratorStream(raw).hold(torch.ones(1))  # torch cannot: it would raise

    assert [(one is tensor, stream is raw) for one, stream in held] == [(True, True)]


@pytest.mark.usefixtures("accelerator")
def test_only_preparing_makes_an_accelerator_the_current_one(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = AcceleratorDevice("hpu", 0)
    assert log == []
    monkeypatch.setattr(torch, "ones", lambda size, device: Calls(log, f"ones on {device}"))

    device.prepare(State())

    assert log == [("set_device_index", "hpu:0"), ("ones on hpu:0.sum",), ("synchronize", "hpu:0")]


# Which one is this rank's.


@pytest.mark.usefixtures("_two_gpus")
def test_the_launcher_says_which_gpu_is_this_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")

    assert get_device("auto") == get_device("gpu") == get_device("cuda") == CUDADevice(1)
    assert get_device("cuda:0") == get_device("gpu:0") == CUDADevice(0)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("local_rank", ["5", "", "x"])
def test_a_rank_that_sees_its_own_gpu_only_takes_that(
    monkeypatch: pytest.MonkeyPatch, local_rank: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)

    assert get_device("cuda") == CUDADevice(0)


@pytest.mark.usefixtures("_two_gpus")
def test_finding_a_gpu_does_not_start_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("started"))

    assert get_device("cuda") == CUDADevice(0)


# Intel's.


@pytest.fixture
def _two_xpus(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)


@pytest.mark.usefixtures("_two_xpus")
@pytest.mark.parametrize("started", [False, True])
def test_an_intel_gpu_is_a_gpu(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)

    assert get_device("gpu") == get_device("xpu") == XPUDevice(int(started))
    assert type(get_device("auto")) is XPUDevice
    assert get_device("xpu:1").kind == "xpu"
    assert [str(device.torch_device) for device in list_devices()] == ["cpu", "xpu:0", "xpu:1"]


def test_an_intel_gpu_that_is_not_there_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"xpu:0 was asked for.*This machine has: cpu"):
        get_device("xpu:0")


# Apple's.


@pytest.fixture
def _an_apple(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    api = Calls(log, "mps")
    mps = SimpleNamespace(
        Event=lambda enable_timing=False: Calls(log, f"event {enable_timing}"),
        synchronize=api.synchronize,
        get_rng_state=lambda: torch.tensor([7], dtype=torch.uint8),
        set_rng_state=lambda rng: log.append(("rng", rng.tolist())),
    )
    monkeypatch.setattr(torch, "mps", mps)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda major, minor: True)


@pytest.mark.usefixtures("_an_apple")
def test_the_apple_gpu_is_found_by_every_name_it_has() -> None:
    device = MPSDevice()

    assert get_device("auto") == get_device("gpu") == get_device("mps") == device
    assert get_device("mps:0").torch_device == torch.device("mps", 0)
    with pytest.raises(ValueError, match=r"mps:1 was asked for.*This machine has: cpu, mps:0\."):
        get_device("mps:1")


@pytest.mark.usefixtures("_an_apple")
def test_copies_to_the_apple_gpu_are_complete_when_they_return() -> None:
    asked: list[Any] = []

    class Moved(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            asked.append((args, kwargs))
            return self

    MPSDevice().tensor_to_device(torch.ones(1).as_subclass(Moved))

    assert asked == [((torch.device("mps", 0),), {})]


@pytest.mark.usefixtures("_an_apple")
@pytest.mark.parametrize("recent", [False, True])
def test_an_older_system_of_apples_has_no_bf16(
    monkeypatch: pytest.MonkeyPatch, recent: bool
) -> None:
    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda major, minor: recent)

    able = MPSDevice().supported_precisions()

    assert (Precision.AMP_BF16 in able) == recent
    assert Precision.AMP_FP16 in able


@pytest.mark.usefixtures("_an_apple")
def test_the_apple_gpu_has_one_queue_whose_order_needs_no_help(log: list[Any]) -> None:
    device = MPSDevice(0)
    stream = device.stream()

    stream.wait_stream(device.current_stream())
    stream.wait_event(device.event())
    stream.hold(torch.ones(1))
    assert (log, type(stream)) == ([], MPSStream)
    stream.record_event()
    stream.synchronize()
    device.synchronize()

    assert [call[0] for call in log] == ["event False.record", "mps.synchronize", "mps.synchronize"]
    assert isinstance(stream.use(), nullcontext)


@pytest.mark.usefixtures("_an_apple")
def test_events_of_the_apple_gpu_name_no_stream(log: list[Any]) -> None:
    device = MPSDevice()
    event = device.event(timing=True)

    event.record(device.stream())
    event.wait(device.stream())
    event.synchronize()

    assert log == [("event True.record",), ("event True.wait",), ("event True.synchronize",)]


def test_events_of_the_apple_gpu_answer_with_what_torch_says() -> None:
    raw: Any = SimpleNamespace(query=lambda: 1, elapsed_time=lambda end: 2.5)

    assert MPSEvent(raw).query() is True
    assert MPSEvent(raw).elapsed_ms(MPSEvent(raw)) == 2.5


@pytest.mark.usefixtures("_an_apple")
def test_the_apple_gpu_prepares_and_keeps_its_random_numbers(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = MPSDevice()
    monkeypatch.setattr(torch, "ones", lambda size, device: Calls(log, "ones"))

    device.prepare(State())
    device.load_state_dict(device.state_dict())

    assert log == [("ones.sum",), ("mps.synchronize",), ("rng", [7])]
