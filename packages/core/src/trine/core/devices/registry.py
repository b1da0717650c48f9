"""From a specification to a Device, and where further kinds of device are registered.

Other packages add kinds by the entry point group `trine.devices`: the name is the kind,
the value a factory. A package is loaded when its kind is asked for, or when all devices of
the machine are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points

import torch

from trine.core.devices.accelerator import AcceleratorDevice
from trine.core.devices.cpu import CPUDevice
from trine.core.devices.cuda import CUDADevice
from trine.core.devices.device import Device
from trine.core.devices.mps import MPSDevice
from trine.core.devices.xpu import XPUDevice
from trine.core.errors import TrineError

__all__ = ["ENTRY_POINT_GROUP", "DeviceFactory", "get_device", "list_devices", "register_device"]

DeviceFactory = Callable[[int | None], Device]

ENTRY_POINT_GROUP = "trine.devices"


def _cpu(index: int | None) -> Device:
    if index not in (None, 0):
        raise ValueError(f"There is one CPU device; cpu:{index} does not exist. Use 'cpu'.")
    return CPUDevice()


# In the order in which `auto` and `gpu` look for one.
_GPUS = (CUDADevice, XPUDevice, MPSDevice)
_factories: dict[str, DeviceFactory] = {
    "cpu": _cpu,
    "cuda": CUDADevice,
    "xpu": XPUDevice,
    "mps": MPSDevice,
}
_own = tuple(_factories)
_SEARCHES = ("auto", "gpu")  # what `get_device` takes for a search, not for a kind


def register_device(kind: str, factory: DeviceFactory) -> None:
    """Let `get_device` make devices of another kind.

    Args:
        kind: the name before the colon, as in `torch.device(...).type`: in lower case, since
            `get_device` takes "NPU" for "npu".
        factory: called with the index after the colon, or None; raises ValueError, saying
            what was asked for, where this machine has no such device.

    Raises:
        ValueError: if the kind is taken, or is a name that `get_device` would never look up.
        TypeError: if the kind is no string, or the factory cannot be called.
    """
    given: object = kind
    if not isinstance(given, str):
        raise TypeError(f"A kind of device is a string such as 'npu', got {given!r}.")
    if not _can_be_asked_for(kind):
        raise ValueError(
            f"{kind!r} can be no kind of device: expected a name in lower case, without a colon "
            f"or blanks around it, and neither of {', '.join(_SEARCHES)}."
        )
    if not callable(factory):
        raise TypeError(
            f"A factory is called with an index or None and returns a Device, got {factory!r}. "
            "Register the class, or a function."
        )
    if kind in _factories:
        raise ValueError(f"A device of kind {kind!r} is registered already.")
    _factories[kind] = factory


def get_device(spec: str | torch.device | Device = "auto") -> Device:
    """The device that `spec` names.

    Args:
        spec: `"gpu"` (of whatever maker), `"auto"` (a GPU, else another accelerator, else
            the CPU), a name such as `"cuda:1"` or `"cpu"`, a `torch.device`, or a Device,
            which is returned. `"gpu"` and a kind without a number mean the one that the
            launcher gave this rank in `LOCAL_RANK`, or the process's current one.

    Raises:
        ValueError: if the kind is unknown or this machine has no such device; the
            message lists what there is.
        TypeError: if `spec` is none of these.
        TrineError: if the package that brings the kind cannot be loaded, or what makes its
            devices made something else.
    """
    if isinstance(spec, Device):
        return spec
    if isinstance(spec, torch.device):
        return _make(spec.type, spec.index, str(spec))
    if not isinstance(spec, str):
        raise TypeError(
            f"A device is named by a string, a torch.device or a Device, got {type(spec).__name__}."
        )
    name = spec.strip().lower()
    if name == "auto":
        return _auto()
    kind, colon, index = name.partition(":")
    if colon and not index.isdecimal():
        raise ValueError(f"{spec!r} is not a device: expected a number after the colon.")
    number = int(index) if colon else None
    if kind == "gpu":
        for gpu in _GPUS:
            if gpu.count():
                return _make(gpu.kind, number, spec)
        raise ValueError(f"A GPU was asked for, but this machine has none. {_what_there_is()}")
    return _make(kind, number, spec)


def list_devices() -> list[Device]:
    """Every device of this machine, the CPU first.

    Of each kind that was registered, or that another package brings, the one it makes
    when no number is given; a kind that makes none here is left out.
    """
    found: list[Device] = [CPUDevice()]
    for gpu in _GPUS:
        found += [gpu(index) for index in range(gpu.count())]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type not in _own:
        kind = accelerator.type
        found += [AcceleratorDevice(kind, i) for i in range(AcceleratorDevice.count(kind))]
    for kind in sorted({*_factories, *_brought()} - set(_own)):
        try:
            device = _made(kind, None)
            if device not in found:
                found.append(device)
        except (Exception, SystemExit):
            # A list of what works is no place to fail for what does not; asking for the
            # kind by name says why.
            continue
    return found


def _auto() -> Device:
    for gpu in _GPUS:
        if gpu.count():
            return gpu()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return _make(accelerator.type, None, accelerator.type)
    return CPUDevice()


def _make(kind: str, index: int | None, asked: str) -> Device:
    if kind not in _factories and kind not in _brought():
        if AcceleratorDevice.count(kind):
            return AcceleratorDevice(kind, index)
        raise ValueError(f"Unknown device {asked!r}. {_what_there_is()}")
    try:
        return _made(kind, index)
    except ValueError as error:
        raise ValueError(f"{error} {_what_there_is()}") from error


def _made(kind: str, index: int | None) -> Device:
    """What the kind's factory makes, if it is a device."""
    factory = _factory(kind)
    device: object = factory(index)
    if not isinstance(device, Device):
        raise TrineError(
            f"What makes devices of kind {kind!r} ({factory!r}) returned {device!r}. It has to "
            "return a Device, or raise ValueError where this machine has no such device."
        )
    if not isinstance(getattr(device, "torch_device", None), torch.device):
        raise TrineError(
            f"{type(device).__name__}, a device of kind {kind!r}, has no torch_device. Its "
            "constructor has to call that of Device."
        )
    return device


