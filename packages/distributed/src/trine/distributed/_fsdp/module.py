"""FSDPModule: the methods that a sharded module gains. Each forwards to one owner."""

from __future__ import annotations

from typing import Any

from torch import nn

from trine.distributed._fsdp.root import schedule_of
from trine.distributed._fsdp.state import FSDPState, state_of

__all__ = ["FSDPModule", "UnshardHandle", "sharded_class"]


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns: the gather under way."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Have the whole parameters in place. A second call does nothing."""
        state, self._state = self._state, None
        if state is not None:
            for group in state.groups:
                group.wait_for_unshard()


class FSDPModule:
    """Mixed into the class of every module that `fully_shard` was called on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> FSDPModule:
        """Modules of a sharded class are made by `fully_shard`; a new one is a plain one."""
        plain = cls.__mro__[2]
        made: FSDPModule = plain.__new__(plain, *args, **kwargs)
        plain.__init__(made, *args, **kwargs)  # type: ignore[misc]  # the plain class's own
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of sharded modules below it).

        Args:
            async_op: return at once with a handle to wait on.

        Returns:
            A handle if `async_op`, else None.
        """
        state = _state(self)
        schedule_of(state)
        for group in state.groups:
            group.unshard()
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own whole parameters and show the sharded ones."""
        for group in _state(self).groups:
            group.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients over ranks or keeps them on this one.

        Kept gradients are whole, in `reduce_dtype`, and join the next reduction.

        Args:
            requires_gradient_sync: True to reduce.
            recurse: also for the sharded modules below this one.
        """
        for state in _states(self, recurse):
            state.settings.reduces = requires_gradient_sync

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also of parameters that are whole at the moment.

        Args:
            set_to_none: drop them instead of filling them with zeros.
        """
        for state in _states(self, recurse=True):
            for group in state.groups:
                group.zero_grad(set_to_none)
        assert isinstance(self, nn.Module)
        nn.Module.zero_grad(self, set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            f"A sharded module ({type(self).__name__}) cannot be copied: its shards belong to "
            "process groups. Copy the model before fully_shard, or load its state dict into "
            "another sharded one."
        )


def _state(module: FSDPModule) -> FSDPState:
    assert isinstance(module, nn.Module)
    state = state_of(module)
    assert state is not None
    return state


def _states(module: FSDPModule, recurse: bool) -> list[FSDPState]:
    assert isinstance(module, nn.Module)
    modules = module.modules() if recurse else [module]
    return [state for each in modules if (state := state_of(each)) is not None]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The class `FSDP<name>` of a sharded module: the plain one with FSDPModule's methods."""
    made = _classes.get(plain)
    if made is None:
        made = type(f"FSDP{plain.__name__}", (FSDPModule, plain), {"__module__": plain.__module__})
        _classes[plain] = made
    return made
