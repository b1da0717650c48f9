"""The tracing seam: who has something to tell meets who listens, here and only here.

Producers (the engine, data loading, user code) call `span`, `instant`, `counter`
and `record_span`. Consumers implement `TraceSink` and register with `add_sink`.
Neither imports the other. While torch's own profiler runs, spans appear in it
too, with no sink installed.

The cost of a call site with nobody listening is the point of this module: a
shared do-nothing context for `span`, one attribute read for a site guarded by
`if tracing.enabled`. This module must never synchronise a device, never raise
into the training loop because of a sink, and never use `@contextmanager`.

Producers agree on names, so that tools understand each other's reports:

* A training step is a span `step` of category `step`; within it `forward`, `backward` and
  `optimizer` are of category `compute`, `load batch`, `move batch` (to the device) and
  `checkpoint_*` of category `io`.
* A loader that prepares batches ahead says within `load batch` how long it waited for the
  wrapped loader (`fetch batch`) and for its own thread (`wait for batch`); that thread
  reports `prepare batch`.
* Callbacks of runtimes are spans of category `user` with the callback's name, extensions of
  a trainer with the extension's, and `validation` is all of a validation.
* A collective is three events of category `comm`: an instant `start <op>` when it is asked
  for, a span `wait <op>` while the thread waits for it, and, once it is through, an
  asynchronous `<op>`, which has `nbytes`. Their attributes: `op`, `group` (its name, the same
  on all its ranks), `seq` (which of the group's collectives, counted from 1), `dtype` and
  `backend`; of the first also `elements` and, once for each step, `ranks` (of the group); of
  the last `enqueue_ns` (when it was asked for; `start_ns` may be later) and `exposed_ns` (for
  how long the thread stood still). Where there is no other rank, only the last two of the
  events are there, without `group` and `seq`.
* Memory is a counter `memory.<kind>` of category `mem`, the bytes that the unit has now.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import Final, Literal, Protocol, runtime_checkable

import torch
from torch.autograd import profiler as _torch_profiler

__all__ = [
    "Attributes",
    "Kind",
    "SpanSink",
    "TraceEvent",
    "TraceSink",
    "add_sink",
    "add_step_listener",
    "counter",
    "current_step",
    "enabled",
    "instant",
    "record_span",
    "remove_sink",
    "remove_step_listener",
    "set_step",
    "sinks",
    "span",
]

Attributes = Mapping[str, object]
Kind = Literal["span", "async", "instant", "counter"]

_log = logging.getLogger(__name__)

enabled: bool = False
"""True while at least one sink is installed.

