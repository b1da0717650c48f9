"""FullyShardedDataParallel: a module that wraps a module and shards its parameters.

It translates: arguments into what the engine takes, and methods into what the engine offers. It
decides nothing about order and moves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trine.core.batches import tensors_of
from trine.distributed._fsdp import hooks
from trine.distributed._fsdp.comm_hook import CommHook
from trine.distributed._fsdp.fully_shard import shard_unit
from trine.distributed._fsdp.grad_norm import clip_grad_norm_
from trine.distributed._fsdp.module import drop_grads
from trine.distributed._fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from trine.distributed._fsdp.precision import cast_floating
from trine.distributed._fsdp.root import is_root, schedule_of
from trine.distributed._fsdp.showing import show_shards
from trine.distributed._fsdp.state import WRAPPED, FSDPState, plain_name, state_of
from trine.distributed._wrapper import options, preparation, state_dicts
from trine.distributed._wrapper.auto_wrap import Apart, auto_wrap
from trine.distributed._wrapper.buffers import buffers_as
from trine.distributed._wrapper.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from trine.distributed._wrapper.placement import axes_for, compute_device, default_strategy
from trine.distributed._wrapper.saving import SavesState
from trine.distributed._wrapper.whole_params import whole_params

__all__ = ["FullyShardedDataParallel"]

M = TypeVar("M", bound="FullyShardedDataParallel")


class FullyShardedDataParallel(SavesState):
    """Shard the parameters of a module over ranks; train it as if it were not.

    Its parameters become DTensors, cut along dim 0, each by itself. They are gathered together
    before the module computes, freed after it, gathered again for its backward, and their
    gradients are averaged over the ranks and sharded. Make the optimizer afterwards. Every rank
    must make the same calls and hold the same initial values (or set `sync_module_states`).

    Parameters, buffers and state dicts have the names that they had; missing attributes, and
    indices, are those of the wrapped module, which is `module`.

    Args:
        module: to wrap. Those below it that were wrapped before keep their parameters.
        process_group: the ranks to shard over; for hybrid strategies a pair, the group to shard
            over and the group that holds copies. None takes all ranks, for hybrid strategies
            with one copy on each host.
        sharding_strategy: see `ShardingStrategy`; None takes FULL_SHARD, or HYBRID_SHARD where
            `device_mesh` has two axes.
        cpu_offload: see `CPUOffload`.
        auto_wrap_policy: which modules below are wrapped too, each on its own, with the same
            arguments; see `trine.distributed.fsdp.wrap`. None wraps only this one.
        backward_prefetch: when backward gathers ahead; None never does.
        mixed_precision: see `MixedPrecision`.
        ignored_modules: modules to leave as they are, with all that is below them.
        param_init_fn: called with each module that is on the meta device, to give it memory and
            values; None takes its `reset_parameters`.
        device_id: where to compute: a device, its name, or the number of a GPU; None for where
            the module is, or what the backend moves.
        sync_module_states: give all ranks the parameters and buffers of the first.
        forward_prefetch: gather the next module's parameters while one computes, in the order
            of the iteration before.
        limit_all_gathers: accepted, and always so: no more than two modules are gathered at once.
        use_orig_params: accepted: parameters are always the module's own, whatever is given.
        ignored_states: modules or parameters to leave as they are.
        device_mesh: the ranks, instead of `process_group`: one axis, or for hybrid strategies
            two, of which the first holds copies.

    Objects of torch's FSDP (strategies, policies, configurations) are taken for ours.

    Raises:
        ValueError: if arguments contradict each other, or a parameter is sharded already.
        TypeError: for an argument of another type, naming it.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup
        | tuple[dist.ProcessGroup, dist.ProcessGroup]
        | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | object | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"FullyShardedDataParallel wraps an nn.Module, got {type(module).__name__}."
            )
        preparation.check_wrappable(module)
        ignored = preparation.ignored_by(ignored_modules, ignored_states)
        strategy = default_strategy(options.as_strategy(sharding_strategy), device_mesh)
        precision = options.as_mixed_precision(mixed_precision)
        device = compute_device(device_id, device_mesh, module)
        axes = axes_for(strategy, process_group, device_mesh, device)
        arguments: dict[str, Any] = {
            "process_group": process_group,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "ignored_states": [*ignored[0], *ignored[1]],
            "device_mesh": device_mesh,
        }
        apart = tuple(precision._module_classes_to_ignore) if mixed_precision else ()
        if apart:
            own = MixedPrecision(_module_classes_to_ignore=apart)
            auto_wrap_policy = Apart(auto_wrap_policy, apart, {"mixed_precision": own})
        if auto_wrap_policy is not None:
            _auto_wrap(module, auto_wrap_policy, arguments, (strategy, axes.mesh), ignored)
        self._own_dtype = isinstance(module, apart)
        if self._own_dtype:
            precision = MixedPrecision()
        self.sharding_strategy = strategy
        self.mixed_precision = precision
        self.cpu_offload = options.as_cpu_offload(cpu_offload)
        self.backward_prefetch = options.as_backward_prefetch(backward_prefetch)
        self.forward_prefetch = bool(forward_prefetch)
        self.limit_all_gathers = bool(limit_all_gathers)
        self._device = device
        self._summoned = False
        self._fsdp_wrapped_module = module
        unit = preparation.modules_of_unit(module, ignored[0])
        preparation.give_memory(unit, param_init_fn, device)
        if device.kind != "cpu":
            preparation.buffers_to(unit.values(), device)
        if sync_module_states:
            preparation.same_on_all_ranks(unit.values(), ignored[1], axes, device)
        state = shard_unit(
            (self,),
            lambda: axes,
            reshard_after_forward=False if strategy.keeps_until_backward else None,
            place=None,
            policy=MixedPrecisionPolicy(
                precision.param_dtype, precision.reduce_dtype, cast_forward_inputs=False
            ),
            offload=CPUOffloadPolicy() if self.cpu_offload.offload_params else OffloadPolicy(),
            ignored=ignored[1],
        )
        self._unit = list(unit.values())
        self._set_prefetching(state)
        if precision.keep_low_precision_grads:
            _keep_grads_low(state, precision.reduce_dtype or precision.param_dtype)
        hooks.watch_state_dicts(state)
        # Ranks meet there, of which a compiler can make no graph.
        self._begin = torch.compiler.disable(schedule_of)  # type: ignore[no-untyped-call]  # torch's own
        self._compute = hooks.as_forward(state, self, self._call_wrapped)
        # nn.TransformerEncoderLayer reads weights of the modules in it past their forward, unless
        # one of them has a hook.
        self.register_forward_pre_hook(_nothing)

    def _set_prefetching(self, state: FSDPState) -> None:
        settings = state.settings
        if not self.forward_prefetch:
            settings.ahead_in_forward = []
        if self.backward_prefetch is None:
            settings.ahead_in_backward = []
        settings.ahead_late = self.backward_prefetch is BackwardPrefetch.BACKWARD_POST

    # --- computing ------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped module computes, with its parameters gathered.

        Raises:
            RuntimeError: inside `summon_full_params`.
        """
        if self._summoned:
            raise RuntimeError(
                "forward was called inside summon_full_params, where this module shows copies of "
                "its whole parameters. Leave the context first."
            )
        state = _state(self)
        if state.schedule is None:
            self._begin(state)
        outermost = is_root(state)
        if outermost and self._device.kind != "cpu":
            args, kwargs = self._device.batch_to_device((args, kwargs))
        policy = self.mixed_precision
        casts = policy.cast_forward_inputs or (outermost and policy.cast_root_forward_inputs)
        if policy.param_dtype is not None and casts:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        if self._own_dtype:
            return self._in_own_dtype(args, kwargs)
        return self._compute(*args, **kwargs)

    def _in_own_dtype(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute in the parameters' dtype between modules that compute in another."""
        own = next((p.dtype for p in self._fsdp_wrapped_module.parameters()), torch.float32)
        given = {t.dtype for t in tensors_of((args, kwargs)) if t.is_floating_point()}
        if given <= {own}:
            return self._compute(*args, **kwargs)
        output = self._compute(*cast_floating(args, own), **cast_floating(kwargs, own))
        return cast_floating(output, given.pop()) if len(given) == 1 else output

    def _call_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        wrapped = self._modules[WRAPPED]  # looked up as an attribute it takes ten times as long
        assert wrapped is not None
        dtype = self.mixed_precision.buffer_dtype
        if dtype is None:
            return wrapped(*args, **kwargs)
        with buffers_as(dtype, self._unit):
            return wrapped(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward keep gradients on this rank, for the first backward outside to reduce.

        With SHARD_GRAD_OP parameters stay whole between backwards inside. To drop what is kept,
        call `zero_grad()` of the model: that of an optimizer does not reach it.
        """
        states = _states(self)
        before = [(s.settings.reduces, s.settings.reshard_after_backward) for s in states]
        for state in states:
            state.settings.reduces = False
            if state.settings.reshard_after_forward is False:
                state.settings.reshard_after_backward = False
        try:
            yield
        finally:
            for state, (reduces, reshards) in zip(states, before, strict=True):
                state.settings.reduces = reduces
                state.settings.reshard_after_backward = reshards

    # --- what it stands for -----------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a wrapper for activation checkpointing around it."""
        wrapped = self._fsdp_wrapped_module
        inside = wrapped._modules.get("_checkpoint_wrapped_module")
        return wrapped if inside is None else inside

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that parameters are sharded over; with NO_SHARD, those that hold copies."""
        axes = _state(self).axes
        return axes.shard_group or axes.replicate_group

    @property
    def rank(self) -> int:
        """The place of this rank in `process_group`."""
        group = self.process_group
        return 0 if group is None else group.rank()

    @property
    def world_size(self) -> int:
        """How many ranks `process_group` has."""
        group = self.process_group
        return 1 if group is None else group.size()

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes."""
        return self._device.torch_device

    @property
    def _has_params(self) -> bool:
        """Whether it holds a flat parameter: never, since each parameter is sharded by itself."""
        return False

    def check_is_root(self) -> bool:
        """Whether no other wrapped module is around this one."""
        state = _state(self)
        schedule_of(state)
        return is_root(state)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in a tree of modules, itself among them.

        Args:
            module: the top of the tree.
            root_only: only those that no other wrapper is around.
        """
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [each for each in found if each.check_is_root()] if root_only else found

    def __getattr__(self, name: str) -> Any:
        """Look for what the wrapper lacks in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:  # not set yet
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Exchange a module, parameter or buffer where it is: in the wrapped module."""
        wrapped = vars(self).get("_modules", {}).get(WRAPPED)
        if wrapped is not None and name not in state_dicts.own_names(self):
            while isinstance(wrapped, FullyShardedDataParallel):
                wrapped = wrapped._fsdp_wrapped_module
            if any(
                name in held for held in (wrapped._modules, wrapped._parameters, wrapped._buffers)
            ):
                setattr(wrapped, name, value)
                return
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        """An item of the wrapped module, such as a layer of an `nn.Sequential`."""
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    def extra_repr(self) -> str:
        """The strategy and the number of ranks."""
        axes = _state(self).axes
        copies = f", copies={axes.replicate_size}" if axes.replicate_size > 1 else ""
        return f"{self.sharding_strategy.name}, shards={axes.shard_size}{copies}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refused, to copies as well as to pickle."""
        raise TypeError(
            "A FullyShardedDataParallel can be neither copied nor pickled: its shards belong to "
            "process groups. Copy the model before it is wrapped, or save its state dict, and load "
            "that into another one."
        )

    # --- nn.Module, with plain names and parameters in the right place ----------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, with the names that they have in the wrapped module."""
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield plain_name(name), param

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters, each once."""
        for _, param in super().named_parameters(recurse=recurse):
            yield param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers, with the names that they have in the wrapped module."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield plain_name(name), buffer

    def get_buffer(self, target: str) -> Tensor:
        """The buffer of a name as `named_buffers` gives it.

        Raises:
            AttributeError: if there is none.
        """
        path, _, name = target.rpartition(".")
        module = self.get_submodule(path)
        while isinstance(module, FullyShardedDataParallel) and name not in module._buffers:
            module = module._fsdp_wrapped_module
        return nn.Module.get_buffer(module, name)

    def _apply(self: M, fn: Callable[..., Any], recurse: bool = True) -> M:
        # What is whole at the moment is derived from the shards, which are to be changed.
        for state in _states(self):
            show_shards(state, "to, or a method like it,")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also of parameters that are whole at the moment.

        What waits on this rank for a later reduction is dropped, and a reduction under way too.

        Args:
            set_to_none: drop them instead of filling them with zeros.
        """
        drop_grads(_states(self), set_to_none)
        super().zero_grad(set_to_none)

    def share_memory(self: M) -> M:
        """Refused: processes that share memory would not be ranks of the process group."""
        raise RuntimeError(
            "share_memory cannot be used on a FullyShardedDataParallel: another process that "
            "holds its shards is none of its ranks and cannot gather them. Share a plain copy: "
            "load model.state_dict() of FULL_STATE_DICT into an unwrapped module."
        )

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        Every rank must call it. Parameters that are ignored count too; their gradients must be
        equal on all ranks.

        Args:
            max_norm: the most that the norm may be.
            norm_type: p of the norm; `math.inf` for the greatest magnitude.

        Returns:
            The norm before clipping, the same on every rank; see `clip_grad_norm_` of
            `trine.distributed.fsdp`.

        Raises:
            RuntimeError: inside forward or backward.
        """
        for state in _states(self):
            show_shards(state, "clip_grad_norm_")  # whole parameters have no gradients
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Let `hook` add gradients up over ranks, in the place of the engine's collective.

        It owns the division as well: what it leaves is what the optimizer sees. Hooks written for
        torch's FSDP work here (those of torch that compress fail on CPUs, here as there, since
        they record a stream of a GPU). Gradients come in the dtype of the reduction, a part for
        each rank in their order, each with the rows of all parameters that this rank keeps,
        padded to equal length.

        Args:
            state: handed to the hook; each rank has its own.
            hook: where parameters are sharded, called as `hook(state, gradients, output)` with
                1-D tensors, to write this rank's part of the reduced gradients into `output`.
                With NO_SHARD called as `hook(state, gradients)`, to change these in place.

        Raises:
            RuntimeError: if this is not the outermost wrapper, or one has a hook already.
            TypeError: if `hook` cannot be called.
            ValueError: if a wrapper has a hybrid strategy, whose two collectives no one hook
                can replace.
        """
        if not callable(hook):
            raise TypeError(
                f"hook must be a function such as reduce_scatter_hook, got {_kind(hook)}."
            )
        if not self.check_is_root():
            raise RuntimeError(
                f"register_comm_hook was called on {_state(self).name}, which another wrapper is "
                "around. Call it on the outermost one: the hook is for all below it."
            )
        states = _states(self)
        for each in states:
            if each.axes.replicate_group is not None and each.axes.shard_group is not None:
                raise ValueError(
                    f"{each.name} has a hybrid strategy: its gradients are added up by two "
                    "collectives, within a copy and over the copies, and a hook replaces one. "
                    "Use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD, or leave the hook out."
                )
            if each.reduce_settings.comm_hook is not None:
                raise RuntimeError(
                    f"{each.name} has a communication hook already. One hook, registered once."
                )
        for each in states:
            each.reduce_settings.comm_hook = CommHook(state, hook)
            each.reduce_settings.divide_by = 1.0

    # --- whole parameters -------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show whole parameters for the time of a `with` block, in the dtype they are stored in.

        They are copies, plain parameters in the place of the sharded ones, and gone after the
        block. Parameters that tensor parallelism has dealt out are shown as it dealt them out.
        Every rank must enter and leave together. Inside, neither forward nor backward can run.

        Args:
            module: a wrapper, or any module with wrappers below it.
            recurse: also for wrappers below `module`; else for itself alone.
            writeback: keep what was edited, through `.data` too, also if the block raises: each
                rank keeps the rows that it holds, so all must make the same edits. A parameter
                that was replaced by one of the same shape gives its value, and whether it needs
                a gradient. With False nothing done inside lasts.
            rank0_only: show them only on the first of the ranks that hold them, in most programs
                rank 0; the others keep showing sharded ones, and with `writeback` get its edits.
            offload_to_cpu: show copies in the memory of the host.
            with_grads: show whole gradients as well; with `writeback` they are written back.

        Raises:
            RuntimeError: inside forward, backward or another summon_full_params.
            ValueError: at the end, with `writeback`, if a parameter has another shape by then or
                is gone; nothing is written back.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"summon_full_params takes an nn.Module, got {_kind(module)}.")
        modules = list(module.modules()) if recurse else [module]
        wrappers = [each for each in modules if isinstance(each, FullyShardedDataParallel)]
        found = (state_of(each) for each in modules)
        with whole_params(
            list(dict.fromkeys(state for state in found if state is not None)),
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            for wrapper in wrappers:
                wrapper._summoned = True
            try:
                yield
            finally:
                for wrapper in wrappers:
                    wrapper._summoned = False

    def apply(self: M, fn: Callable[[nn.Module], object]) -> M:
        """Call `fn` with each module below, children first, and with itself; keep its edits.

        Each wrapper's own parameters are whole meanwhile, so a function that initializes gives
        what it gives an unwrapped model: on every rank the same, if their seeds are.
        """
        with FullyShardedDataParallel.summon_full_params(self, recurse=False):
            super().apply(fn)  # type: ignore[arg-type]  # what it returns is ignored
        return self


def _nothing(*_: object) -> None:
    """A hook."""


def _auto_wrap(
    module: nn.Module,
    policy: object,
    arguments: dict[str, Any],
    ranks: tuple[ShardingStrategy, DeviceMesh],
    ignored: tuple[set[nn.Module], set[nn.Parameter]],
) -> None:
    """Wrap modules below `module` with the arguments of its own wrapper.

    Args:
        module: to be wrapped itself afterwards.
        policy: which modules.
        arguments: of the constructor.
        ranks: what was made of them; used again, since groups are dear.
        ignored: modules and parameters.
    """
    strategy, mesh = ranks
    made = {"process_group": None, "sharding_strategy": strategy, "device_mesh": mesh}

    def wrap_one(chosen: nn.Module, overrides: dict[str, Any]) -> nn.Module:
        given = arguments if made.keys() & overrides.keys() else {**arguments, **made}
        return FullyShardedDataParallel(chosen, **{**given, **overrides})

    auto_wrap(module, policy, wrap_one, *ignored, is_wrapped=lambda m: state_of(m) is not None)


def _keep_grads_low(state: FSDPState, dtype: torch.dtype | None) -> None:
    """Leave the gradients that the optimizer sees in the dtype of the reduction."""
    if dtype is None:
        return

    def lower(param: Tensor) -> None:
        if param.grad is not None:
            param.grad = param.grad.to(dtype)

    for group in state.groups:
        for param in group.params:
            if param.dtype.is_floating_point:
                param.sharded.grad_dtype = None  # any
                param.sharded.register_post_accumulate_grad_hook(lower)  # type: ignore[no-untyped-call]  # torch's own


def _state(wrapper: FullyShardedDataParallel) -> FSDPState:
    state = state_of(wrapper)
    assert state is not None
    return state


def _states(module: nn.Module) -> list[FSDPState]:
    return [state for each in module.modules() if (state := state_of(each)) is not None]


def _kind(given: object) -> str:
    return type(given).__name__
