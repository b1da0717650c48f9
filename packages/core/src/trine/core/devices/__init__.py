"""Device kinds, their streams and events, and the registry."""

from trine.core.devices.cpu import CPUDevice
from trine.core.devices.cuda import CUDADevice
from trine.core.devices.device import Device
from trine.core.devices.registry import get_device, register_device
from trine.core.devices.streams import Event, Stream

__all__ = [
    "CPUDevice",
    "CUDADevice",
    "Device",
    "Event",
    "Stream",
    "get_device",
    "register_device",
]
