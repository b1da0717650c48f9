"""What can only be known when a model is first used: its root, its names, its order.

The module whose forward runs first is the root of all sharded modules below it: they get
their full names and share one schedule. A sub-module that was used on its own before is
taken over when its parent runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn

from trine.distributed._fsdp.agreement import agree_on_layout
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.finite import raise_if_not_finite
from trine.distributed._fsdp.optimizer_steps import optimizer_steps
from trine.distributed._fsdp.param_group import refuse_meta
from trine.distributed._fsdp.reducer import ReduceSettings
from trine.distributed._fsdp.schedule import Schedule
from trine.distributed._fsdp.state import FSDPState, plain_name, state_of
from trine.distributed.mesh import MeshAxes

__all__ = ["is_root", "schedule_of", "share_buffers"]


def schedule_of(state: FSDPState) -> Schedule:
    """The schedule of a sharded module; makes it the root if it has none yet.

    Raises:
        RuntimeError: if parameters below it are on the meta device.
    """
    return state.schedule or _initialize(state)


def is_root(state: FSDPState) -> bool:
    """Whether the module is the outermost one that its schedule knows of."""
    return state.name == "(root)"


def share_buffers(states: Sequence[FSDPState]) -> None:
    """Let several roots take turns on one pool of communication buffers."""
    pool = BufferPool()
    for state in states:
        schedule_of(state).free_idle = pool.free_idle
    for state in states:
        for _, module in _modules_below(state):
            below = state_of(module)
            for group in below.groups if below is not None else ():
                group.use_pool(pool)


def _modules_below(root: FSDPState) -> Iterator[tuple[str, nn.Module]]:
    if len(root.modules) == 1:
        yield from root.modules[0].named_modules()
        return
    for position, module in enumerate(root.modules):
        for name, below in module.named_modules(prefix=f"[{position}]"):
            yield ("" if below is root.modules[0] else name), below


def _initialize(root: FSDPState) -> Schedule:
    below = [
        (plain_name(name), state)
        for name, module in _modules_below(root)
        if (state := state_of(module)) is not None and state.modules[0] is module
    ]
    on_meta: list[str] = []
    home = root.axes.device_type
    for name, state in below:
        for group in state.groups:
            group.rename(name or "(root)")
            found = group.meta_names()
            home = group.home if found else home
            on_meta += found
    # Before any refusal: one that only some ranks meet would leave the others waiting.
    agree_on_layout(root, below)
    refuse_meta(on_meta, home)
    # Nothing is changed before all checks have passed: the user may mend and try again.
    schedule = Schedule()
    pool = BufferPool()
    for name, state in below:
        if state.schedule is not None:
            state.schedule.reshard_all()
        state.schedule = schedule
        state.name = name or "(root)"
        for group in state.groups:
            group.use_pool(pool)
            schedule.add(group, state.settings, is_root=state is root, parts=len(state.modules))
    ledgers = [group.comm.ledger for _, state in below for group in state.groups]
    root.ledgers = tuple(dict.fromkeys(ledger for ledger in ledgers if ledger is not None))
    settings = [state.reduce_settings for _, state in below]
    schedule.free_idle = pool.free_idle
    schedule.after_backward = partial(_check_finite, settings, root.axes)
    return schedule


def _check_finite(settings: Sequence[ReduceSettings], axes: MeshAxes) -> None:
    checks = [each.finite for each in settings if each.finite is not None]
    if checks:
        raise_if_not_finite(checks, axes, optimizer_steps())
