"""Measure how far the clocks of ranks are from rank 0's, beside the training.

Note [Ping-pong]: a rank asks rank 0 for its time, again and again. With the times at which a
question left (`t1`), came (`s1`), and its answer left (`s2`) and came (`t2`), rank 0's clock
is ahead by `((s1 - t1) + (s2 - t2)) / 2`, wrong by at most half of the time under way,
`((t2 - t1) - (s2 - s1)) / 2`. The sample with the shortest way is kept. Both sides spin at
first: to be woken takes longer than the way of a message on one host.

Note [Nobody waits]: no collective takes part and no process group is used, so a rank that
does not record, or dies, holds up nobody. Rank 0 serves on a thread of its own, and says in a
file of the run's folder where. A rank that does not find it goes on without a reading: its
clock is then aligned by what its events have in common with others'.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Final

from trine.tools.tracing.schema import ClockReading

__all__ = ["ClockClient", "ClockServer", "exchange_clocks", "reading_from"]

_FILE: Final = ".trine-clock"
_SAMPLES: Final = 300
_SPINS: Final = 50
_BURST_S: Final = 0.25
_FIRST_S: Final = 1.0  # for one answer at least, on a machine that is full
_CLOSE_S: Final = 2.0
_TURN_S: Final = 30.0  # until rank 0 has answered the others
_ANSWER: Final = struct.Struct("<qq")
_TOKEN_BYTES: Final = 32
_WELCOME, _BURST, _READY, _QUESTION, _OVER = b"w", b"b", b"r", b"?", b"."

_log = logging.getLogger(__name__)

Add = Callable[[ClockReading], None]


def exchange_clocks(
    directory: Path, rank: int, world_size: int, add: Add
) -> ClockServer | ClockClient | None:
    """Compare this rank's clock with rank 0's; close what is returned at the end.

    None where there is nothing to compare, or rank 0 cannot be asked.

    Args:
        directory: the run's folder, shared by the ranks.
        rank: this rank.
        world_size: how many ranks there are.
        add: what is done with a reading; called on another thread.
    """
    if world_size == 1:
        return None
    if rank:
        return ClockClient(directory, add)
    try:
        return ClockServer(directory)
    except OSError as error:
        _log.warning("Clocks of ranks are not compared: %s.", error.strerror or error)
        return None


class ClockServer:
    """Answers the ranks that ask rank 0 for its time.

    Args:
        directory: the run's folder, shared by the ranks.

    Raises:
        OSError: if no socket can be had or the folder cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self._token = secrets.token_hex(_TOKEN_BYTES // 2).encode("ascii")
        self._ends = False
        # Under torchrun it is known where all ranks are on this host; else they may come from
        # others, and the token says which of those that come are ranks.
        alone = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
        self._socket = socket.create_server(("127.0.0.1" if alone else "", 0), backlog=128)
        self._socket.settimeout(0.05)
        self._clients: list[threading.Thread] = []
        self._serving = threading.Lock()
        place = {
            "hosts": ["127.0.0.1", socket.gethostname(), os.environ.get("MASTER_ADDR", "")],
            "port": self._socket.getsockname()[1],
            "token": self._token.decode("ascii"),
        }
        part = self._path.with_name(f"{_FILE}.{os.getpid()}.part")
        part.write_text(json.dumps(place), encoding="ascii")
        part.replace(self._path)
        self._thread = threading.Thread(target=self._accept, name="trine clock", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait for the last questions of those that asked before, for a while, and end."""
        deadline = monotonic() + timeout_s
        for client in self._clients:
            client.join(max(0.0, deadline - monotonic()))
        self._ends = True
        self._thread.join(1.0)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._ends:
            with suppress(OSError):
                connection, _ = self._socket.accept()
                client = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._clients.append(client)
                client.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(2.0)
            if not secrets.compare_digest(_receive(connection, _TOKEN_BYTES), self._token):
                return
            connection.sendall(_WELCOME)
            while True:
                connection.settimeout(None)  # the next burst may be hours away
                if connection.recv(1) != _BURST:
                    return
                # One at a time: two that spin would wait for each other's turn to run Python.
                with self._serving:
                    if not self._answer(connection):
                        return

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one burst of questions; False if it did not come to its end."""
        connection.setblocking(False)
        connection.send(_READY)
        deadline = monotonic() + 2 * _FIRST_S
        while (asked := _spin(connection, 1, deadline)) == _QUESTION:
            came_ns = perf_counter_ns()
            connection.send(_ANSWER.pack(came_ns, perf_counter_ns()))
        return asked == _OVER


class ClockClient:
    """Asks rank 0 for its time: at once, and before the end.

    Args:
        directory: the run's folder, shared by the ranks.
        add: what is done with a reading; called on another thread.
        patience_s: how long rank 0 is looked for.
    """

    def __init__(self, directory: Path, add: Add, patience_s: float = 60.0) -> None:
        self._path = directory / _FILE
        self._add = add
        self._owed = 0  # bytes of an answer that was not waited for
        self._deadline = monotonic() + patience_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trine clock", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Ask a last time, and wait for the answer for a while."""
        self._ends.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with suppress(OSError):
            connection = self._connect()
            if connection is None:
                return
            with connection:
                self._measure(connection)
                self._ends.wait()
                self._measure(connection)

    def _connect(self) -> socket.socket | None:
        while monotonic() < self._deadline and not self._ends.is_set():
            try:
                place = json.loads(self._path.read_text(encoding="ascii"))
                hosts = [str(host) for host in place["hosts"] if host]
                port, token = int(place["port"]), str(place["token"]).encode("ascii")
            except (OSError, ValueError, TypeError, KeyError):
                hosts, port, token = [], 0, b""
            for host in hosts:
                with suppress(OSError), ExitStack() as stack:
                    connection = socket.create_connection((host, port), timeout=1.0)
                    stack.enter_context(connection)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.sendall(token)
                    # The file may be of an earlier run and the port somebody else's by now.
                    if _receive(connection, 1) == _WELCOME:
                        stack.pop_all()
                        return connection
            self._ends.wait(0.05)
        return None

    def _measure(self, connection: socket.socket) -> None:
        connection.settimeout(_TURN_S)
        connection.sendall(_BURST)
        said = _receive(connection, self._owed + 1)
        if len(said) <= self._owed or said[-1:] != _READY:
            return
        connection.setblocking(False)
        self._owed = 0
        begun = monotonic()
        best: ClockReading | None = None
        for _ in range(_SAMPLES):
            limit_s = _FIRST_S if best is None else _BURST_S
            left_ns = perf_counter_ns()
            connection.send(_QUESTION)
            answer = _spin(connection, _ANSWER.size, begun + limit_s)
            back_ns = perf_counter_ns()
            if len(answer) < _ANSWER.size:
                self._owed = _ANSWER.size - len(answer)
                break
            came_ns, answered_ns = _ANSWER.unpack(answer)
            reading = reading_from(left_ns, came_ns, answered_ns, back_ns)
            if best is None or reading.error_ns < best.error_ns:
                best = reading
        connection.send(_OVER)
        if best is not None:
            self._add(best)


def reading_from(left_ns: int, came_ns: int, answered_ns: int, back_ns: int) -> ClockReading:
    """What one question tells; see Note [Ping-pong]."""
    under_way_ns = (back_ns - left_ns) - (answered_ns - came_ns)
    return ClockReading(
        at_ns=(left_ns + back_ns) // 2,
        offset_ns=((came_ns - left_ns) + (answered_ns - back_ns)) // 2,
        error_ns=max(1, (under_way_ns + 1) // 2),
    )


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, fewer if the other side has closed."""
    received = b""
    while len(received) < size and (more := connection.recv(size - len(received))):
        received += more
    return received


def _spin(connection: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes of a connection that does not block, fewer after the deadline.

    Spins first, then sleeps: on a machine that is full, who spins loses its turn, and who is
    woken gets one.
    """
    received = b""
    tries = 0
    while monotonic() < deadline:
        try:
            more = connection.recv(size - len(received))
        except BlockingIOError:
            if (tries := tries + 1) > _SPINS:
                poll = select.poll()
                poll.register(connection, select.POLLIN)
                poll.poll(max(0.0, deadline - monotonic()) * 1000)
            continue
        received += more
        if len(received) == size or not more:
            break
    return received
