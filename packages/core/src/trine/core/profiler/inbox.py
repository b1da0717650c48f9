"""How a process's children report times to it: a pipe that they inherit when forked.

A child must never wait here: neither for a lock that some other thread held at the
moment of the fork, nor for a parent that reads slowly or is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection

__all__ = ["Inbox"]

_SECONDS = struct.Struct("<d")
# Messages of up to PIPE_BUF bytes arrive whole, whoever else is writing; four of the bytes
# are the length that multiprocessing writes before each.
_NAME_BYTES = getattr(select, "PIPE_BUF", 512) - 4 - _SECONDS.size


class Inbox:
    """Made before the children; they `send`, and what they sent is handed to `deliver`.

    Args:
        deliver: called with name and value, on a thread of this object or in `drain`.
    """

    def __init__(self, deliver: Callable[[str, float], None]) -> None:
        self._deliver = deliver
        self._owner = os.getpid()
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._stopped, self._stop = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._writer.fileno(), False)
        # Reentrant: a summary may be collected as garbage, and closed, inside `deliver`.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="trine time summary", daemon=True)
        self._thread.start()

    def send(self, name: str, value: float) -> None:
        """Report from a child. With the pipe full or its reader gone, nothing happens."""
        message = _SECONDS.pack(value) + name.encode()[:_NAME_BYTES]
        with suppress(OSError):
            self._writer.send_bytes(message)

    def drain(self) -> None:
        """Deliver all that has been sent up to now."""
        with self._lock:
            while not self._reader.closed and self._reader.poll():
                message = self._reader.recv_bytes()
                name = message[_SECONDS.size :].decode(errors="ignore")
                self._deliver(name, _SECONDS.unpack_from(message)[0])

    def close(self) -> None:
        """Deliver what is left and end the thread; in a child this changes nothing."""
        if os.getpid() != self._owner:
            return
        self._stop.send_bytes(b"")
        if threading.current_thread() is self._thread:
            return
        self._thread.join()
        with self._lock:
            self.drain()
            for end in (self._reader, self._writer, self._stopped, self._stop):
                end.close()

    def _run(self) -> None:
        while self._stopped not in connection.wait([self._reader, self._stopped]):
            self.drain()
