"""From a specification to a Device, and where further kinds of device are registered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trine.core.devices.cpu import CPUDevice
from trine.core.devices.cuda import CUDADevice
from trine.core.devices.device import Device

__all__ = ["DeviceFactory", "get_device", "register_device"]

DeviceFactory = Callable[[int | None], Device]


def _cpu(index: int | None) -> Device:
    if index not in (None, 0):
        raise ValueError(f"There is one CPU device; cpu:{index} does not exist. Use 'cpu'.")
    return CPUDevice()


_factories: dict[str, DeviceFactory] = {"cpu": _cpu, "cuda": CUDADevice}


def register_device(kind: str, factory: DeviceFactory) -> None:
    """Let `get_device` make devices of another kind.

    Args:
        kind: the name before the colon, as in `torch.device(...).type`.
        factory: called with the index after the colon, or None.

    Raises:
        ValueError: if the kind is taken.
    """
    if kind in _factories:
        raise ValueError(f"A device of kind {kind!r} is registered already.")
    _factories[kind] = factory


def get_device(spec: str | torch.device | Device = "auto") -> Device:
    """The device that `spec` names.

    Args:
        spec: `"auto"` or `"gpu"` (a GPU; `auto` falls back to the CPU), a name such as
            `"cuda:1"` or `"cpu"`, a `torch.device`, or a Device, which is returned.

    Raises:
        ValueError: if the kind is unknown or this machine has no such device; the
            message lists what there is.
        TypeError: if `spec` is none of these.
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
        return CUDADevice() if torch.cuda.device_count() else CPUDevice()
    if name == "gpu":
        if not torch.cuda.device_count():
            raise ValueError(f"A GPU was asked for, but this machine has none. {_what_there_is()}")
        return CUDADevice()
    kind, colon, index = name.partition(":")
    if colon and not index.isdecimal():
        raise ValueError(f"{spec!r} is not a device: expected a number after the colon.")
    return _make(kind, int(index) if colon else None, spec)


def _make(kind: str, index: int | None, asked: str) -> Device:
    factory = _factories.get(kind)
    if factory is None:
        raise ValueError(f"Unknown device {asked!r}. {_what_there_is()}")
    return factory(index)


def _what_there_is() -> str:
    names = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    kinds = ", ".join(sorted(_factories))
    return f"This machine has: {', '.join(names)}. Known kinds: {kinds}."
