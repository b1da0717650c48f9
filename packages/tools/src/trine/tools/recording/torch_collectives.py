"""Events for the collectives that a program calls through `torch.distributed`.

Its public functions are wrapped, which is how most programs, torch's FSDP and torch's
DTensor-free libraries call them. What torch calls in C++, as DistributedDataParallel does
for its buckets, does not pass here. What trine.distributed calls is left to it: it reports
more than can be seen from here.

The time of a collective ends when somebody has waited for it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from trine.core import tracing
from trine.core.tracing import Kind, TraceEvent

if TYPE_CHECKING:
    from trine.tools.recording.injected import Session

__all__ = ["install"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Kind:
    """A collective.

    Attributes:
        operation: what it is called in a trace.
        given: names of the argument that holds what this rank gives; they differ by version.
        sent: of so many bytes how many are sent, in a world of so many ranks.
    """

    operation: str
    given: tuple[str, ...] = ()
    sent: Callable[[int, int], int] = lambda nbytes, size: nbytes


def _to_all(nbytes: int, size: int) -> int:
    return nbytes * (size - 1)


def _all_but_own(nbytes: int, size: int) -> int:
    return nbytes * (size - 1) // size


def _there_and_back(nbytes: int, size: int) -> int:
    return 2 * nbytes * (size - 1) // size


_KINDS: Final = {
    "all_reduce": _Kind("all_reduce", ("tensor",), _there_and_back),
    "all_gather": _Kind("all_gather", ("tensor",), _to_all),
    "all_gather_into_tensor": _Kind("all_gather", ("input_tensor", "input"), _to_all),
    "all_gather_single": _Kind("all_gather", ("input_tensor", "input"), _to_all),
    "reduce_scatter": _Kind("reduce_scatter", ("input_list",), _all_but_own),
    "reduce_scatter_tensor": _Kind("reduce_scatter", ("input",), _all_but_own),
    "reduce_scatter_single": _Kind("reduce_scatter", ("input",), _all_but_own),
    "all_to_all": _Kind("all_to_all", ("input_tensor_list",), _all_but_own),
    "all_to_all_single": _Kind("all_to_all", ("input",), _all_but_own),
    "broadcast": _Kind("broadcast", ("tensor",)),
    "reduce": _Kind("reduce", ("tensor",)),
    "gather": _Kind("gather", ("tensor",)),
    "scatter": _Kind("scatter", ("scatter_list",), _all_but_own),
    "all_gather_object": _Kind("all_gather_object"),
    "gather_object": _Kind("gather_object"),
    "broadcast_object_list": _Kind("broadcast_object_list"),
    "scatter_object_list": _Kind("scatter_object_list"),
    "barrier": _Kind("barrier"),
}


@dataclass(frozen=True)
class _Call:
    """One collective that was started."""

    operation: str
    nbytes: int
    args: dict[str, object]
    start_ns: int


class _Collectives:
    """What has been called so far."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sequences: dict[str, int] = {}
        self._told: dict[str, int] = {}  # in which step a group's ranks were last listed
        self.pending: WeakKeyDictionary[object, _Call] = WeakKeyDictionary()
        self.inside = threading.local()

    def begin(
        self, kind: _Kind, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        """Report that a collective starts; None where there is nothing to report."""
        given = dict(zip(names, args, strict=False)) | kwargs
        group = given.get("group") or dist.group.WORLD
        running = self._session.running()
        if running is None or group is None or (size := dist.get_world_size(group)) < 1:
            return None
        name = str(group.group_name)
        # Counted in steps that are not recorded too: ranks are matched by it.
        sequence = self._sequences[name] = self._sequences.get(name, 0) + 1
        if not running.recording:
            return None
        tensors = list(_tensors(next((given[at] for at in kind.given if at in given), None)))
        about: dict[str, object] = {"group": name, "seq": sequence, "op": kind.operation}
        if tensors:
            about["dtype"] = str(tensors[0].dtype).removeprefix("torch.")
        elements = sum(tensor.numel() for tensor in tensors)
        begin: dict[str, object] = {**about, "elements": elements}
        step = tracing.current_step()
        # As the engine does: once for each step is enough, wherever a recording begins.
        if step < 0 or self._told.get(name) != step:
            self._told[name] = step
            begin["ranks"] = dist.get_process_group_ranks(group)
        now = perf_counter_ns()
        running.report(_event("instant", f"start {kind.operation}", 0, begin, now, now))
        nbytes = kind.sent(sum(tensor.nbytes for tensor in tensors), size)
        about["backend"] = dist.get_backend(group)
        return _Call(kind.operation, nbytes, about, now)

    def end(self, call: _Call, waited_ns: int, *, through: bool = True) -> None:
        """Report that a collective was waited for since `waited_ns`, and is through or failed."""
        running = self._session.running()
        if running is None:
            return
        now = perf_counter_ns()
        about = call.args
        running.report(_event("span", f"wait {call.operation}", 0, about, waited_ns, now))
        if not through:
            return
        more = {**about, "exposed_ns": now - waited_ns}
        running.report(_event("async", call.operation, call.nbytes, more, call.start_ns, now))


def install(session: Session) -> None:
    """Wrap the functions, and the waiting for what they return."""
    if not dist.is_available():
        return
    collectives = _Collectives(session)
    for name, kind in _KINDS.items():
        function = getattr(dist, name, None)
        if function is not None:
            _put_in_place(name, function, _wrap(session, collectives, kind, function))
    made = dist.init_process_group
    rank_is_known = session.guarded(session.rank_is_known)

    @functools.wraps(made)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        made(*args, **kwargs)
        rank_is_known()

    _put_in_place("init_process_group", made, init_process_group)
    _wrap_wait(session, collectives)


def _wrap(session: Session, collectives: _Collectives, kind: _Kind, function: Function) -> Function:
    names = tuple(inspect.signature(function).parameters)
    inside = collectives.inside
    end = session.guarded(collectives.end)

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "one", False) or not dist.is_initialized() or _is_ours():
            return function(*args, **kwargs)
        call: _Call | None = None
        try:
            call = collectives.begin(kind, names, args, kwargs)
        except Exception as error:
            session.fail(error)
        inside.one = True  # those that torch calls to do this one are parts of it
        try:
            result = function(*args, **kwargs)
        except BaseException:
            if call is not None:
                end(call, call.start_ns, through=False)
            raise
        finally:
            inside.one = False
        if call is not None:
            if isinstance(result, dist.Work):
                collectives.pending[result] = call
            else:
                end(call, call.start_ns)
        return result

    return traced


