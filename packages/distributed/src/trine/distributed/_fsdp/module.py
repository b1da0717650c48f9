"""FSDPModule: the methods that a sharded module gains. Each forwards to one owner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trine.distributed._fsdp.arguments import as_flag, as_hook, as_number
from trine.distributed._fsdp.custom_comm import AllGather, ReduceScatter, check_custom
from trine.distributed._fsdp.finite import FiniteCheck
from trine.distributed._fsdp.param_group import ParamGroup
from trine.distributed._fsdp.root import schedule_of
from trine.distributed._fsdp.showing import show_shards
from trine.distributed._fsdp.state import FSDPState, state_of

__all__ = ["FSDPModule", "UnshardHandle", "drop_grads", "sharded_class"]


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
        async_op = as_flag(async_op, "async_op")
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
        """Free this module's own whole parameters and show the sharded ones.

        Raises:
            RuntimeError: inside the module's own forward or backward.
        """
        show_shards(_state(self), "reshard")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the end of the next backward waits for all reductions.

        With False some gradients may be handed out only by a later backward, which lets
        them overlap the next micro-batch. Set it back to True before the last one.
        """
        last = as_flag(is_last_backward, "is_last_backward")
        schedule_of(_state(self)).is_last_backward = last

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether parameters are freed after forward; see `fully_shard`.

        Backward then gathers among all ranks, also if `fully_shard` was given a number.

        Raises:
            TypeError: for a number, which must be given to `fully_shard`.
        """
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(
                "set_reshard_after_forward takes True or False, got "
                f"{reshard_after_forward!r}. Give a number of ranks to fully_shard instead."
            )
        for state in _states(self, recurse):
            state.settings.reshard_after_forward = reshard_after_forward
            for group in state.groups:
                group.gather_again_among_all()

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether parameters are freed after backward.

        Without it they stay whole, and in view, until `reshard` or the first forward after
        an optimizer step. Gradients of gradients need that.
        """
        reshards = as_flag(reshard_after_backward, "reshard_after_backward")
        for state in _states(self, recurse):
            state.settings.reshard_after_backward = reshards

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether this module's parameters are gathered for its backward.

        Where backward does not read them, as for an embedding, gathering can be saved.
        """
        gathers = as_flag(unshard_in_backward, "unshard_in_backward")
        _state(self).settings.gathers_in_backward = gathers

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose what is gathered ahead when this module's forward begins.

        Args:
            modules: sharded modules, in the order in which to gather; an empty list for
                none. Without a choice the next in the order of the last iteration is.
        """
        _state(self).settings.ahead_in_forward = _units(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose what is gathered ahead when this module's backward begins.

        Args:
            modules: sharded modules, in the order in which to gather; an empty list for
                none. Without a choice the one whose forward ended before is.
        """
        _state(self).settings.ahead_in_backward = _units(modules)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether gradients are added up over copies, on meshes that hold copies.

        Sums that are not are kept on this rank, sharded, and join the next that is. To drop
        them, call `zero_grad()` of the model; that of an optimizer does not reach them.
        """
        all_reduces = as_flag(requires_all_reduce, "requires_all_reduce")
        for state in _states(self, recurse):
            state.reduce_settings.all_reduces = all_reduces

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None] | None, *, stream: object | None = None
    ) -> None:
        """Call `hook` with each group's reduced gradients before they are handed out.

        Args:
            hook: gets a 1-D tensor of this rank's reduced gradients, laid end to end with
                padding; may change it in place. None takes the last one away.
            stream: accepted for the sake of programs written for torch; the hook runs on
                the current stream.
        """
        _state(self).reduce_settings.hook = as_hook(hook, "hook")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over all ranks by `factor`, instead of their number."""
        divide_by = as_number(factor, "factor")
        if not 0 < divide_by < math.inf:
            raise ValueError(
                f"The gradient divide factor must be positive and finite, got {factor!r}."
            )
        _state(self).reduce_settings.divide_by = divide_by

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let the backend add up only, and divide afterwards.

        For backends and hooks that cannot average. Half types may overflow in the sum.
        """
        sums = as_flag(enable, "enable")
        for group in _state(self).groups:
            group.comm.averages = not sums and group.comm.can_average

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepted, and always so: unused parameters take part in every reduction here."""
        as_flag(reduce_scatter_unused_params, "reduce_scatter_unused_params")

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Choose how many reductions may be under way, each of which holds a buffer."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be a whole number, got {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}.")
        schedule_of(_state(self)).open_reductions = max_input_buffers

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused: no backend here lends memory to the engine."""
        if as_flag(enable, "enable"):
            raise NotImplementedError(
                "Memory from the process group needs a backend that lends it (nccl with "
                f"registered buffers); {_backends(self)} does not. Buffers are reused anyway."
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Refused: symmetric memory is a matter of nccl on GPUs, which is not implemented."""
        raise NotImplementedError(
            f"Symmetric memory ({backend}) needs nccl on GPUs of one node; this module "
            f"communicates over {_backends(self)}."
        )

    def set_post_optim_event(self, event: object) -> None:
        """Accepted: on one stream the gather after an optimizer step waits for it anyway."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce in a process group of its own, so that gathers do not queue behind it.

        Every rank must call it alike: it makes process groups.
        """
        made: dict[ProcessGroup, ProcessGroup] | None = {} if as_flag(enable, "enable") else None
        for state in _states(self, recurse):
            for group in state.groups:
                group.reduce_apart(made)

    def set_check_finite_gradients(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether backward raises if a gradient holds NaN or infinity. Off at first.

        Each rank looks at its own gradients of the whole parameters, before they are reduced;
        those that were kept without communication are looked at when they are reduced. The
        reduction goes on, and at the end of that backward all ranks raise the same
        `NonFiniteGradient`, which names the first such parameter in the order of backward, the
        ranks, and the step. Gradients are handed out as usual, so call `zero_grad()` and try
        again, or go on.

        It costs a read of every gradient and one small all-reduce for each backward that
        reduces, and on GPUs a wait for it. Under a gradient scaler (fp16) overflow is normal
        and the scaler skips such steps by itself: leave the check off there. A sum over ranks
        that overflows a half `reduce_dtype` though every gradient is finite is not found.

        Args:
            enable: whether to check.
            recurse: also for the sharded modules below this one.
        """
        checks = as_flag(enable, "enable")
        for state in _states(self, recurse):
            state.reduce_settings.finite = FiniteCheck() if checks else None

    def reset_iter_state(self) -> None:
        """Forget an iteration that broke off: its gradients on this rank, and what is gathered.

        The engine does it by itself at the next forward after an exception in backward.
        """
        state = _state(self)
        if state.schedule is not None:
            state.schedule.reset()

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters with `comm`; see `trine.distributed.fsdp.comm`.

        It gathers among all ranks that share a copy. With a number as `reshard_after_forward`
        the gather for backward among fewer stays the engine's own: it needs no buffers.
        """
        check_custom(comm, "AllGather")
        for group in _state(self).groups:
            group.exchange_comm(gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's gradients with `comm`; see `trine.distributed.fsdp.comm`."""
        check_custom(comm, "ReduceScatter")
        for group in _state(self).groups:
            group.exchange_comm(reduce=comm)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients over ranks or keeps them on this one.

        Kept gradients are whole, in `reduce_dtype`, and join the next reduction, also if their
        parameter is frozen, cast or exchanged meanwhile. To drop them, after an exception in a
        later micro-batch say, call `zero_grad()` of the model; that of an optimizer does not
        reach them.

        Args:
            requires_gradient_sync: True to reduce.
            recurse: also for the sharded modules below this one.
        """
        reduces = as_flag(requires_gradient_sync, "requires_gradient_sync")
        for state in _states(self, recurse):
            state.settings.reduces = reduces

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also of parameters that are whole at the moment.

        What waits on this rank for a later reduction is dropped, and a reduction under way too.

        Args:
            set_to_none: drop them instead of filling them with zeros.
        """
        drop_grads(_states(self, recurse=True), set_to_none)
        assert isinstance(self, nn.Module)
        nn.Module.zero_grad(self, set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            f"A sharded module ({type(self).__name__}) cannot be copied: its shards belong to "
            "process groups. Copy the model before fully_shard, or load its state dict into "
            "another sharded one."
        )


def drop_grads(states: Iterable[FSDPState], set_to_none: bool) -> None:
    """Reset the gradients of sharded modules, whichever face their parameters show."""
    for state in states:
        for group in state.groups:
            group.zero_grad(set_to_none)


def _state(module: FSDPModule) -> FSDPState:
    assert isinstance(module, nn.Module)
    state = state_of(module)
    assert state is not None
    return state


def _states(module: FSDPModule, recurse: bool) -> list[FSDPState]:
    assert isinstance(module, nn.Module)
    modules = module.modules() if as_flag(recurse, "recurse") else [module]
    return [state for each in modules if (state := state_of(each)) is not None]


def _units(modules: object) -> list[ParamGroup]:
    # A container that is sharded itself would be taken apart.
    if isinstance(modules, FSDPModule | str) or not isinstance(modules, Iterable):
        raise TypeError(
            "modules must be a list of modules that fully_shard was called on, got a "
            f"{type(modules).__name__}. For one module: [module]."
        )
    found = list(modules)
    for module in found:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"Only modules that fully_shard was called on can be gathered ahead, got a "
                f"{type(module).__name__}."
            )
    return [group for module in found for group in _state(module).groups]


def _backends(module: FSDPModule) -> str:
    return " and ".join(sorted({group.comm.backend for group in _state(module).groups})) or "none"


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The class `FSDP<name>` of a sharded module: the plain one with FSDPModule's methods."""
    made = _classes.get(plain)
    if made is None:
        made = type(f"FSDP{plain.__name__}", (FSDPModule, plain), {"__module__": plain.__module__})
        _classes[plain] = made
    return made