def _can_be_asked_for(kind: str) -> bool:
    return kind == kind.strip().lower() and ":" not in kind and kind not in ("", *_SEARCHES)


def _brought() -> dict[str, list[EntryPoint]]:
    """The kinds that other packages bring, and what each of them is made by."""
    brought: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        kind = point.name.lower()  # as a specification is read
        if _can_be_asked_for(kind):
            brought.setdefault(kind, []).append(point)
    return brought


def _factory(kind: str) -> DeviceFactory:
    if kind in _factories:
        return _factories[kind]
    (point, *others) = points = _brought()[kind]
    packages = " and ".join(
        (each.dist is not None and each.dist.name) or "an unknown package" for each in points
    )
    if others:
        raise TrineError(
            f"Devices of kind {kind!r} are brought by {packages}. Uninstall all but one of "
            "them, or call register_device to say which it is."
        )
    try:
        factory: DeviceFactory = point.load()
    except (Exception, SystemExit) as error:
        raise TrineError(
            f"Devices of kind {kind!r} are brought by {packages}, which cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(factory):
        raise TrineError(
            f"Devices of kind {kind!r} are brought by {packages}, whose entry point "
            f"{point.value!r} names {factory!r}. It has to name a Device class or a function."
        )
    return factory


def _what_there_is() -> str:
    names = ", ".join(dict.fromkeys(_names()))
    kinds = ", ".join(sorted({*_factories, *_brought()}))
    return f"This machine has: {names}. Known kinds: {kinds}."


def _names() -> Iterator[str]:
    for device in list_devices():
        yield str(device.torch_device)
