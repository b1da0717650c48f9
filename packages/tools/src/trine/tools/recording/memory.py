"""MemorySampler: the memory that the engine cannot know of, as counters while it is installed.

The engine reports shards, whole parameters, their gradients, their optimizer state and its
buffers. What is added here: activations (what autograd has saved, by unit), the state and the
gradients of parameters that nobody has sharded, the model's buffers, and what an accelerator's
allocator says it has given out.

Note [What autograd has saved]
    Saved tensors pass through a pair of hooks of autograd's. The first counts the memory
    behind a tensor, once however often it is saved, unless it is a parameter's; it gives
    autograd an object whose end says that the tensor is no longer saved. Where others have
    hooks of their own, inside activation checkpointing say, theirs are asked and not these:
    what is saved there is not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from trine.core import tracing
from trine.tools.recording.units import Tracker, whole_tensors

__all__ = ["MemorySampler"]

_HALF: Final = 0.5  # of what was told last: below it, freed activations are told again


class MemorySampler:
    """Reports activations, and what else of memory only the program itself knows.

    To be installed and removed by the thread that trains, outside of forward and backward.
    Costs a few microseconds for each module that computes and each tensor that is saved, and
    only while a sink of the tracing seam listens.
    """

    def __init__(self) -> None:
        self._tracker = Tracker()
        self._hooks: saved_tensors_hooks | None = None
        self._handles: list[RemovableHandle] = []
        self._saved: dict[int, int] = {}  # how often each storage is saved now
        self._params: dict[int, torch.UntypedStorage] = {}
        self._nbytes: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def install(self) -> None:
        """Begin to look.

        Raises:
            RuntimeError: if this sampler is installed already.
        """
        if self._hooks is not None:
            raise RuntimeError("This MemorySampler is installed already. Call remove() first.")
        self._hooks = saved_tensors_hooks(self._save, _unpacked)
        self._hooks.__enter__()
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Look no longer. A second call changes nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None
        self._params.clear()

    # --- modules ----------------------------------------------------------------------

    def _begin(self, module: nn.Module, _: Any) -> None:
        if not tracing.enabled:
            return
        if self._tracker.begin(module).unit == "(root)" and len(self._tracker.running) == 1:
            self._params.clear()
            plain, buffers = whole_tensors(module)
            _tell("replicated", buffers)
            _tell("unsharded", sum(param.nbytes for param in plain))
            _tell_gradients(plain)

    def _end(self, module: nn.Module, *_: Any) -> None:
        if not self._tracker.running:
            return
        self._note_params(module)
        ended = self._tracker.end(module)
        if ended is not None and ended.begins and tracing.enabled:
            # Hooks of all modules come before those of one: what is gathered for it is there.
            self._tell_activations(ended.unit)
            _tell_allocated()
        if not self._tracker.running:
            self._params.clear()

    def _note_params(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            if not hasattr(param, "placements"):
                storage = param.untyped_storage()
                self._params[id(storage)] = storage

    # --- see Note [What autograd has saved] -------------------------------------------

    def _save(self, tensor: Tensor) -> Tensor | _Saved:
        # Detached: an output that is saved would keep alive the graph that keeps it.
        kept = tensor.detach()
        if not tracing.enabled or not self._tracker.running or tensor.layout is not torch.strided:
            return kept
        storage = _local(kept).untyped_storage()
        key = id(storage)
        if key not in self._params:
            self._note_params(self._tracker.running[-1].module)
        if key in self._params or not storage.nbytes():
            return kept
        unit = self._tracker.unit
        count = self._saved.get(key, 0)
        self._saved[key] = count + 1
        if not count:
            self._nbytes[unit] = self._nbytes.get(unit, 0) + storage.nbytes()
        return _Saved(kept, storage, self, unit)

    def forget(self, storage: torch.UntypedStorage, unit: str) -> None:
        """A tensor over `storage` is saved once less; called by what stood for it."""
        key = id(storage)
        count = self._saved.get(key, 1) - 1
        if count > 0:
            self._saved[key] = count
            return
        self._saved.pop(key, None)
        left = self._nbytes[unit] = max(self._nbytes.get(unit, 0) - storage.nbytes(), 0)
        if tracing.enabled and left <= _HALF * self._told.get(unit, 0):
            self._tell_activations(unit)
            if not left:
                _tell_allocated()

    def _tell_activations(self, unit: str) -> None:
        nbytes = self._nbytes.get(unit, 0)
        self._told[unit] = nbytes
        tracing.counter("memory.activations", nbytes, "mem", unit)

    # --- optimizers -------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if tracing.enabled:
            _tell_gradients(_plain(optimizer))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not tracing.enabled:
            return
        states = [optimizer.state.get(param, {}) for param in _plain(optimizer)]
        tensors = [each for state in states for each in state.values()]
        found = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
        if found:
            _tell("optimizer", found)
        _tell_allocated()


class _Saved:
    """Stands for a saved tensor in autograd's graph; its end is the end of that."""

    __slots__ = ("_sampler", "_storage", "_unit", "tensor")

    def __init__(
        self, tensor: Tensor, storage: torch.UntypedStorage, sampler: MemorySampler, unit: str
    ) -> None:
        self.tensor = tensor
        self._storage = storage
        self._sampler = sampler
        self._unit = unit

    def __del__(self) -> None:
        self._sampler.forget(self._storage, self._unit)


def _local(tensor: Tensor) -> Tensor:
    """What a tensor that is dealt out over ranks holds on this one; any other is itself."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _unpacked(saved: Tensor | _Saved) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def _plain(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer that nobody has sharded: the engine tells of the others."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param for param in params if not hasattr(param, "placements")]


def _tell_gradients(plain: list[nn.Parameter]) -> None:
    _tell("gradients", sum(param.grad.nbytes for param in plain if param.grad is not None))


def _tell(kind: str, nbytes: int) -> None:
    tracing.counter(f"memory.{kind}", nbytes, "mem")


def _tell_allocated() -> None:
    """What the allocator of the accelerator has given out; that of CPUs does not say."""
    if torch.accelerator.is_available():
        # Not every accelerator's allocator keeps count.
        with contextlib.suppress(RuntimeError):
            _tell("allocated", torch.accelerator.memory_allocated())
