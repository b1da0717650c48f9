"""Which runtime class serves which kind of device."""

from __future__ import annotations

import torch

from trine.core.devices import Device, get_device
from trine.core.runtime.base import BaseRuntime, DeviceLike
from trine.core.runtime.pytorch import PyTorchRuntime

__all__ = ["RuntimeRegistry", "runtime_registry"]


class RuntimeRegistry:
    """Runtime classes by kind of device.

    Args:
        fallback_class: serves the kinds that nobody registered.
    """

    def __init__(self, fallback_class: type[BaseRuntime]) -> None:
        self._fallback_class = fallback_class
        self._classes: dict[str, type[BaseRuntime]] = {}

    def register(self, device_type: str, runtime_class: type[BaseRuntime]) -> None:
        """Serve a kind of device with a runtime class; a second call replaces the first.

        Args:
            device_type: what stands before the colon in a device's name. It need not be
                a kind that torch knows.
            runtime_class: made with `(device_spec, options)`.

        Raises:
            TypeError: if it is no subclass of `BaseRuntime`.
            ValueError: if `device_type` has an index.
        """
        given: object = runtime_class
        if not (isinstance(given, type) and issubclass(given, BaseRuntime)):
            raise TypeError(
                f"A runtime class derives from BaseRuntime, got {runtime_class!r}. "
                "Register the class, not an object of it."
            )
        if ":" in device_type:
            raise ValueError(
                f"{device_type!r} names one device. A runtime serves a kind: "
                f"register {device_type.partition(':')[0]!r}."
            )
        self._classes[device_type] = runtime_class

    def get_runtime_class_for_device_spec(self, device: DeviceLike) -> type[BaseRuntime]:
        """The class registered for the device's kind, or the fallback class.

        Raises:
            TypeError: if `device` is no string, `torch.device` or Device.
        """
        if isinstance(device, str):  # first, for `trace`: to ask an abstract class takes longer
            kind = device.partition(":")[0]
            if kind in ("auto", "gpu"):
                kind = get_device(device).torch_device.type
        elif isinstance(device, torch.device):
            kind = device.type
        elif isinstance(device, Device):
            kind = device.torch_device.type
        else:
            raise TypeError(
                f"A device is named by a string, a torch.device or a Device, "
                f"got {type(device).__name__}."
            )
        return self._classes.get(kind, self._fallback_class)


runtime_registry = RuntimeRegistry(PyTorchRuntime)
"""Where `trine.core.to` looks for a runtime class."""
