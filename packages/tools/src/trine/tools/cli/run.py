"""`trine trace run`: record a program that does not know of us."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import click

from trine.tools.cli.paths import TracePath
from trine.tools.recording.launch import launched_rank
from trine.tools.recording.window import Window
from trine.tools.text import printable

__all__ = ["run"]

_INJECT = Path(__file__).resolve().parent.parent / "recording" / "inject"


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--out",
    type=TracePath(path_type=Path, file_okay=False),
    default=Path("trine-trace"),
    show_default=True,
    help="The folder of the run; recordings of an earlier one are replaced.",
)
@click.option("--steps", default="", help="Record these steps only: 20, or 20-29, from 0.")
@click.option("--memory", is_flag=True, help="Record activations and other memory too.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(out: Path, steps: str, memory: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND and record every rank that it starts.

    COMMAND is what you run without us, after --: a Python script, python -m, torchrun or
    mpiexec. It needs no change. It keeps its output and its exit status.
    """
    if steps:
        try:
            Window.parse(steps)
        except ValueError as error:
            raise click.UsageError(f"--steps: {error}") from error
    began = time.time()
    status = _run(command, _environment(out, steps, memory))
    # Where a launcher started us once per rank, one says it for all.
    if (launched_rank(os.environ) or (0, 1))[0] == 0:
        click.echo(_what_next(out, began, status), err=True)
    sys.exit(status)


def _environment(out: Path, steps: str, memory: bool) -> Mapping[str, str]:
    before = os.environ.get("PYTHONPATH")
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(_INJECT), *([before] if before else [])])
    environment["TRINE_TRACE_OUT"] = str(out.resolve())
    environment["TRINE_TRACE_STEPS"] = steps
    environment["TRINE_TRACE_MEMORY"] = "1" if memory else ""
    environment.pop("TRINE_TRACE_TAKEN", None)
    return environment


def _run(command: tuple[str, ...], environment: Mapping[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise click.ClickException(
            f"{printable(command[0])} cannot be started: {error.strerror or error}."
        ) from error

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    # What is typed at the terminal reaches the command too; only it decides what follows.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _what_next(out: Path, began: float, status: int) -> str:
    ranks = 0
    for path in out.glob("trace-rank*.trine"):
        # A file system may keep times to the second.
        ranks += path.stat().st_mtime >= began - 1
    if not ranks:
        return (
            "trine: nothing was recorded. Is trine-tools installed where COMMAND runs, and does "
            "it train with PyTorch?"
        )
    many = "1 rank" if ranks == 1 else f"{ranks} ranks"
    folder = shlex.quote(printable(str(out)))
    # Of ranks that failed, one wants to know who did not come to what.
    command = "hang" if status and ranks > 1 else "summary"
    return f"trine: {many} recorded. Next: trine trace {command} {folder}"
