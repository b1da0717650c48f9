"""Run programs side by side for a limited time, keep what they wrote, leave none behind.

Their output goes to files that have no name, not to pipes: a grandchild that keeps a pipe
open could make its reader wait for ever, and a file without a name vanishes with its users.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

__all__ = ["Ended", "probe", "run_together"]

_GRACE_S = 2.0  # for the others to say why they fail because one did
_PAUSE_S = 0.02
_OUT_OF_TIME = "Timeout ("  # so faulthandler begins when a probe's time is up
_PROBES = Path(__file__).with_name("probes.py")


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        how: `"exited"`; `"timed out"`, and was killed; `"stopped"`, because another failed.
        status: its exit status, negative for a signal.
        output: what it wrote to stdout.
        errors: what it wrote to stderr.
    """

    how: Literal["exited", "timed out", "stopped"]
    status: int
    output: str
    errors: str

    @property
    def succeeded(self) -> bool:
        """Whether it came to its own end, with status 0."""
        return self.how == "exited" and self.status == 0

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What a probe said, one JSON object a line; other lines are passed over."""
        found = []
        for line in self.output.splitlines():
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    found.append(said)
        return found

    @property
    def reason(self) -> str:
        """Why it did not succeed, in one line."""
        said = [fact["error"] for fact in self.facts if fact.get("error")]
        if said:
            return str(said[-1])
        if self.how == "timed out" or _OUT_OF_TIME in self.errors:
            return f"did not end in time{self._where()}"
        if self.how == "stopped":
            return "was stopped because another process failed"
        if self.status < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-self.status).name}"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        # The end of a traceback, or of what a launcher has to say.
        return lines[-1] if lines else f"ended with exit status {self.status}"

    def _where(self) -> str:
        """The innermost frame of the main thread, which comes last in a probe's stacks."""
        _, found, stack = self.errors.rpartition("(most recent call first):\n")
        return f": it stood at {stack.splitlines()[0].strip()}" if found else ""


def probe(what: str, *args: object, limit_s: float) -> list[str]:
    """The command that runs one of `probes`, which end themselves after `limit_s` too."""
    # -P: its folder must not come before the standard library's.
    return [sys.executable, "-P", str(_PROBES), what, f"{limit_s:g}", *map(str, args)]


def run_together(
    commands: Sequence[Sequence[str]], limit_s: float, environ: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run the commands at the same time until all have ended, one has failed, or time is up.

    Args:
        commands: the programs and their arguments.
        limit_s: for all of them together.
        environ: their environment; None means this process's.

    Raises:
        OSError: if one cannot be started.
    """
    with ExitStack() as stack:
        running = []
        for command in commands:
            output = stack.enter_context(tempfile.TemporaryFile())
            errors = stack.enter_context(tempfile.TemporaryFile())
            running.append(stack.enter_context(_Child(command, environ, output, errors)))
        deadline = time.monotonic() + limit_s
        failed = False
        while any(child.is_running() for child in running) and time.monotonic() < deadline:
            if not failed and any(child.has_failed() for child in running):
                failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(_PAUSE_S)
        failed = any(child.has_failed() for child in running)
        return [child.end("stopped" if failed else "timed out") for child in running]


class _Child:
    """One program, in a session of its own so that all it starts can be killed with it."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str] | None,
        output: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        self._output = output
        self._errors = errors
        # Nothing is ever written to stdin; its end tells a probe that we are gone.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=environ,
            start_new_session=True,
        )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def has_failed(self) -> bool:
        return self._process.poll() not in (None, 0)

    def end(self, if_running: Literal["timed out", "stopped"]) -> Ended:
        how = if_running if self.is_running() else "exited"
        self._kill()
        status = self._process.returncode
        return Ended(how, status, _read(self._output), _read(self._errors))

    def _kill(self) -> None:
        if self.is_running():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
