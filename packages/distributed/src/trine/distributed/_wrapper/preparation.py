"""What happens to a module before it is sharded: memory, values, and the same on all ranks.

Whatever is done here is done to the modules of one unit: those below the wrapped one that no
wrapper below it has, and that the user does not want ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trine.core import Device
from trine.distributed._fsdp.module import FSDPModule
from trine.distributed._fsdp.state import plain_name, state_of
from trine.distributed.mesh import MeshAxes

__all__ = [
    "buffers_to",
    "check_wrappable",
    "give_memory",
    "ignored_by",
    "modules_of_unit",
    "same_on_all_ranks",
]


def check_wrappable(module: nn.Module) -> None:
    """Refuse what a wrapper around it could not serve.

    Raises:
        ValueError: if the module is sharded by `fully_shard`, or has no forward.
    """
    name = _kind(module)
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"fully_shard was called on this {name.removeprefix('FSDP')} before: its parameters "
            "are sharded already. Use fully_shard or FullyShardedDataParallel for one module."
        )
    # Asked of the object: a compiled module has its forward there.
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            f"{name} has no forward of its own, so a wrapper around it would never gather its "
            "parameters. Wrap the modules inside it instead, or the one that holds it."
        )


def ignored_by(
    ignored_modules: object, ignored_states: object
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules and parameters that two arguments of the constructor exclude.

    Args:
        ignored_modules: modules, with all that is below them.
        ignored_states: modules or parameters; not both arguments.

    Raises:
        TypeError: for anything else.
        ValueError: if both are given, or a module is sharded already.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("Give ignored_modules or ignored_states, not both: they mean the same.")
    name = "ignored_modules" if ignored_states is None else "ignored_states"
    given = ignored_modules if ignored_states is None else ignored_states
    if given is None:
        return set(), set()
    if isinstance(given, nn.Module | Tensor | str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be an iterable, such as [model.head], got {_kind(given)}.")
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for each in given:
        if isinstance(each, nn.Module):
            if state_of(each) is not None:
                raise ValueError(
                    f"{name} holds a {_kind(each)} that is sharded already. Ignore the module "
                    "before it is wrapped, or leave it out: wrapped modules look after themselves."
                )
            modules |= set(_below(each))
            params |= {param for module in _below(each) for param in module.parameters(False)}
        elif isinstance(each, nn.Parameter) and name == "ignored_states":
            params.add(each)
        else:
            wanted = "modules" if name == "ignored_modules" else "modules or parameters"
            raise TypeError(f"{name} must hold {wanted}, got {_kind(each)}.")
    return modules, params


def modules_of_unit(module: nn.Module, ignored: Collection[nn.Module]) -> dict[str, nn.Module]:
    """The modules that one unit looks after, by their names below `module`."""
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set(ignored)

    def walk(node: nn.Module, name: str) -> None:
        if node in seen or state_of(node) is not None:
            return
        seen.add(node)
        found[name] = node
        for child_name, child in node.named_children():
            walk(child, plain_name(f"{name}.{child_name}" if name else child_name))

    walk(module, "")
    return found


def give_memory(
    modules: dict[str, nn.Module],
    param_init_fn: Callable[[nn.Module], object] | None,
    device: Device,
) -> None:
    """Give parameters and buffers on the meta device memory and values.

    Args:
        modules: of the unit, by name.
        param_init_fn: called with each module that has such; None for its `reset_parameters`
            after `to_empty`.
        device: where.

    Raises:
        TypeError: if `param_init_fn` cannot be called.
        ValueError: if a module has neither, or is on the meta device still.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(f"param_init_fn must be a function or None, got {_kind(param_init_fn)}.")
    on_meta = {name: module for name, module in modules.items() if _meta_names(module)}
    shared = _shared_slots(on_meta.values())
    for name, module in on_meta.items():
        if param_init_fn is not None:
            param_init_fn(module)
        else:
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise ValueError(
                    f"{name or '(root)'} ({_kind(module)}) is on the meta device and has no "
                    f"reset_parameters, so nothing can give values to {_meta_names(module)}. Pass "
                    "param_init_fn=lambda module: ..., which gives a module memory and values."
                )
            module.to_empty(device=device.torch_device, recurse=False)
            reset()
        left = _meta_names(module)
        if left:
            raise ValueError(
                f"{left} of {name or '(root)'} ({_kind(module)}) are on the meta device after "
                f"param_init_fn. Let it call module.to_empty(device='{device.torch_device}', "
                "recurse=False) and then set values."
            )
    for slots in shared:
        (first, name), *others = slots
        for module, other in others:
            setattr(module, other, getattr(first, name))


def _meta_names(module: nn.Module) -> list[str]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, tensor in own if tensor.is_meta]


def _shared_slots(modules: Iterable[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Where parameters on the meta device stand that stand in several places."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.is_meta:
                slots.setdefault(id(param), []).append((module, name))
    return [places for places in slots.values() if len(places) > 1]


def buffers_to(modules: Iterable[nn.Module], device: Device) -> None:
    """Move buffers to where the unit computes. Parameters follow when they are gathered."""
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = device.tensor_to_device(buffer)


@torch.no_grad()
def same_on_all_ranks(
    modules: Iterable[nn.Module],
    ignored: Collection[nn.Parameter],
    axes: MeshAxes,
    device: Device,
) -> None:
    """Give every rank the parameters and buffers of the first rank of its mesh.

    Args:
        modules: of the unit, in the same order on every rank.
        ignored: parameters to leave as they are.
        axes: the ranks.
        device: that the backend reaches.
    """
    skipped = set(map(id, ignored))
    # First among the ranks that hold copies, then within each copy: all get the first rank's.
    for group in (axes.replicate_group, axes.shard_group):
        if group is None or group.size() == 1:
            continue
        source = dist.get_process_group_ranks(group)[0]
        under_way = []
        for tensor in _tensors(modules, skipped):
            sent = device.tensor_to_device(tensor).contiguous()
            work = dist.broadcast(sent, source, group=group, async_op=True)
            under_way.append((tensor, sent, work))
        for tensor, sent, work in under_way:
            if work is not None:
                work.wait()
            if sent is not tensor:
                tensor.copy_(sent)


def _tensors(modules: Iterable[nn.Module], skipped: set[int]) -> Iterator[Tensor]:
    seen = set(skipped)
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            held = tensor.detach()
            yield held.to_local() if isinstance(held, DTensor) else held


def _below(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those below it, without those that are sharded already."""
    yield module
    for child in module.children():
        if state_of(child) is None:
            yield from _below(child)


def _kind(given: object) -> str:
    return type(given).__name__
