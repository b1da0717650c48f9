"""From a specification to a Device, and where further kinds of device are registered.

Other packages add kinds by the entry point group `trine.devices`: the name is the kind,
the value a factory. A package is loaded when its kind is asked for, or when all devices of
the machine are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points

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


def register_device(kind: str, factory: DeviceFactory) -> None:
    """Let `get_device` make devices of another kind.

    Args:
        kind: the name before the colon, as in `torch.device(...).type`.
        factory: called with the index after the colon, or None; raises ValueError, saying
            what was asked for, where this machine has no such device.

    Raises:
        ValueError: if the kind is taken.
    """
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
        TrineError: if the package that brings the kind cannot be loaded.
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
            found.append(_factory(kind)(None))
        except Exception:
            # A list of what works is no place to fail for what does not; asking for the
            # kind by name says why.
            continue
    return list(dict.fromkeys(found))


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
    factory = _factory(kind)
    try:
        return factory(index)
    except ValueError as error:
        raise ValueError(f"{error} {_what_there_is()}") from error


def _brought() -> dict[str, list[str]]:
    """The kinds that other packages bring, and the packages that bring each."""
    brought: dict[str, list[str]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        package = point.dist.name if point.dist is not None else "an unknown package"
        brought.setdefault(point.name, []).append(package)
    return brought


def _factory(kind: str) -> DeviceFactory:
    if kind in _factories:
        return _factories[kind]
    (point, *others) = entry_points(group=ENTRY_POINT_GROUP, name=kind)
    packages = " and ".join(_brought()[kind])
    if others:
        raise TrineError(
            f"Devices of kind {kind!r} are brought by {packages}. Uninstall all but one of "
            "them, or call register_device to say which it is."
        )
    try:
        factory: DeviceFactory = point.load()
    except Exception as error:
        raise TrineError(
            f"Devices of kind {kind!r} are brought by {packages}, which cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    return factory


def _what_there_is() -> str:
    names = ", ".join(dict.fromkeys(_names()))
    kinds = ", ".join(sorted({*_factories, *_brought()}))
    return f"This machine has: {names}. Known kinds: {kinds}."


def _names() -> Iterator[str]:
    for device in list_devices():
        yield str(device.torch_device)
