"""record, record_function, record_iterable: time a block, a function, the passes of a loop.

Each is reported twice: to the thread's `TimeSummary`, and to the runtime of its device, as
`trace` does alone, which makes it a span of `trine.core.tracing`. With nobody listening
there, a span costs next to nothing, and no device is ever synchronized for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, Self, TypeVar, cast

from trine.core.profiler.time_summary import Report, get_time_summary
from trine.core.runtime import DeviceLike, runtime_registry

__all__ = ["record", "record_function", "record_iterable", "trace"]

P = ParamSpec("P")
T = TypeVar("T")


class _NotRecorded:
    """Stands in for a report where nothing is to be counted; one instance serves everyone."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def defer(self) -> None:
        return None

    def complete(self) -> None:
        return None


_NOT_RECORDED: Final = _NotRecorded()


class _Region:
    """A span with a report inside."""

    __slots__ = ("_report", "_span")

    def __init__(
        self, span: AbstractContextManager[object], report: AbstractContextManager[Report]
    ) -> None:
        self._span = span
        self._report = report

    def __enter__(self) -> Report:
        self._span.__enter__()
        try:
            return self._report.__enter__()
        except BaseException:
            self._span.__exit__(*sys.exc_info())
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._report.__exit__(exc_type, exc, traceback)
        finally:
            self._span.__exit__(exc_type, exc, traceback)


def trace(
    event_name: str | None, arg: object = None, device: DeviceLike = "cpu"
) -> AbstractContextManager[object]:
    """Report a `with` block to the runtime of a device, and count nothing.

    The runtime's class may reach the device's own tools; by default the block is a span of
    `trine.core.tracing`. With nobody listening it costs about three times what
    `tracing.span` costs, since the class is looked up each time; where the device is named
    by a string, that is less than a microsecond. In a hot loop, use `tracing.span`.

    Args:
        event_name: what happens in the block; None leaves the name to the runtime.
        arg: handed on; reaches sinks as `args["arg"]`, unless it is None.
        device: whose runtime class is asked, through `BaseRuntime.trace`.

    Example:
        >>> from trine.core import trace
        >>> with trace("tokenize", arg={"lines": 3}):
        ...     pass
    """
    return runtime_registry.get_runtime_class_for_device_spec(device).trace(event_name, arg)


def record(
    tag: str | None,
    metric: str | None = None,
    use_cuda: bool = False,
    enable: bool = True,
    device: DeviceLike = "cpu",
    trace: bool = False,
) -> AbstractContextManager[Report]:
    """Time a `with` block, however it ends.

    The block enters as an object with `defer()` and `complete()`: after the first, the time
    is taken when the second is called rather than at the end of the block.

    Args:
        tag: the name of the span; None makes one of the place of the call, as
            `module:line:function`.
        metric: the name under which the time is counted; None means `tag`. A span whose
            metric differs carries it as `arg`.
        use_cuda: count the time on the current CUDA stream too, as `metric.cuda`.
        enable: whether to count the time in `get_time_summary()`.
        device: whose runtime is told of the span, through `BaseRuntime.trace`.
        trace: report the span even where `enable` is False. With both False nothing happens.

    Raises:
        ValueError: if `use_cuda` is set and this machine has no CUDA device.

    Example:
        >>> from trine.core.profiler import get_time_summary, record
        >>> with record("load"):
        ...     pass
        >>> with get_time_summary().summary(clear=True) as (summary, extremes):
        ...     sorted(summary.make_statistics()), sorted(extremes)
        (['load', 'load.std'], ['load.max', 'load.min'])
    """
    _check_trace(trace)
    if not enable and not trace:
        return _NOT_RECORDED
    return _region(_place() if tag is None else tag, metric, use_cuda, enable, device)


def record_function(
    tag: str | None,
    use_cuda: bool = False,
    enable: bool = True,
    device: DeviceLike = "cpu",
    trace: bool = False,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that each call is timed; see `record` for the arguments.

    A coroutine function is timed from its first step to its result.

    Args:
        tag: None means the function's name.
        use_cuda: see `record`.
        enable: see `record`.
        device: see `record`.
        trace: see `record`.

    Raises:
        TypeError: for a generator function, whose body runs after the call has returned.
    """
    _check_trace(trace)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        name = tag or getattr(function, "__name__", type(function).__name__)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{name} is a generator function: its body runs while it is iterated, not while "
                "it is called. Time the loop over it with record_iterable instead."
            )

        def region() -> AbstractContextManager[object]:
            return record(name, None, use_cuda, enable, device, trace)

        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def timed_coroutine(*args: P.args, **kwargs: P.kwargs) -> object:
                with region():
                    return await cast("Awaitable[object]", function(*args, **kwargs))

            return cast("Callable[P, T]", timed_coroutine)

        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            with region():
                return function(*args, **kwargs)

        return timed

    return decorate


def record_iterable(
    tag: str | None,
    iter: Iterable[T],
    divide_metric: bool = False,
    use_cuda: bool = False,
    enable: bool = True,
    device: DeviceLike = "cpu",
    trace: bool = False,
) -> Iterator[T]:
    """Time each pass of a loop: what the loop does with an element, not how it got it.

    Args:
        tag: pass `i` is the span `tag-i`; None makes a name of the place of the call.
        iter: what to loop over.
        divide_metric: count each pass under a name of its own, `tag-i`, not under `tag`.
        use_cuda: see `record`.
        enable: see `record`.
        device: see `record`.
        trace: see `record`.

    Returns:
        The elements of `iter`, once.
    """
    _check_trace(trace)
    name = _place() if tag is None else tag

    def timed() -> Iterator[T]:
        for index, element in enumerate(iter):
            metric = None if divide_metric else name
            with record(f"{name}-{index}", metric, use_cuda, enable, device, trace):
                yield element

    return timed()


def _region(
    tag: str, metric: str | None, use_cuda: bool, enable: bool, device: DeviceLike
) -> _Region:
    counted_as = tag if metric is None else metric
    report = get_time_summary().report(counted_as, use_cuda) if enable else _NOT_RECORDED
    return _Region(trace(tag, None if counted_as == tag else counted_as, device), report)


def _place() -> str:
    """Where the caller of our caller is, as `module:line:function`."""
    frame = sys._getframe(2)
    code = frame.f_code
    return f"{Path(code.co_filename).stem}:{frame.f_lineno}:{code.co_name}"


def _check_trace(trace: object) -> None:
    if not isinstance(trace, bool):
        raise TypeError(
            f"trace is True or False, got {type(trace).__name__}. To collect spans, install a "
            "sink with trine.core.tracing.add_sink."
        )
