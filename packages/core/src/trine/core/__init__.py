"""Device and precision abstractions and the tracing seam: what everything in Trine stands on."""

from importlib.metadata import version

from trine.core import batches, handler, profiler, runtime, tracing, training
from trine.core.devices import (
    CPUDevice,
    CUDADevice,
    Device,
    DeviceCPU,
    DeviceGPU,
    DeviceMPS,
    MPSDevice,
    XPUDevice,
    get_device,
    register_device,
)
from trine.core.errors import TrineError
from trine.core.precision import Precision
from trine.core.profiler.regions import trace
from trine.core.runtime.mapping import map
from trine.core.runtime.move import to
from trine.core.serialization import Serializable
from trine.core.state import State

__version__ = version("trine-core")

__all__ = [
    "CPUDevice",
    "CUDADevice",
    "Device",
    "DeviceCPU",
    "DeviceGPU",
    "DeviceMPS",
    "MPSDevice",
    "Precision",
    "Serializable",
    "State",
    "TrineError",
    "XPUDevice",
    "batches",
    "get_device",
    "handler",
    "map",
    "profiler",
    "register_device",
    "runtime",
    "to",
    "trace",
    "tracing",
    "training",
]
