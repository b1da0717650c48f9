"""Every private name of torch that the engine uses, each with what happens without it.

Nothing else in this package may touch a private name of torch. `tests/distributed/
test_torch_internals.py` runs the engine with each of them missing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import repeat
from operator import attrgetter, is_
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

__all__ = [
    "Faces",
    "all_stand",
    "apply_grad_hooks",
    "asked_by_torchs_checkpoints",
    "backward_running",
    "call_after_backward",
    "call_post_accumulate_hooks",
    "chunk_cat",
    "compiled_from",
    "copy_grad_hooks",
    "dtensor_over",
    "exchange_collected",
    "function_of_policy",
    "hooked",
    "in_forward",
    "local_tensor",
    "module_parameters",
    "nbytes_here",
    "of_class",
    "on_backward_reaching",
    "outside_transforms",
    "put_parameters",
    "set_local_tensor",
    "stands_in",
    "storage_users",
    "store_of",
    "transforming",
    "versions_of",
]


def call_after_backward(function: Callable[[], None]) -> None:
    """Run `function` when the backward pass that is running now has finished.

    The one private name without a fallback: autograd has no public way to learn that a
    backward pass has ended. DDP relies on the same call.
    """
    Variable._execution_engine.queue_callback(function)


def backward_running() -> int:
    """A number for the backward pass that the calling thread is inside of; -1 for none.

    Without torch's answer: always 0, which is right for recomputation and costs the
    automatic recovery after an exception in backward.
    """
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return 0 if ask is None else int(ask())


def in_forward(modules: Sequence[nn.Module]) -> bool:
    """Whether some thread is inside a call of one of `modules`.

    A hook that has counted calls would go on counting those that Ctrl-C has ended, since torch
    runs no hook then. Without the frame of torch's method: never, and what asks is not refused.
    """
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is _CALL_IMPL and caller.f_locals.get("self") in modules:
                return True
            caller = caller.f_back
    return False


_CALL_IMPL = getattr(getattr(nn.Module, "_call_impl", None), "__code__", None)


def transforming() -> bool:
    """Whether a torch.func transform such as `jvp` or `grad` is running around the caller.

    Without torch's answer: no, and the engine does not work inside transforms.
    """
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """A block whose tensors are plain ones, also while torch.func transforms the caller.

    Inside a transform such as `torch.func.jvp` every result is wrapped, and buffers that are
    wrapped have no memory to communicate.
    """
    if not transforming():
        return _NOTHING
    from torch._functorch import pyfunctorch

    made: AbstractContextManager[object] = pyfunctorch.temporarily_clear_interpreter_stack()
    return made


def module_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary in which a module keeps its own parameters, to exchange them quickly."""
    return module._parameters


Faces = Sequence[tuple[nn.Module, Mapping[str, nn.Parameter | None]]]
"""Modules, and which parameters they have under which names."""


def put_parameters(faces: Faces) -> None:
    """Put the parameters into their modules."""
    for module, params in faces:
        module._parameters.update(params)


