"""One thread that does what it is given, and that no one has to wait for without end.

The executors of the standard library hold the interpreter's exit up until the running call
has returned, however long that takes. This thread gets `PATIENCE_S`, and is left alone then.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["PATIENCE_S", "WorkerThread"]

PATIENCE_S = 5.0
"""How long the end of a thread, or of the interpreter, waits for a call that is running."""

_Queue = SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]


class WorkerThread:
    """Calls, one after the other, in a thread that starts with the first of them.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._queue: _Queue = SimpleQueue()
        self._thread: threading.Thread | None = None
        _workers.add(self)

    def is_here(self) -> bool:
        """Whether this is the process of the thread: a fork does not take threads along."""
        return os.getpid() == self._process

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `function` after what was submitted before; its outcome is the future's."""
        future: Future[Any] = Future()
        self._queue.put((future, function, args))
        if self._thread is None:
            # A daemon, since the interpreter waits for others without a limit.
            self._thread = threading.Thread(
                target=_work, args=(self._queue,), name=self._name, daemon=True
            )
            _threads.add(self._thread)
            self._thread.start()
        return future

    def close(self, *, wait: bool = True) -> None:
        """Forget what has not begun, and end the thread; wait for it, but not for ever."""
        if self._thread is None or not self.is_here():
            return
        with suppress(Empty):
            while (waiting := self._queue.get_nowait()) is not None:
                waiting[0].cancel()
        self._queue.put(None)
        if wait:
            self._thread.join(PATIENCE_S)


_workers: weakref.WeakSet[WorkerThread] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # may outlive their workers


def _work(queue: _Queue) -> None:
    while (given := queue.get()) is not None:
        _fulfil(*given)
        del given  # or the batch would stay until the next one comes


def _fulfil(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
    finally:
        # The error's traceback holds this frame, which must not hold the error in turn.
        del future, args


@atexit.register
def _end_all() -> None:
    """A thread that still runs torch while the interpreter is taken down would crash it."""
    for worker in list(_workers):
        worker.close(wait=False)
    deadline = time.monotonic() + PATIENCE_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
