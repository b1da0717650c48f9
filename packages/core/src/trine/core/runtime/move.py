"""`to`: move a module or a tensor to a device, and remember with which runtime."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from trine.core.runtime.base import BaseRuntime, DeviceLike
from trine.core.runtime.registry import runtime_registry
from trine.core.runtime.tags import runtime_of, set_runtime

__all__ = ["to"]

# A runtime may answer with a module of another class. Few do, and a model that loses its class
# in the eyes of a type checker would be a daily nuisance.
T = TypeVar("T", bound=nn.Module | Tensor)


def to(
    module_or_tensor: T,
    device: DeviceLike,
    *,
    options: dict[str, Any] | None = None,
    runtime_class: type[BaseRuntime] | None = None,
    config: dict[str, Any] | None = None,
) -> T:
    """Move a module or a tensor to a device, through the runtime that serves it.

    A module and its submodules remember their runtime, for code blocks and handlers to
    find (`trine.core.runtime.runtime_of`). Nothing is written on the module: it pickles,
    copies, saves and scripts as before. Its copies have no runtime until they are moved.

    Args:
        module_or_tensor: what to move. A module is moved in place.
        device: the device, or a kind that a runtime is registered for.
        options: handed to the runtime class.
        runtime_class: the class to use instead of the registered one.
        config: the former name of `options`.

    Returns:
        The tensor there; for a module, what the runtime's `move_module` returned.

    Raises:
        ValueError: if it is neither a module nor a tensor, if both `options` and
            `config` are given, or if this machine has no such device.
    """
    if options is not None and config is not None:
        raise ValueError("config is the former name of options: give one of them.")
    if runtime_class is None:
        runtime_class = runtime_registry.get_runtime_class_for_device_spec(device)
    given: object = module_or_tensor
    if not isinstance(given, (nn.Module, Tensor)):
        raise ValueError(
            f"to() moves a torch.nn.Module or a torch.Tensor, got {type(given).__name__}. "
            "For a nested batch, use Device.batch_to_device."
        )
    runtime = runtime_class(device, (config or {}) if options is None else options)
    moved: Any
    if isinstance(given, nn.Module):
        moved = _move_module(given, runtime)
    else:
        moved = runtime.move_tensor(given)
    result: T = moved
    return result


def _move_module(module: nn.Module, runtime: BaseRuntime) -> nn.Module:
    """Tag, move, and tag what came back, which may be another module or have others in it."""
    before = [(each, runtime_of(each)) for each in module.modules()]
    for each, _ in before:
        set_runtime(each, runtime)
    try:
        moved = runtime.move_module(module)
    except BaseException:
        for each, old in before:
            set_runtime(each, old)
        raise
    for each in moved.modules():
        set_runtime(each, runtime)
    return moved
