"""How models run on a kind of device: runtimes, and the registry that chooses among them."""

from trine.core.runtime.base import BaseRuntime, DeviceLike
from trine.core.runtime.loops import EvaluatorLike, TrainerLike
from trine.core.runtime.pytorch import PyTorchRuntime
from trine.core.runtime.registry import RuntimeRegistry, runtime_registry
from trine.core.runtime.tags import named_runtime_modules, runtime_of, set_runtime

__all__ = [
    "BaseRuntime",
    "DeviceLike",
    "EvaluatorLike",
    "PyTorchRuntime",
    "RuntimeRegistry",
    "TrainerLike",
    "named_runtime_modules",
    "runtime_of",
    "runtime_registry",
    "set_runtime",
]