def _wrap_wait(session: Session, collectives: _Collectives) -> None:
    wait = dist.Work.wait
    end = session.guarded(collectives.end)

    @functools.wraps(wait)
    def traced(work: Any, *args: Any, **kwargs: Any) -> Any:
        call = collectives.pending.pop(work, None)
        if call is None:
            return wait(work, *args, **kwargs)
        waited_ns = perf_counter_ns()
        try:
            result = wait(work, *args, **kwargs)
        except BaseException:
            end(call, waited_ns, through=False)
            raise
        end(call, waited_ns)
        return result

    dist.Work.wait = traced  # type: ignore[method-assign, assignment]  # torch has no hook for it


def _put_in_place(name: str, old: Function, new: Function) -> None:
    for module in (dist, dist.distributed_c10d):
        if getattr(module, name, None) is old:
            setattr(module, name, new)


def _is_ours() -> bool:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return caller.startswith("trine.distributed.") and not caller.startswith(
        "trine.distributed.demo"
    )


def _tensors(given: object) -> Iterable[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for item in given:
            yield from _tensors(item)


def _event(
    kind: Kind, name: str, nbytes: int, args: dict[str, object], start_ns: int, end_ns: int
) -> TraceEvent:
    return TraceEvent(kind, name, "comm", "", nbytes, args, start_ns, end_ns)
