"""Spans for what any PyTorch program does, from loading to the optimizer; and where steps end.

By public hooks of torch. The end of a step is that of the optimizer which stepped first;
where a program numbers its steps itself, by `set_step`, that counts instead.
"""

from __future__ import annotations

import functools
import threading
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.utils.data
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from trine.core.tracing import TraceEvent

if TYPE_CHECKING:
    from trine.tools.recording.injected import Session

__all__ = ["OwnSpans", "install"]

_STEPS_TO_KNOW: Final = 2


class OwnSpans:
    """Spans of computation that we add, unless the program reports its own.

    Whether it does is seen at the end of its spans, which lie around ours. So those of the
    first steps are held back.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: list[TraceEvent] | None = []
        self._left = _STEPS_TO_KNOW
        self._wanted = True

    def add(
        self,
        name: str,
        start_ns: int,
        args: dict[str, object] | None = None,
        category: str = "compute",
    ) -> None:
        """Report a span that ends now."""
        running = self._session.running()
        if running is None or not self._wanted or not running.recording:
            return
        event = TraceEvent("span", name, category, "", 0, args, start_ns, perf_counter_ns())
        if self._held is None:
            running.report(event)
        else:
            self._held.append(event)

    def leave_to_program(self) -> None:
        """The program reports its computation itself."""
        self._wanted = False
        self._held = None

    def end_of_step(self) -> None:
        """A step has ended."""
        if self._left:
            self.flush()
            self._left -= 1
            if not self._left:
                self._held = None
                self._session.watch_no_more()

    def flush(self) -> None:
        """Report what was held back."""
        running = self._session.running()
        if self._held and running is not None:
            for event in self._held:
                running.report(event)
            self._held.clear()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.inside = False  # of a module's forward
        self.steps: list[tuple[Optimizer, int]] = []


def install(session: Session) -> None:
    """Register the hooks."""
    state = _PerThread()
    first: list[Optimizer] = []

    @session.guarded
    def pre_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        # One that is there already raised in its last step, which no hook tells.
        known = [at for at, (other, _) in enumerate(state.steps) if other is optimizer]
        del state.steps[known[0] if known else len(state.steps) :]
        state.steps.append((optimizer, perf_counter_ns()))

    @session.guarded
    def post_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        known = [at for at, (other, _) in enumerate(state.steps) if other is optimizer]
        if not known:
            return
        start_ns = state.steps[known[0]][1]
        del state.steps[known[0] :]
        if state.steps:
            return  # within the step of an optimizer that wraps this one
        running = session.running()
        session.compute.add("optimizer", start_ns, {"optimizer": type(optimizer).__name__})
        if not first:
            first.append(optimizer)
        if optimizer is first[0] and running is not None:
            session.compute.end_of_step()
            running.step()

    register_optimizer_step_pre_hook(pre_step)
    register_optimizer_step_post_hook(post_step)
    _wrap_forward(session, state)
    _wrap_backward(session)
    _wrap_loading(session)


def _wrap_forward(session: Session, state: _PerThread) -> None:
    # Hooks for all modules make each call of a module ten times as slow and have torch.compile
    # warn; hooks on one module are saved with it. This costs a call of a function.
    call = nn.Module.__call__
    add = session.guarded(session.compute.add)
    begin = session.guarded(session.begin)

    @functools.wraps(call)
    def traced(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if state.inside or torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        begin()  # the first step begins here, and not after it
        state.inside = True
        start_ns = perf_counter_ns()
        try:
            return call(module, *args, **kwargs)
        finally:
            state.inside = False
            add("forward", start_ns, {"module": type(module).__name__})

    nn.Module.__call__ = traced  # type: ignore[method-assign]  # see above


def _wrap_backward(session: Session) -> None:
    backward = torch.autograd.backward
    add = session.guarded(session.compute.add)

    @functools.wraps(backward)
    def traced(*args: Any, **kwargs: Any) -> None:
        start_ns = perf_counter_ns()
        backward(*args, **kwargs)
        add("backward", start_ns)

    torch.autograd.backward = traced


def _wrap_loading(session: Session) -> None:
    # Not public, and only a span is missing where it is called otherwise.
    loading = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)
    next_batch = getattr(loading, "__next__", None)
    if loading is None or next_batch is None:
        return
    add = session.guarded(session.compute.add)
    begin = session.guarded(session.begin)

    @functools.wraps(next_batch)
    def traced(iterator: Any) -> Any:
        begin()
        start_ns = perf_counter_ns()
        batch = next_batch(iterator)
        add("load batch", start_ns, category="io")
        return batch

    loading.__next__ = traced
