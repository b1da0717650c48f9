"""Close recordings that nobody closes: when the interpreter ends, is forked or terminated.

Note [Terminated]: launchers end a job with SIGTERM, which by default kills at once. While
something records, and the program has no handler of its own, a handler closes the recording
and then lets the signal do what it would have done. Python runs handlers on the main thread
only, and not while that is blocked in a collective, which is how jobs hang. So the signal
also wakes the recorder's thread, through the wake-up file of the `signal` module; if the
handler has not come in time, that thread writes the end and has the process killed by the
signal. A program with a handler of its own decides itself what comes after; its recording
goes on until it ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from time import monotonic
from types import FrameType
from typing import Final

from trine.tools.tracing.schema import Reason

__all__ = ["CLOSE", "TERMINATE", "after_grace", "read_byte", "watch"]

CLOSE: Final = b"\0"
"""What a recorder that is closed writes into its pipe."""

TERMINATE: Final = bytes([signal.SIGTERM])
"""What the signal writes into the pipe of a recorder."""

_GRACE_S: Final = 1.0

Close = Callable[[Reason], object]

_watched: dict[object, tuple[Close, Callable[[], None]]] = {}


def watch(close: Close, forget: Callable[[], None], wake_to: int) -> Callable[[], bool]:
    """Have a recording closed if the process ends before it does so itself.

    Args:
        close: closes it; called on the main thread.
        forget: called in a child that was forked, which must not touch it.
        wake_to: the end to write to of the pipe that wakes its thread; non-blocking.

    Returns:
        What to call when it is closed. It says whether the pipe may be closed: not where
        signals are still written to it, since the number could be another file's by then.
    """
    token = object()
    _watched[token] = close, forget
    # Runs at the end of the interpreter and of processes that multiprocessing started,
    # which atexit does not; not in forked children, which are not its process.
    finalizer = Finalize(None, close, args=("exit",), exitpriority=0)
    listening = _listen(wake_to)

    def leave() -> bool:
        _watched.pop(token, None)
        finalizer.cancel()
        return not listening or _unlisten(wake_to)

    return leave


def read_byte(pipe: int, timeout_s: float) -> bytes:
    """The next byte of a pipe, nothing if none comes in time."""
    # Not select, which knows no files beyond the 1,024th.
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return os.read(pipe, 1) if poll.poll(timeout_s * 1000) else b""


def after_grace(wake_from: int, finish: Close) -> None:
    """Called by a recorder's thread that was woken by the signal; see Note [Terminated].

    Returns if the main thread handles the signal, or something else does.
    """
    deadline = monotonic() + _GRACE_S
    while (left := deadline - monotonic()) > 0:
        if read_byte(wake_from, left) == CLOSE:
            return
    if signal.getsignal(signal.SIGTERM) is not _on_terminate:
        return
    finish("signal")
    _let_terminate()
    os.kill(os.getpid(), signal.SIGTERM)


def _listen(wake_to: int) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False  # only there are handlers installed
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    before = signal.set_wakeup_fd(wake_to, warn_on_full_buffer=False)
    if before != -1:
        # An event loop's. Without the wake-up a blocked process would not end: leave it.
        signal.set_wakeup_fd(before)
        return False
    signal.signal(signal.SIGTERM, _on_terminate)
    return True


def _unlisten(wake_to: int) -> bool:
    if threading.current_thread() is not threading.main_thread():
        if signal.getsignal(signal.SIGTERM) is _on_terminate:
            _let_terminate()
        return False
    if signal.getsignal(signal.SIGTERM) is _on_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before = signal.set_wakeup_fd(-1)
    if before not in (-1, wake_to):
        signal.set_wakeup_fd(before)  # somebody else's, who came later
    return True


def _let_terminate() -> None:
    """Give the signal its default back from any thread, which `signal.signal` refuses to do."""
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)


def _on_terminate(signum: int, frame: FrameType | None) -> None:
    for close, _ in list(_watched.values()):
        close("signal")
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _after_fork() -> None:
    if not _watched:
        return
    for _, forget in list(_watched.values()):
        forget()
    _watched.clear()
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)