_local_tensor_of = attrgetter("_local_tensor")


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` holds on this rank; the same object on every call, if it can be."""
    local: Tensor | None = getattr(tensor, "_local_tensor", None)
    if local is None:
        assert isinstance(tensor, DTensor)
        return tensor.to_local().detach()
    return local


def nbytes_here(tensor: Tensor) -> int:
    """Bytes of what `tensor` holds on this rank, as if it were dense."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.dtype.itemsize


def set_local_tensor(tensor: DTensor, local: Tensor) -> bool:
    """Let `tensor` hold `local` from now on.

    Returns:
        False where that cannot be done: then the group copies its shards into place at
        every gather, which is right, but slower.
    """
    if getattr(tensor, "_local_tensor", None) is None:
        return False
    tensor._local_tensor = local
    return True


def dtensor_over(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor whose part on this rank is `local`, be it on the mesh's device or on the host.

    `DTensor.from_local` moves its argument to the mesh's device. The way around it needs
    `set_local_tensor`; there is no other.

    Raises:
        NotImplementedError: if `local` is elsewhere and torch keeps that private name no more.
    """

    def laid(over: Tensor) -> DTensor:
        return DTensor.from_local(
            over, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    if local.is_meta or local.device.type == mesh.device_type:
        return laid(local)
    without_memory = laid(torch.empty_like(local, device="meta"))
    made = cast(DTensor, torch.empty_like(without_memory, device=local.device))
    if not set_local_tensor(made, local):
        raise NotImplementedError(
            f"This torch ({torch.__version__}) lets no DTensor on {mesh} hold memory of "
            f"{local.device}. Leave offload_policy out, or use a torch that trine was tested with."
        )
    return made


_version_of = attrgetter("_version")


def versions_of(tensors: Sequence[Tensor]) -> int:
    """How often any of `tensors` was written to in place, as far as torch counts it; else 0."""
    try:
        return sum(map(_version_of, tensors))
    except AttributeError:
        return 0


def all_stand(faces: Faces, params: Sequence[nn.Parameter], locals_: Sequence[Tensor]) -> bool:
    """Whether all are where they were, each with the same memory; in one go, for the hot path.

    Args:
        faces: modules, names, and which DTensor parameters stood there.
        params: these DTensor parameters.
        locals_: the tensors that they held.

    Returns:
        False also if torch does not say, or if one is not; then ask for each.
    """
    for module, stood in faces:
        if not all(map(is_, map(module._parameters.get, stood), stood.values())):
            return False
    try:
        return all(map(is_, map(_local_tensor_of, params), locals_))
    except AttributeError:
        return False


def stands_in(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    """Whether `param` is what `module` has under `name` now."""
    return module._parameters.get(name) is param


def copy_grad_hooks(source: Tensor, target: Tensor) -> None:
    """Register on `target` what was registered with `register_hook` and its like on `source`.

    Without torch's dictionaries of hooks nothing is copied.
    """
    for hook in (getattr(source, "_backward_hooks", None) or {}).values():
        target.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        target.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def apply_grad_hooks(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient after the hooks that `param.register_hook` registered.

    Autograd calls hooks of leaves that it computes gradients for; sharded parameters are
    given theirs, so the engine calls them.
    """
    hooks = getattr(param, "_backward_hooks", None)
    for hook in list(hooks.values()) if hooks else ():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


_hooks_of = attrgetter("_backward_hooks")
_later_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def hooked(tensors: Sequence[Tensor]) -> bool:
    """Whether any of `tensors` has hooks that the two functions above and below would call."""
    try:
        return any(map(_hooks_of, tensors)) or any(map(_later_hooks_of, tensors))
    except AttributeError:
        return True


def call_post_accumulate_hooks(param: Tensor) -> None:
    """Call what `param.register_post_accumulate_grad_hook` registered."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    for hook in list(hooks.values()) if hooks else ():
        hook(param)


def on_backward_reaching(tensor: Tensor, function: Callable[[object], None]) -> None:
    """Call `function` when a backward pass reaches the operation that made `tensor`.

    Unlike a hook on the tensor this survives that the tensor is written to in place. If it
    is a view, such a write replaces the operation that made the view, but not the one that
    made what it views; so the latter is watched.
    """
    base = getattr(tensor, "_base", None)
    made_by = tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn
    if made_by is None:
        tensor.register_hook(function)  # type: ignore[no-untyped-call]  # torch's own
    else:
        made_by.register_prehook(function)


def exchange_collected(
    optimizer: Optimizer, exchange: Callable[[dict[str, Any], Sequence[list[Tensor]]], None]
) -> None:
    """Have `exchange` change the lists of tensors that one step of an Adam works with.

    It is called with a group of the optimizer and the lists: parameters, gradients, then state.
    Without torch's method that fills these lists nothing is exchanged.
    """
    if "_init_group" in vars(optimizer):
        return
    collect: Callable[..., Any] | None = getattr(type(optimizer), "_init_group", None)
    if collect is None:
        return
    owner = weakref.ref(optimizer)  # it must be gone as soon as its last user is

    def collected(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        found = collect(owner(), group, *lists)
        exchange(group, lists)
        return found

    vars(optimizer)["_init_group"] = collected


def storage_users(storages: Sequence[torch.UntypedStorage]) -> list[int] | None:
    """How many tensors and other owners share each storage; None if torch does not say."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else [count(storage._cdata) for storage in storages]


def store_of(group: dist.ProcessGroup) -> tuple[Any, timedelta] | None:
    """The key-value store that the ranks of a process group share, and how long it waits.

    Not private, but younger than the oldest torch that the engine supports, and not every
    backend has one. None without it: then ranks do not compare what they are about to do.
    """
    find = getattr(group, "get_group_store", None)
    try:
        store = None if find is None else find()
    except RuntimeError:  # the group was made without one
        return None
    if store is None:
        return None
    return store, getattr(store, "timeout", dist.default_pg_timeout)


_dtype_of = attrgetter("dtype")


def chunk_cat(tensors: Sequence[Tensor], chunks: int, out: Tensor) -> None:
    """Cut each tensor into `chunks` along dim 0, padded, and lay equal chunks side by side.

    Args:
        tensors: at least 1-D; cast to the dtype of `out` on the way.
        chunks: how many.
        out: shape (chunks, n), n the sum of the padded chunk sizes; overwritten, padding
            with anything.
    """
    together = getattr(torch, "_chunk_cat", None)
    dtype = out.dtype
    alike = all(map(is_, map(_dtype_of, tensors), repeat(dtype)))
    if together is not None and alike and all(map(Tensor.numel, tensors)):
        together(tensors, 0, chunks, out=out)
        return
    offset = 0
    for tensor in tensors:
        rows = -(-tensor.shape[0] // chunks)
        row_numel = tensor[0].numel() if tensor.shape[0] else 0
        numel = rows * row_numel
        into = out[:, offset : offset + numel]
        offset += numel
        if numel == 0:
            continue
        full = tensor.shape[0] // rows
        if full:
            into[:full].view(full, rows, row_numel).copy_(
                tensor[: full * rows].reshape(full, rows, row_numel)
            )
        rest = tensor.shape[0] - full * rows
        if rest:
            into[full, : rest * row_numel].copy_(tensor[full * rows :].reshape(-1))


def asked_by_torchs_checkpoints() -> bool:
    """Whether `torch.distributed.checkpoint.state_dict` has called for a state dict.

    It may have called through modules around the one that asks. It takes sharded values where it
    can get them, and knows only torch's own wrapper well enough to say so. Where the callers
    cannot be seen, the answer is no.
    """
    frame = getattr(sys, "_getframe", lambda: None)()
    own = (__name__, "torch.nn.modules.module")
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in own and not name.startswith("trine.distributed._wrapper"):
            return bool(name == "torch.distributed.checkpoint.state_dict")
        frame = frame.f_back
    return False


def compiled_from(module: nn.Module) -> nn.Module | None:
    """What `torch.compile` made a module from; None if it made none, or if torch says it no more.

    Then a policy that chooses the inner one wraps that, and the compiled one goes past it.
    """
    if not of_class(module, "OptimizedModule", "torch._dynamo."):
        return None
    return dict(module.named_children()).get("_orig_mod")


def function_of_policy(policy: object) -> Callable[[nn.Module], object] | None:
    """The function that a `CustomPolicy` of torch's own FSDP asks; None for anything else.

    Without torch's name for it: None, and such a policy is refused.
    """
    if not of_class(policy, "CustomPolicy", "torch.distributed."):
        return None
    return getattr(policy, "_lambda_fn", None)


def of_class(given: object, name: str, package: str) -> bool:
    """Whether an object is of a class of torch's that is not imported here, or of one made from it.

    Args:
        given: the object.
        name: of the class.
        package: that it comes from, with a dot behind it.
    """
    return any(
        cls.__name__ == name and cls.__module__.startswith(package) for cls in type(given).__mro__
    )
