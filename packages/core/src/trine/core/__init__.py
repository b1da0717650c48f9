"""Device and precision abstractions and the tracing seam: what everything in Trine stands on."""

from importlib.metadata import version

from trine.core import batches, handler, profiler, runtime, tracing, training
from trine.core.devices import CPUDevice, CUDADevice, Device, get_device, register_device
from trine.core.errors import TrineError
from trine.core.precision import Precision
from trine.core.runtime.mapping import map
from trine.core.runtime.move import to

__version__ = version("trine-core")

__all__ = [
    "CPUDevice",
    "CUDADevice",
    "Device",
    "Precision",
    "TrineError",
    "batches",
    "get_device",
    "handler",
    "map",
    "profiler",
    "register_device",
    "runtime",
    "to",
    "tracing",
    "training",
]
