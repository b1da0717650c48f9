"""Device kinds, their streams and events, and the registry."""

from trine.core.devices.accelerator import AcceleratorDevice
from trine.core.devices.cpu import CPUDevice
from trine.core.devices.cuda import CUDADevice
from trine.core.devices.device import Device
from trine.core.devices.grad_scaler import GradScaler
from trine.core.devices.mps import MPSDevice
from trine.core.devices.registry import get_device, list_devices, register_device
from trine.core.devices.streams import Event, Stream
from trine.core.devices.xpu import XPUDevice

DeviceCPU = CPUDevice
DeviceGPU = CUDADevice
DeviceMPS = MPSDevice

__all__ = [
    "AcceleratorDevice",
    "CPUDevice",
    "CUDADevice",
    "Device",
    "DeviceCPU",
    "DeviceGPU",
    "DeviceMPS",
    "Event",
    "GradScaler",
    "MPSDevice",
    "Stream",
    "XPUDevice",
    "get_device",
    "list_devices",
    "register_device",
]
