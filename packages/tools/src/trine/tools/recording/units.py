"""Which module computes now, and which unit it belongs to, for models that know nothing of us."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final

from torch import nn

__all__ = ["Running", "Tracker", "whole_tensors"]

_WRAPPERS: Final = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class Running:
    """A module that computes.

    Attributes:
        module: itself.
        unit: full name of the unit it belongs to, "(root)" for that of the outermost module.
        begins: whether the module is that unit.
    """

    module: nn.Module
    unit: str
    begins: bool


class Tracker:
    """The modules that compute now, the innermost last.

    Units are what FSDP shards, ours or torch's, known by their methods `unshard` and
    `reshard`; in a model without any, the members of its module lists.
    """

    def __init__(self) -> None:
        self.running: list[Running] = []
        self._known: weakref.WeakKeyDictionary[nn.Module, _Place] = weakref.WeakKeyDictionary()

    @property
    def unit(self) -> str:
        """Full name of the unit that computes; "" if no module does."""
        return self.running[-1].unit if self.running else ""

    def begin(self, module: nn.Module) -> Running:
        """A module is about to compute."""
        known = self._known.get(module)
        if known is None and not self.running:
            # The outermost one. One that is known runs once more, on its own or in backward.
            self._known.update(_below(module))
            known = self._known[module]
        unit, begins = (self.unit, False) if known is None else (known.unit, known.begins)
        running = Running(module, unit, begins)
        self.running.append(running)
        return running

    def end(self, module: nn.Module) -> Running | None:
        """A module has computed, or raised; None if its beginning was not seen."""
        while self.running:
            last = self.running.pop()
            if last.module is module:  # those inside it that raised have not told
                return last
        return None


@dataclass(frozen=True)
class _Place:
    unit: str
    begins: bool


def _below(root: nn.Module) -> dict[nn.Module, _Place]:
    """The unit that each module below a root belongs to."""
    named = list(root.named_modules())
    units = {module for _, module in named if _is_sharded(module)}
    if not units:
        lists = [module for _, module in named if isinstance(module, nn.ModuleList)]
        units = {member for each in lists for member in each}
    found: dict[nn.Module, _Place] = {}

    def walk(module: nn.Module, name: str, unit: str) -> None:
        if module in found:
            return
        begins = module is root or module in units
        unit = (name or "(root)") if begins else unit
        found[module] = _Place(unit, begins)
        for below, child in module.named_children():
            inside = name if below in _WRAPPERS else f"{name}.{below}" if name else below
            walk(child, inside, unit)

    walk(root, "", "(root)")
    return found


def _is_sharded(module: nn.Module) -> bool:
    kind = type(module)
    return callable(getattr(kind, "unshard", None)) and callable(getattr(kind, "reshard", None))


def whole_tensors(root: nn.Module) -> tuple[list[nn.Parameter], int]:
    """The parameters below a module that nobody has sharded, and the bytes of its buffers.

    To be asked before the module's forward, when what is sharded shows its shards.
    """
    plain = [param for param in root.parameters() if not hasattr(param, "placements")]
    return plain, sum(buffer.nbytes for buffer in root.buffers())
