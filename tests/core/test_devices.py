"""Devices: from a name to a Device, and what the CPU's does."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trine.core import (
    CPUDevice,
    CUDADevice,
    Device,
    DeviceCPU,
    DeviceGPU,
    DeviceMPS,
    MPSDevice,
    TrineError,
    get_device,
    register_device,
)
from trine.core.devices import cuda, list_devices, registry
from trine.core.devices.accelerator import AcceleratorEvent
from trine.core.devices.streams import HostEvent, HostStream

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 0, reason="says what a machine without a GPU says"
)


class MovedTensor(Tensor):
    """A tensor that stays where it is and remembers how it was asked to move."""

    asked: tuple[tuple[Any, ...], dict[str, Any]]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        self.asked = (args, kwargs)
        return self


class TinyDevice(CPUDevice):
    """A further kind of device, for the registry."""

    kind = "tiny"

    def __init__(self, index: int | None = None) -> None:
        super().__init__()
        self.index = index


@pytest.fixture
def _clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


# Host memory.


def test_the_cpu_copies_from_memory_of_its_own() -> None:
    device = CPUDevice()
    source = device.host_buffer(3, torch.float64).fill_(1.5)
    into = torch.empty(3)

    device.copy(source, into)

    assert not source.is_pinned()
    assert into.tolist() == [1.5, 1.5, 1.5]


# From a specification to a device.


@pytest.mark.parametrize(
    "spec", ["cpu", "CPU", " cpu ", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)]
)
def test_the_cpu_is_found_by_every_name_it_has(spec: str | torch.device) -> None:
    device = get_device(spec)

    assert type(device) is CPUDevice
    assert device.torch_device == torch.device("cpu")


def test_a_device_is_returned_itself() -> None:
    device = CPUDevice()

    assert get_device(device) is device


@needs_no_gpu
def test_auto_falls_back_to_the_cpu() -> None:
    assert get_device("auto") == get_device() == CPUDevice()


@needs_no_gpu
@pytest.mark.parametrize("spec", ["cuda:0", "cuda:3", torch.device("cuda", 3)])
def test_a_cuda_device_that_is_not_there_is_refused_by_number(spec: str | torch.device) -> None:
    with pytest.raises(ValueError, match=r"cuda:\d was asked for, but this machine has no CUDA"):
        get_device(spec)


@needs_no_gpu
@pytest.mark.parametrize("spec", ["cuda", torch.device("cuda")])
def test_any_cuda_device_is_refused_in_words(spec: str | torch.device) -> None:
    with pytest.raises(ValueError, match="A CUDA device was asked for, but this machine has no"):
        get_device(spec)


@needs_no_gpu
def test_a_gpu_is_refused_with_what_there_is_instead() -> None:
    with pytest.raises(ValueError, match=r"this machine has none\. This machine has: cpu\."):
        get_device("gpu")


@pytest.mark.usefixtures("_clean_registry")
def test_an_unknown_kind_is_refused_with_the_kinds_there_are() -> None:
    register_device("tiny", TinyDevice)

    with pytest.raises(ValueError, match="Unknown device 'tpu:1'") as caught:
        get_device("tpu:1")

    assert "Known kinds: cpu, cuda, mps, tiny, xpu." in str(caught.value)


@pytest.mark.parametrize("spec", ["cuda:", "cuda:x", "cuda:-1", "cpu:1.0", "cuda:0:1"])
def test_an_index_that_is_no_number_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"is not a device: expected a number after the colon"):
        get_device(spec)


def test_a_second_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cpu:1 does not exist\. Use 'cpu'\."):
        get_device("cpu:1")


@pytest.mark.parametrize("spec", [0, None, b"cpu"])
def test_a_specification_of_the_wrong_type_is_refused(spec: Any) -> None:
    with pytest.raises(TypeError, match=f"got {type(spec).__name__}"):
        get_device(spec)


# Further kinds.


@pytest.mark.usefixtures("_clean_registry")
@pytest.mark.parametrize(("spec", "index"), [("tiny", None), ("tiny:2", 2)])
def test_a_registered_kind_is_made_with_the_index_after_the_colon(
    spec: str, index: int | None
) -> None:
    register_device("tiny", TinyDevice)

    device = get_device(spec)

    assert isinstance(device, TinyDevice)
    assert device.index == index


@pytest.mark.usefixtures("_clean_registry")
def test_a_kind_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="'cpu' is registered already"):
        register_device("cpu", TinyDevice)

    assert type(get_device("cpu")) is CPUDevice


@pytest.mark.usefixtures("_clean_registry")
@pytest.mark.parametrize("kind", ["NPU", "npu:0", " npu", "", "gpu", "auto"])
def test_a_kind_that_could_never_be_asked_for_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"can be no kind of device: expected a name in lower"):
        register_device(kind, TinyDevice)


@pytest.mark.usefixtures("_clean_registry")
@pytest.mark.parametrize(
    ("kind", "factory", "given"), [(7, TinyDevice, "got 7"), ("tiny", "TinyDevice", "got 'TinyD")]
)
def test_a_kind_or_a_factory_of_the_wrong_type_is_refused(
    kind: Any, factory: Any, given: str
) -> None:
    with pytest.raises(TypeError, match=given):
        register_device(kind, factory)


class UnmadeDevice(MPSDevice):
    def __init__(self, index: int | None = None) -> None:
        pass  # forgets to call the constructor of Device


class UnequalDevice(TinyDevice):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")


@pytest.mark.usefixtures("_clean_registry")
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda _: None, r"'broken' .* returned None\. It has to return a Device"),
        (lambda _: torch.device("cpu"), r"returned device\(type='cpu'\)"),
        (UnmadeDevice, r"UnmadeDevice, .* 'broken', has no torch_device"),
    ],
)
def test_what_makes_no_device_is_refused_by_name_and_spoils_no_list(
    factory: Any, message: str
) -> None:
    before = list_devices()
    register_device("broken", factory)

    with pytest.raises(TrineError, match=message):
        get_device("broken")
    assert list_devices() == before
    with pytest.raises(ValueError, match=r"'tpu'\. This machine has: cpu.* Known kinds: broken,"):
        get_device("tpu")


@pytest.mark.usefixtures("_clean_registry")
@pytest.mark.parametrize("raised", [OSError("no driver"), SystemExit(1)])
def test_a_factory_that_fails_spoils_no_list(raised: BaseException) -> None:
    def fail(_: int | None) -> Any:
        raise raised

    before = list_devices()
    register_device("failing", fail)
    register_device("unequal", UnequalDevice)

    assert list_devices() == before


# Kinds that other packages bring.


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points of the group `trine.devices`, to be filled in."""
    points: list[EntryPoint] = []

    def find(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "trine.devices"
        return [point for point in points if name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", find)
    return points


def a_plugin(kind: str, value: str) -> EntryPoint:
    point = EntryPoint(kind, value, "trine.devices")
    vars(point).update(dist=SimpleNamespace(name=f"package-of-{value.partition(':')[2]}"))
    return point


class WarpDevice(TinyDevice):
    """What another package brings."""

    kind = "warp"

    def __init__(self, index: int | None = None) -> None:
        if index not in (None, 0):
            raise ValueError(f"There is no warp:{index}.")
        super().__init__(index)
        self.torch_device = torch.device("xla", 0)


class NoDevice(CPUDevice):
    def __init__(self, index: int | None = None) -> None:
        raise RuntimeError("the driver is not installed")


HERE = WarpDevice.__module__


def test_a_kind_that_a_package_brings_is_found_and_listed(plugins: list[EntryPoint]) -> None:
    plugins.append(a_plugin("warp", f"{HERE}:WarpDevice"))

    device = get_device("warp:0")

    assert isinstance(device, TinyDevice)
    assert (device.kind, device.index) == ("warp", 0)
    assert [str(one.torch_device) for one in list_devices()][-1] == "xla:0"


def test_a_device_its_package_does_not_find_is_refused_with_what_there_is(
    plugins: list[EntryPoint],
) -> None:
    plugins.append(a_plugin("warp", f"{HERE}:WarpDevice"))

    with pytest.raises(ValueError, match=r"There is no warp:7\. This machine has: cpu.*xla:0\."):
        get_device("warp:7")


def test_a_package_that_cannot_be_loaded_is_named_only_when_its_kind_is_asked_for(
    plugins: list[EntryPoint],
) -> None:
    plugins.append(a_plugin("warp", "no_such_module_anywhere:Device"))

    with pytest.raises(TrineError, match=r"'warp' are brought by package-of-Device.*No module"):
        get_device("warp")
    assert CPUDevice() in list_devices()
    with pytest.raises(ValueError, match=r"Known kinds: cpu, cuda, mps, warp, xpu\."):
        get_device("woof")


def test_what_a_package_brings_must_be_something_that_makes_devices(
    plugins: list[EntryPoint],
) -> None:
    plugins.append(a_plugin("warp", f"{HERE}:HERE"))

    with pytest.raises(TrineError, match=r"'warp' are brought by package-of-HERE, whose entry p"):
        get_device("warp")
    assert CPUDevice() in list_devices()


def test_a_package_may_write_its_kind_in_capitals_but_not_with_an_index(
    plugins: list[EntryPoint],
) -> None:
    plugins += [a_plugin(name, f"{HERE}:WarpDevice") for name in ("Warp", "warp:1")]

    assert type(get_device("Warp:0")) is WarpDevice
    with pytest.raises(ValueError, match=r"Known kinds: cpu, cuda, mps, warp, xpu\."):
        get_device("woof")


def test_a_package_whose_name_is_not_known_is_not_named(plugins: list[EntryPoint]) -> None:
    plugins.append(EntryPoint("warp", "no_such_module_anywhere:Device", "trine.devices"))

    with pytest.raises(TrineError, match="brought by an unknown package, which cannot"):
        get_device("warp")


def test_a_kind_whose_device_is_not_there_is_left_out_of_the_list(
    plugins: list[EntryPoint],
) -> None:
    before = list_devices()
    plugins.append(a_plugin("warp", f"{HERE}:NoDevice"))

    assert list_devices() == before


def test_a_kind_that_two_packages_bring_is_refused(plugins: list[EntryPoint]) -> None:
    plugins += [a_plugin("warp", f"{HERE}:{name}") for name in ("WarpDevice", "TinyDevice")]

    with pytest.raises(TrineError, match="by package-of-WarpDevice and package-of-TinyD"):
        get_device("warp")


@pytest.mark.usefixtures("_clean_registry")
def test_what_is_registered_wins_over_what_a_package_brings(plugins: list[EntryPoint]) -> None:
    plugins += [a_plugin("cpu", f"{HERE}:NoDevice"), a_plugin("warp", f"{HERE}:NoDevice")]
    register_device("warp", WarpDevice)

    assert get_device("cpu") == CPUDevice()
    assert type(get_device("warp")) is WarpDevice


# What every device is.


def test_composers_names_are_the_same_classes() -> None:
    assert (DeviceCPU, DeviceGPU, DeviceMPS) == (CPUDevice, CUDADevice, MPSDevice)


def test_devices_compare_and_hash_by_what_they_stand_for() -> None:
    assert CPUDevice() == CPUDevice()
    assert len({CPUDevice(), CPUDevice()}) == 1
    assert CPUDevice() != torch.device("cpu")
    assert repr(CPUDevice()) == "CPUDevice('cpu')"


def test_the_cpu_talks_gloo_under_both_names() -> None:
    assert CPUDevice().dist_backend == CPUDevice().ddp_backend == "gloo"


def test_a_device_without_its_abstract_parts_cannot_be_made() -> None:
    class Half(Device):
        kind = "half"

    with pytest.raises(TypeError, match="abstract"):
        Half(torch.device("cpu"))  # type: ignore[abstract]  # the mistake under test


# Moving things to the CPU.


def test_a_tensor_that_is_there_already_is_the_same_object() -> None:
    tensor = torch.ones(2)

    assert CPUDevice().tensor_to_device(tensor) is tensor


def test_a_batch_that_is_there_already_is_the_same_object() -> None:
    batch = {"x": [torch.ones(2)], "name": "a"}

    assert CPUDevice().batch_to_device(batch) is batch


def test_a_copy_into_host_memory_is_complete_when_it_returns() -> None:
    # A copy from a GPU that does not block hands out memory that is filled later.
    tensor = torch.ones(2).as_subclass(MovedTensor)

    CPUDevice().tensor_to_device(tensor)

    assert tensor.asked == ((torch.device("cpu"),), {})


def test_a_module_is_moved_in_place_and_returned() -> None:
    module = nn.Linear(2, 2)

    assert CPUDevice().module_to_device(module) is module
    assert {p.device for p in module.parameters()} == {torch.device("cpu")}


# The CPU's streams and events.


def test_the_cpus_stream_accepts_every_order_and_waits_for_nothing() -> None:
    device = CPUDevice()
    stream, event = device.stream(), device.event()

    event.record(stream)
    stream.wait_event(event)
    stream.wait_stream(device.current_stream())
    event.wait(stream)
    event.synchronize()
    stream.synchronize()
    device.synchronize()

    assert event.query()
    assert stream.record_event().query()


def test_work_in_the_cpus_stream_is_done_within_its_block() -> None:
    with CPUDevice().stream().use():
        total = torch.ones(3).sum()

    assert total.item() == 3.0


def test_the_cpus_events_measure_host_time() -> None:
    device = CPUDevice()
    begin, end = device.event(timing=True), device.event(timing=True)

    before = perf_counter_ns()
    begin.record()
    inside_from = perf_counter_ns()
    inside_to = perf_counter_ns()
    end.record()
    after = perf_counter_ns()

    assert (inside_to - inside_from) / 1e6 <= begin.elapsed_ms(end) <= (after - before) / 1e6


# CUDA without a GPU: the wrappers, over doubles of torch's objects.


class FakeRaw:
    """Stands for a torch.cuda.Stream and a torch.cuda.Event, and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def record(self, stream: object = None) -> None:
        self.calls.append(("record", stream))

    def wait(self, stream: object = None) -> None:
        self.calls.append(("wait", stream))

    def synchronize(self) -> None:
        self.calls.append(("synchronize",))

    def query(self) -> int:
        return 1

    def elapsed_time(self, end: object) -> float:
        self.calls.append(("elapsed_time", end))
        return 1.5

    def wait_stream(self, other: object) -> None:
        self.calls.append(("wait_stream", other))

    def record_event(self) -> FakeRaw:
        return FakeRaw()


def a_stream() -> tuple[cuda.CUDAStream, FakeRaw]:
    raw = FakeRaw()
    return cuda.CUDAStream(raw), raw


def an_event() -> tuple[AcceleratorEvent, FakeRaw]:
    raw = FakeRaw()
    return AcceleratorEvent(raw), raw


def test_a_cuda_event_marks_and_orders_the_raw_stream_it_is_given() -> None:
    (event, raw), (stream, raw_stream) = an_event(), a_stream()

    event.record(stream)
    event.record()
    event.wait(stream)
    event.synchronize()

    assert raw.calls == [
        ("record", raw_stream),
        ("record", None),
        ("wait", raw_stream),
        ("synchronize",),
    ]
    assert event.query() is True


def test_a_cuda_event_measures_with_the_raw_pair() -> None:
    (begin, raw_begin), (end, raw_end) = an_event(), an_event()

    assert begin.elapsed_ms(end) == 1.5
    assert raw_begin.calls == [("elapsed_time", raw_end)]


def test_a_cuda_stream_waits_for_the_raw_stream_and_event_it_is_given() -> None:
    (stream, raw), (other, raw_other), (event, raw_event) = a_stream(), a_stream(), an_event()

    stream.wait_stream(other)
    stream.wait_event(event)
    stream.synchronize()

    assert raw.calls == [("wait_stream", raw_other), ("synchronize",)]
    assert raw_event.calls == [("wait", raw)]
    assert isinstance(stream.record_event(), AcceleratorEvent)


def test_streams_of_different_kinds_do_not_mix() -> None:
    (stream, _), (event, _) = a_stream(), an_event()

    with pytest.raises(TypeError, match="Expected a stream of an accelerator, got HostStream"):
        stream.wait_stream(HostStream())
    with pytest.raises(TypeError, match="got HostStream"):
        event.record(HostStream())


def test_a_host_event_may_be_waited_for_on_a_cuda_stream() -> None:
    stream, raw = a_stream()

    stream.wait_event(HostEvent())

    assert raw.calls == []


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that there are two CUDA devices, the second one current."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.usefixtures("_two_gpus")
def test_auto_and_gpu_take_the_current_cuda_device() -> None:
    assert get_device("auto") == get_device("gpu") == get_device("cuda") == CUDADevice(1)
    assert CUDADevice(0) != CUDADevice(1)


@pytest.mark.usefixtures("_two_gpus")
def test_a_copy_to_a_gpu_does_not_wait() -> None:
    tensor = torch.ones(2).as_subclass(MovedTensor)

    CUDADevice(1).tensor_to_device(tensor)

    assert tensor.asked == ((torch.device("cuda", 1),), {"non_blocking": True})


@pytest.mark.usefixtures("_two_gpus")
def test_a_number_beyond_the_last_cuda_device_is_refused_with_the_range() -> None:
    with pytest.raises(ValueError, match=r"cuda:2 was asked for.* has cuda:0 to cuda:1\."):
        get_device("cuda:2")


@pytest.mark.usefixtures("_two_gpus")
def test_an_unknown_device_is_refused_with_every_cuda_device_there_is() -> None:
    with pytest.raises(ValueError, match=r"This machine has: cpu, cuda:0, cuda:1\."):
        get_device("warp")


@pytest.mark.usefixtures("_two_gpus")
def test_a_cuda_device_asks_torch_for_streams_and_events_of_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def note(name: str) -> Any:
        def made(*args: Any, **kwargs: Any) -> FakeRaw:
            asked.append((name, *args, *kwargs.items()))
            return FakeRaw()

        return made

    for name in ("Stream", "current_stream", "Event", "synchronize", "stream"):
        monkeypatch.setattr(torch.cuda, name, note(name))
    device = CUDADevice(0)

    stream = device.stream()
    device.current_stream()
    device.event(timing=True)
    device.synchronize()
    stream.use()

    where = torch.device("cuda", 0)
    assert isinstance(stream, cuda.CUDAStream)
    assert asked == [
        ("Stream", where),
        ("current_stream", where),
        ("Event", ("enable_timing", True)),
        ("synchronize", where),
        ("stream", stream.raw),
    ]


@pytest.mark.gpu
def test_a_cuda_event_measures_work_on_its_stream() -> None:
    device = get_device("cuda")
    begin, end = device.event(timing=True), device.event(timing=True)
    stream = device.stream()

    with stream.use():
        begin.record()
        device.tensor_to_device(torch.ones(1024)).sum()
        end.record()
    end.synchronize()

    assert end.query()
    assert begin.elapsed_ms(end) > 0
