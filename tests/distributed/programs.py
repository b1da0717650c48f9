"""Programs that tests start and may fail to end: nothing of them outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["living_processes", "running"]


@contextmanager
def running(
    command: Sequence[str],
    cwd: Path,
    *,
    env: Mapping[str, str] | None = None,
    ignore_interrupts: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Start a program as the leader of a session; end all of the session after the block.

    Args:
        command: the program and its arguments.
        cwd: its working directory.
        env: variables to set beside those of this process.
        ignore_interrupts: whether it starts with SIGINT ignored, as under `nohup` or in the
            background of a script. Otherwise it takes SIGINT, even if this process, from
            which it would inherit that, does not.
    """
    handler = signal.SIG_IGN if ignore_interrupts else signal.SIG_DFL
    program = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | (env or {}),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    with program:
        try:
            yield program
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def living_processes(session: int, seconds: float = 1.0) -> list[str]:
    """The commands of a session's processes, without those that only wait to be reaped.

    A process that ends closes its files first, by which a test may know of its end: only what
    is there after so many seconds still counts.
    """
    command = ["ps", "-A", "-o", "sess=,stat=,pid=,args="]
    deadline = time.monotonic() + seconds
    while True:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split(maxsplit=2) for line in listing.splitlines()]
        found = [args for sess, stat, args in rows if sess == str(session) and stat[0] != "Z"]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)
