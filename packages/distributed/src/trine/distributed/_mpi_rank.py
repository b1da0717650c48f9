"""A rank that mpiexec started for `run_on_ranks`: it calls back, and does what it is handed."""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import current_process

from trine.distributed._rank_main import Assignment, rank_main
from trine.distributed.launchers import read_launch

__all__: list[str] = []


def _call(path: str, rank: int, kind: str) -> Connection:
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(path)
    connection = Connection(caller.detach())
    connection.send((rank, os.getpid(), kind))
    return connection


def main() -> None:
    """Be one rank."""
    launch = read_launch()
    assert launch is not None, "started without mpiexec"
    reports = _call(sys.argv[1], launch.rank, "reports")
    stacks = _call(sys.argv[1], launch.rank, "stacks")
    assignment = reports.recv()
    assert isinstance(assignment, Assignment)

    def end_with_launching_process() -> None:
        # Nothing is ever sent this way, so what comes is the end.
        stacks.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_launching_process, daemon=True).start()
    # A script without a guard must not launch again from here; `launch` looks at this.
    vars(current_process())["_inheriting"] = True
    # What mpiexec has set is what makes this process a rank.
    environ = {**assignment.environ, **os.environ}
    rank_main(replace(assignment, environ=environ), reports, stacks)


if __name__ == "__main__":
    main()
