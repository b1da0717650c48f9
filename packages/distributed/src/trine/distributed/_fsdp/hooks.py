"""The only file that registers anything on modules or on the autograd graph.

A hook finds its schedule, tells it what happens and, where needed, changes its arguments.

Note [Where a module's backward begins and ends]
    It begins when a gradient reaches one of the module's outputs: a hook on each of them.
    It ends when the gradients of all its inputs are known. An input may serve other modules
    too, and its full gradient come much later; so the module computes with an alias of each
    input, and the hook sits on the alias. Autograd runs the alias's node after all nodes
    that were made later, in the module, and gradients of parameters before everything else.
    A module none of whose inputs needs a gradient has no such end; `end_backward` serves it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from trine.core.batches import tensors_of
from trine.distributed._fsdp import root
from trine.distributed._fsdp.precision import cast_floating
from trine.distributed._fsdp.schedule import Schedule
from trine.distributed._fsdp.showing import show_shards
from trine.distributed._fsdp.state import FSDPState
from trine.distributed._fsdp.state_dict import localize
from trine.distributed._fsdp.torch_internals import (
    backward_running,
    call_after_backward,
    on_backward_reaching,
    outside_transforms,
    transforming,
)

__all__ = ["as_forward", "install", "watch_state_dicts"]

_HOLDS_NO_TENSOR = (type(None), bool, int, float, str, torch.dtype, torch.device)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def install(state: FSDPState) -> None:
    """Wire a sharded module to its schedule."""
    pre_forward, post_forward = _forward_hooks()
    for module in state.modules:
        module.register_forward_pre_hook(
            partial(pre_forward, state), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(partial(post_forward, state), always_call=True)
    watch_state_dicts(state)


def watch_state_dicts(state: FSDPState) -> None:
    """Have state dicts hold the sharded parameters, and values of any kind load into them."""
    # On the modules that hold the parameters: their state dicts are asked for alone, too, and
    # keys have reached them as they are there, after what wrappers in between have renamed.
    for owner in _owners(state):
        owner.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]  # torch's own
            partial(_before_state_dict, state)
        )
        owner.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]  # torch's own
            partial(_before_load, state)
        )


@cache
def _forward_hooks() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What to call before and after forward; hidden from dynamo, which cannot trace it.

    Where a module is compiled with its hooks (`module.compile()`) or below its root, the graph
    ends before a hook and another begins after it. Not hidden before the first call of
    `fully_shard`, because that imports the compiler; DTensor needs it from then on anyway.
    """
    hide = torch.compiler.disable
    return hide(_pre_forward), hide(_post_forward)  # type: ignore[no-untyped-call]  # torch's own