Read it as `tracing.enabled` (never `from ... import enabled`, which copies the
value) to guard a site whose arguments are costly to build, or one in a loop.
"""

_sinks: tuple[TraceSink, ...] = ()
_span_sinks: tuple[SpanSink, ...] = ()  # those of them that are told when a span begins
_sinks_lock = threading.Lock()
_step: int = -1
_step_listeners: tuple[Callable[[int], object], ...] = ()


class TraceEvent:
    """One thing that happened, as a sink receives it.

    Attributes:
        kind: `"span"` for work on the thread that reports it, `"async"` for work
            that ran beside that thread, `"instant"` and `"counter"` for points.
        name: what happened, for example `"all_gather"`.
        category: `"step"`, `"compute"`, `"comm"`, `"mem"`, `"io"` or `"user"`.
        unit: full name of the sharded module the event belongs to, or `""`.
        nbytes: bytes this rank sent for it, 0 where that has no meaning.
        args: further attributes, or None. Not to be changed after reporting.
        step: the step number last given to `set_step`, -1 before the first.
        thread: identifier of the reporting thread.
        start_ns: `time.perf_counter_ns()` at the start.
        end_ns: the same clock at the end; equal to `start_ns` for points.
        value: the value of a counter, 0.0 otherwise.
    """

    __slots__ = (
        "args",
        "category",
        "end_ns",
        "kind",
        "name",
        "nbytes",
        "start_ns",
        "step",
        "thread",
        "unit",
        "value",
    )

    def __init__(
        self,
        kind: Kind,
        name: str,
        category: str,
        unit: str,
        nbytes: int,
        args: Attributes | None,
        start_ns: int,
        end_ns: int,
        value: float = 0.0,
    ) -> None:
        self.kind = kind
        self.name = name
        self.category = category
        self.unit = unit
        self.nbytes = nbytes
        self.args = args
        self.step = _step
        self.thread = get_ident()
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.value = value

    def __repr__(self) -> str:
        where = f" {self.unit}" if self.unit else ""
        return f"<{self.kind} {self.name}{where} {self.end_ns - self.start_ns} ns>"


@runtime_checkable
class TraceSink(Protocol):
    """Where events go. Called on the thread that reports, so it must be quick."""

    def record(self, event: TraceEvent) -> None:
        """Take one finished event. A sink that raises is removed and logged once."""


@runtime_checkable
class SpanSink(TraceSink, Protocol):
    """A sink that is told of spans when they begin as well, such as one for another profiler."""

    def begin_span(self, event: TraceEvent) -> None:
        """Take a span that begins, whose times are not known yet.

        `record` is called with the same object when it ends, on the same thread. A span that
        had begun before the sink was added is only recorded, one that ends after its removal
        has only begun.
        """


def add_sink(sink: TraceSink) -> None:
    """Send every event from now on to `sink` too.

    Raises:
        TypeError: if `sink` has no `record` method.
        ValueError: if it is installed already.
    """
    if not isinstance(sink, TraceSink):
        raise TypeError(
            f"{type(sink).__name__} is not a trace sink: it needs a method record(event). "
            "See trine.core.tracing.TraceSink."
        )
    with _sinks_lock:
        if any(other is sink for other in _sinks):
            raise ValueError(
                f"{sink!r} is installed already; every event would reach it twice. "
                "Call remove_sink first."
            )
        _install((*_sinks, sink))


def remove_sink(sink: TraceSink) -> None:
    """Stop sending events to `sink`; one that is not installed is ignored."""
    with _sinks_lock:
        _install(tuple(other for other in _sinks if other is not sink))


def _install(chosen: tuple[TraceSink, ...]) -> None:
    global _sinks, _span_sinks, enabled
    _sinks = chosen
    _span_sinks = tuple(sink for sink in chosen if isinstance(sink, SpanSink))
    enabled = bool(chosen)


def sinks() -> tuple[TraceSink, ...]:
    """The sinks installed now, in the order they were added."""
    return _sinks


def set_step(step: int) -> None:
    """Number the training step that the following events belong to."""
    global _step
    _step = step
    for listener in _step_listeners:
        try:
            listener(step)
        except Exception:  # training goes on
            remove_step_listener(listener)
            _log.exception("step listener %r raised and was removed", listener)


def add_step_listener(listener: Callable[[int], object]) -> None:
    """Call `listener` with the number of each step that `set_step` begins from now on.

    That is how a recorder that is to see some steps only need not see any event of others.
    One that raises is removed and logged once.
    """
    global _step_listeners
    with _sinks_lock:
        _step_listeners = (*_step_listeners, listener)


def remove_step_listener(listener: Callable[[int], object]) -> None:
    """Stop calling `listener`; one that was not added is ignored."""
    global _step_listeners
    with _sinks_lock:
        _step_listeners = tuple(other for other in _step_listeners if other != listener)


def current_step() -> int:
    """The number last given to `set_step`, -1 before the first."""
    return _step


def _deliver(event: TraceEvent) -> None:
    for sink in _sinks:
        try:
            sink.record(event)
        except Exception:
            _drop(sink)


def _drop(sink: TraceSink) -> None:
    """Training never fails because of a profiler: remove the sink that raised, say it once."""
    with _sinks_lock:
        left = tuple(other for other in _sinks if other is not sink)
        # Two threads may fail in the same sink at once; only the first one has news.
        is_news = len(left) < len(_sinks)
        _install(left)
    if is_news:
        _log.exception("trace sink %s raised and was removed", type(sink).__name__)


class _NullContext:
    """What `span` returns while nobody listens; one instance serves everyone."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


_NULL: Final = _NullContext()


