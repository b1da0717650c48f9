"""The next rank on this host: if it ends without a word, this one knows at once.

MPI waits for ever for a rank that has gone. mpiexec notices, but Hydra, the one of MPICH,
kills the other ranks before they can say anything, and then reports success if that rank has
ended with the status 0. So the ranks of a host form a ring. Each keeps a socket to the one
before it, which breaks when the process ends, however it does.

Note [What Hydra must not notice first]
    Hydra takes the end of a rank's connection to it (PMI) for the end of the rank, and kills
    all others. A rank that lends that connection to the one before it stays alive for Hydra
    until that one has spoken, and has ended the job with a status that is not 0.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mpi4py import MPI

__all__ = ["Neighbour"]

_COMES = b"c"
_LEAVES = b"l"  # its program has come to its end, and so have all others
_ENDS_JOB = b"e"  # somebody ends the job, and has said why
_COME_S = 10.0  # for the next rank to call, which has been told where


class Neighbour:
    """Watches the next rank on this host, and is watched by the one before.

    Every rank must make one at the same time. Where this rank is alone, nothing is watched.

    Args:
        world: the ranks of the job.
        gone: called in a thread with the rank that ended without a word.
    """

    def __init__(self, world: MPI.Intracomm, gone: Callable[[int], None]) -> None:
        self._gone = gone
        self._leaving = False
        self._before: socket.socket | None = None
        self._after: socket.socket | None = None
        self._lent: list[int] = []
        with socket.socket(socket.AF_UNIX) as callers:
            address = _listen(callers)
            found = world.allgather((_host(), address))
            here = [rank for rank, (host, name) in enumerate(found) if host == _host() and name]
            if len(here) < 2 or world.rank not in here:
                return
            place = here.index(world.rank)
            self._rank = here[(place + 1) % len(here)]
            with suppress(OSError):
                self._before = _call(found[here[place - 1]][1])
            with suppress(OSError):
                self._after, self._lent = _accept(callers)
        os.register_at_fork(after_in_child=self._close)  # a child must not keep them open
        if self._after is not None:
            self._watcher = threading.Thread(target=self._watch, name="mpi neighbour", daemon=True)
            self._watcher.start()

    def job_ends(self) -> None:
        """Say that the job is about to be ended with a message, and no other is needed."""
        self._say(_ENDS_JOB)

    def leave(self) -> None:
        """Say goodbye, and watch no longer. To be called once all ranks have come to their end."""
        self._leaving = True
        self._say(_LEAVES)
        if self._after is not None:
            with suppress(OSError):
                self._after.shutdown(socket.SHUT_RD)
            self._watcher.join()
        self._close()

    def _say(self, word: bytes) -> None:
        if self._before is not None:
            with suppress(OSError):
                self._before.send(word, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _watch(self) -> None:
        assert self._after is not None
        try:
            word = self._after.recv(1)
        except OSError:
            word = b""
        if self._leaving or word == _LEAVES:
            return
        self._say(_ENDS_JOB)
        if word != _ENDS_JOB:
            self._gone(self._rank)

    def _close(self) -> None:
        for end in (self._before, self._after):
            if end is not None:
                end.close()
        for descriptor in self._lent:
            os.close(descriptor)
        self._lent = []


def _host() -> str:
    """What ranks that can reach each other's sockets have in common."""
    try:
        return socket.gethostname() + str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def _listen(callers: socket.socket) -> str:
    """Where to call; "" where the system has no such addresses (they begin with a zero)."""
    address = f"\0trine-{secrets.token_hex(16)}"
    try:
        callers.bind(address)
        callers.listen(1)
    except OSError:
        return ""
    return address


def _call(address: str) -> socket.socket:
    """Reach the rank before this one, and lend it what Hydra watches."""
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(address)
    lent = os.environ.get("PMI_FD", "")
    with suppress(OSError):
        socket.send_fds(caller, [_COMES], [int(lent)] if lent.isdecimal() else [])
        return caller
    caller.send(_COMES)  # Hydra's connection is another one here
    return caller


def _accept(callers: socket.socket) -> tuple[socket.socket, list[int]]:
    """The next rank, which calls; what others of this host might send is not listened to."""
    callers.settimeout(_COME_S)
    while True:
        caller, _ = callers.accept()
        peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.getuid():
            caller.close()
            continue
        caller.settimeout(_COME_S)
        _, lent, _, _ = socket.recv_fds(caller, 1, 1)
        caller.settimeout(None)
        return caller, lent