def as_forward(
    state: FSDPState, module: nn.Module, method: Callable[..., Any]
) -> Callable[..., Any]:
    """`method` with what the engine does before and after forward around it."""
    pre_forward, post_forward = _forward_hooks()

    @wraps(method)
    def around(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pre_forward(state, module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:  # an interrupt, too: the user may go on
            post_forward(state, module, args, None)
            raise
        return post_forward(state, module, args, output)

    return around


def _pre_forward(
    state: FSDPState, module: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    schedule = root.schedule_of(state)
    if schedule.in_backward and backward_running() == -1:
        schedule.reset()  # the last backward raised and never ended
    part = state.modules.index(module)
    without_grad = not torch.is_grad_enabled()
    with outside_transforms(), torch.no_grad():
        if part == 0 and root.is_root(state):
            schedule.begin_forward()
            if not schedule.in_backward:
                for ledger in state.ledgers:
                    ledger.turn(without_grad=without_grad)
        begins = [schedule.pre_forward(group, part) for group in state.groups]
    policy = state.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
    if any(begins) and torch.is_grad_enabled() and not transforming():
        args, kwargs = _watch_inputs(args, kwargs, partial(_post_backward, state, schedule))
    return args, kwargs


def _post_forward(state: FSDPState, module: nn.Module, args: Args, output: Any) -> Any:
    schedule = state.schedule
    if schedule is None:
        return output  # the first forward was refused before it began
    if output is None and sys.exc_info()[1] is not None:
        for group in state.groups:
            schedule.forward_failed(group)
        return output
    if state.policy.output_dtype is not None:
        output = cast_floating(output, state.policy.output_dtype)
    differentiable = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    part = state.modules.index(module)
    # Where no output can tell that a backward begins: it hides its tensors, or what was
    # computed leaves by another way, such as a list of the caller's.
    hidden = (
        torch.is_grad_enabled()
        and (transforming() or not differentiable)
        and any(group.trained() for group in state.groups)
    )
    with outside_transforms():
        for group in state.groups:
            schedule.post_forward(
                group, part, grads_wanted=bool(differentiable) or hidden, may_free=not hidden
            )
        if part == 0 and root.is_root(state):
            schedule.end_forward()
        if hidden:
            _watch_params(state, schedule)
    if state.groups and not hidden:
        for tensor in differentiable:
            on_backward_reaching(tensor, partial(_pre_backward, state, schedule))
    return output


def _watch_params(state: FSDPState, schedule: Schedule) -> None:
    """Notice a backward by the gradients of parameters, where outputs cannot tell.

    Such are outputs of a torch.func transform, whose tensors are taken apart outside it,
    objects that hide their tensors, and no outputs at all.
    """
    handles: list[Any] = []

    def notice(grad: Tensor) -> None:
        while handles:
            handles.pop().remove()
        _pre_backward(state, schedule, grad)

    for group in state.groups:
        handles += [_on_grad(param, notice) for param in group.trained()]


def _pre_backward(state: FSDPState, schedule: Schedule, grad: object) -> None:
    # With create_graph, autograd runs hooks in grad mode: gradients of gradients may follow,
    # and they read the parameters that this backward would free.
    keep_whole = torch.is_grad_enabled()
    for group in state.groups:
        if schedule.pre_backward(group, keep_whole=keep_whole, task=backward_running()):
            call_after_backward(schedule.end_backward)


def _post_backward(state: FSDPState, schedule: Schedule, _: object) -> None:
    for group in state.groups:
        schedule.post_backward(group)


def _watch_inputs(
    args: Args, kwargs: Kwargs, when_known: Callable[[object], None]
) -> tuple[Args, Kwargs]:
    """Inputs that need a gradient as aliases; `when_known` is called once all theirs are."""
    aliases: list[Tensor] = []
    others: list[Any] = []
    watched: Args = tuple([_aliased(value, aliases, others) for value in args])
    watched_kwargs = {name: _aliased(value, aliases, others) for name, value in kwargs.items()}
    # The module may write into lists, dictionaries and objects of its caller's, so they are
    # passed on as they are. Their gradients cannot be waited for: the end of backward will do.
    if others and any(tensor.requires_grad for tensor in tensors_of(others)):
        return args, kwargs
    if len(aliases) == 1:
        node = aliases[0].grad_fn
        assert node is not None
        node.register_prehook(when_known)
    elif aliases:
        register_multi_grad_hook(aliases, when_known)
    return watched, watched_kwargs


def _aliased(value: Any, aliases: list[Tensor], others: list[Any]) -> Any:
    """`value` with aliases of the tensors that need gradients.

    Args:
        value: of any kind.
        aliases: the aliases are added to it.
        others: what may hold tensors and was not looked into is added to it.
    """
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        aliases.append(value.view_as(value))
        return aliases[-1]
    if type(value) is tuple:
        return tuple([_aliased(item, aliases, others) for item in value])
    if not isinstance(value, _HOLDS_NO_TENSOR):
        others.append(value)
    return value


def _on_grad(tensor: Tensor, function: Callable[[Tensor], None]) -> Any:
    return tensor.register_hook(function)  # type: ignore[no-untyped-call]  # torch's own


def _owners(state: FSDPState) -> list[nn.Module]:
    """The modules that hold parameters of the groups, each once."""
    slots = (slot for group in state.groups for param in group.params for slot in param.slots)
    return list(dict.fromkeys(slot.module for slot in slots))


def _before_state_dict(state: FSDPState, *_: object) -> None:
    """State dicts hold the sharded parameters, also where whole ones are left in the slots."""
    show_shards(state, "state_dict")


def _before_load(
    state: FSDPState,
    module: nn.Module,
    values: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Values are loaded into the sharded parameters, and may be whole or sharded otherwise."""
    show_shards(state, "load_state_dict")
    assign = metadata.get("assign_to_params_buffers", False)
    localize(module, values, prefix, assign=assign, errors=errors)