class _Span(TraceEvent):
    """An event that is its own context manager: one allocation for both."""

    __slots__ = ()

    # Written out rather than calling the parent: this is the hot path.
    def __init__(
        self, name: str, category: str, unit: str, nbytes: int, args: Attributes | None
    ) -> None:
        self.kind = "span"
        self.name = name
        self.category = category
        self.unit = unit
        self.nbytes = nbytes
        self.args = args
        self.step = _step
        self.thread = get_ident()
        self.value = 0.0

    def __enter__(self) -> None:
        self.start_ns = perf_counter_ns()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end_ns = perf_counter_ns()
        for sink in _sinks:  # _deliver written out, to save a call
            try:
                sink.record(self)
            except Exception:
                _drop(sink)


class _ToldSpan(_Span):
    """A span of which some sink wants to know when it begins."""

    __slots__ = ()

    def __enter__(self) -> None:
        for sink in _span_sinks:
            try:
                sink.begin_span(self)
            except Exception:
                _drop(sink)
        super().__enter__()


class _ProfiledSpan(_ToldSpan):
    """A span that torch's profiler sees as well."""

    __slots__ = ("_torch_range",)

    def __enter__(self) -> None:
        self._torch_range = _torch_range(self.name, self.unit)
        self._torch_range.__enter__()
        super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._torch_range.__exit__(exc_type, exc, traceback)


# Two private names of torch, both optional. The flag costs 3 ns to read; without it
# spans do not reach torch's profiler. The fast range costs a tenth of record_function,
# which stands in where it is missing.
if not hasattr(_torch_profiler, "_is_profiler_enabled"):  # pragma: no cover
    _torch_profiler._is_profiler_enabled = False
_FastRange = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)


def _torch_range(name: str, unit: str) -> AbstractContextManager[object]:
    label = f"trine::{name} {unit}" if unit else f"trine::{name}"
    if _FastRange is None:  # pragma: no cover
        return _torch_profiler.record_function(label)
    made: AbstractContextManager[object] = _FastRange(label)
    return made


def span(
    name: str,
    category: str = "user",
    unit: str = "",
    nbytes: int = 0,
    args: Attributes | None = None,
) -> AbstractContextManager[object]:
    """Time a `with` block and report it when the block ends, however it ends.

    With nobody listening this returns one shared object that does nothing.

    Args:
        name: what happens in the block.
        category: see `TraceEvent`.
        unit: full name of the sharded module it belongs to.
        nbytes: bytes moved by it.
        args: further attributes; keep the mapping unchanged afterwards.

    Example:
        >>> from trine.core.tracing import span
        >>> with span("load batch", category="io"):
        ...     pass
    """
    if _torch_profiler._is_profiler_enabled:
        if _sinks:
            return _ProfiledSpan(name, category, unit, nbytes, args)
        return _torch_range(name, unit)
    if _sinks:
        made = _ToldSpan if _span_sinks else _Span
        return made(name, category, unit, nbytes, args)
    return _NULL


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    category: str = "user",
    unit: str = "",
    nbytes: int = 0,
    args: Attributes | None = None,
) -> None:
    """Report work that ran beside this thread, once its start and end are known.

    Args:
        name: what ran.
        start_ns: `time.perf_counter_ns()` when it was started.
        end_ns: the same clock when it was complete.
        category: see `TraceEvent`.
        unit: full name of the sharded module it belongs to.
        nbytes: bytes this rank sent.
        args: further attributes.
    """
    if _sinks:
        _deliver(TraceEvent("async", name, category, unit, nbytes, args, start_ns, end_ns))


def instant(
    name: str, category: str = "user", unit: str = "", args: Attributes | None = None
) -> None:
    """Report that something happened now."""
    if _sinks:
        now = perf_counter_ns()
        _deliver(TraceEvent("instant", name, category, unit, 0, args, now, now))


def counter(name: str, value: float, category: str = "user", unit: str = "") -> None:
    """Report the value that a quantity has now; a timeline draws it as a curve."""
    if _sinks:
        now = perf_counter_ns()
        _deliver(TraceEvent("counter", name, category, unit, 0, None, now, now, float(value)))
