"""Which runtime a module was moved with.

The answer is kept beside the modules, never on them: a module that was moved has the
attributes, the pickle and the state dict of one that was not. Entries go when their
module does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from trine.core.runtime.base import BaseRuntime

__all__ = ["named_runtime_modules", "runtime_of", "set_runtime"]

# By identity and not in a WeakKeyDictionary, which would take equal modules for one.
_tags: dict[int, tuple[weakref.ref[nn.Module], BaseRuntime]] = {}


def runtime_of(module: nn.Module) -> BaseRuntime | None:
    """The runtime that a module was moved with, or None.

    Copies and unpickled modules were not moved. An attribute `_ppe_runtime`, where a
    program for pytorch-pfn-extras put one itself, counts as well.
    """
    tag = _tags.get(id(module))
    if tag is not None:
        return tag[1]
    by_hand: BaseRuntime | None = getattr(module, "_ppe_runtime", None)
    return by_hand


def set_runtime(module: nn.Module, runtime: BaseRuntime | None) -> None:
    """Say which runtime serves this module (not its submodules); None takes it back.

    `trine.core.to` does this. By itself it serves tests, and runtimes that move modules
    in their own way.
    """
    key = id(module)
    if runtime is None:
        _tags.pop(key, None)
        return

    # The default keeps the dictionary in reach while the interpreter goes down.
    def forget(_: weakref.ref[nn.Module], tags: dict[int, object] = _tags) -> None:  # type: ignore[assignment]  # dict is invariant
        tags.pop(key, None)

    _tags[key] = (weakref.ref(module, forget), runtime)


def named_runtime_modules(
    module: nn.Module, module_name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose runtime is to be called: each topmost one of its runtime.

    A submodule that was moved with its parent is the parent's business; one that was
    moved with another runtime is given too.

    Args:
        module: where to start; it need not have a runtime itself.
        module_name: the name to give `module`; submodules have the names that
            `named_modules` gives them.
    """
    seen: set[int] = set()

    def walk(
        at: nn.Module, path: str, above: BaseRuntime | None
    ) -> Iterator[tuple[str, nn.Module]]:
        if id(at) in seen:
            return
        seen.add(id(at))
        here = runtime_of(at)
        if here is not None and here is not above:
            yield path or module_name, at
        for name, child in at.named_children():
            yield from walk(child, f"{path}.{name}" if path else name, here or above)

    yield from walk(module, "", None)
