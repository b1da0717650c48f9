"""The command line of the demo: check what was asked for, launch the ranks, report.

A user's mistake ends here, in one sentence and status 2; it must not reach the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from trine.core import CUDADevice, Precision, TrineError, get_device
from trine.core.recording import find_recorder
from trine.distributed.demo.report import print_report
from trine.distributed.demo.settings import Outcome, Settings
from trine.distributed.demo.text import read_text
from trine.distributed.demo.train import train
from trine.distributed.launchers import read_launch
from trine.distributed.process_groups import check_backend, destroy_process_group
from trine.distributed.testing import RanksFailed, check_world_size, run_on_ranks

__all__ = ["main"]

_MARKER = "demo.json"
_DEFAULT_RANKS = 2
_DEFAULT_STEPS = 350


def main(argv: Sequence[str] | None = None) -> int:
    """Train a small GPT on real text, sharded over ranks, and show where the time went."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what a terminal cannot
    try:
        settings, ranks = _parse(argv)
        return _run(settings, ranks)
    except _Mistake as mistake:
        return _fail(mistake, 2)
    except (TrineError, OSError) as error:
        return _end(error)
    except KeyboardInterrupt:
        _complain("\nStopped.")
        return 128 + signal.SIGINT


def _end(error: TrineError | OSError) -> int:
    if _reader_is_gone():  # as after `| head`: whoever has seen enough wants no error
        _drop_output()
        return 128 + signal.SIGPIPE
    if isinstance(error, RanksFailed) and error.explanation:
        return _fail(f"Rank {error.rank} stopped. {error.explanation}", 1)
    if isinstance(error, OSError):  # files are looked after where they are written
        _drop_output()
        return _fail(f"Standard output cannot be written: {error.strerror}.", 1)
    return _fail(error, 1)


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe or a terminal with nobody at its other end."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # not a file of the system, or closed
        return False
    return bool(poll.poll(0))


def _drop_output() -> None:
    """Let what is still in the buffer go, which would fail once more at exit."""
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _fail(error: Exception | str, status: int) -> int:
    _complain(f"error: {error}")
    return status


def _complain(text: str) -> None:
    with suppress(OSError):  # it may be closed as well, and the status still tells
        print(text, file=sys.stderr, flush=True)


class _Mistake(Exception):
    """What the user asked for cannot be done; the message says why."""


@contextmanager
def _mistakes() -> Iterator[None]:
    """Take a ValueError for the user's mistake; its message is then meant for users."""
    try:
        yield
    except ValueError as error:
        raise _Mistake(str(error)) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Mistake(f"{message}. See --help.")


def _parse(argv: Sequence[str] | None) -> tuple[Settings, int]:
    parser = _Parser(
        prog="trine demo",
        description="Train a byte-level GPT of 1.9 million parameters on real text, sharded over "
        "several ranks of this machine, and show the loss, the cost and a timeline. Under "
        "torchrun or mpiexec, join the ranks that it started.",
    )
    add = parser.add_argument
    add("--text", type=_path, metavar="PATH", help="file or folder (default: Python's library)")
    add("--ranks", type=int, metavar="N", help=f"how many processes (default: {_DEFAULT_RANKS})")
    add("--steps", type=int, default=_DEFAULT_STEPS, help="training steps (default: %(default)s)")
    add("--backend", help="gloo, mpi, nccl, ... (default: what suits the device)")
    add("--precision", default="fp32", help="fp32, amp_bf16 or bf16 (default: %(default)s)")
    add(
        "--out",
        type=_path,
        default="trine-demo",
        metavar="DIR",
        help="folder for what it writes (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of parameters and data (default: %(default)s)")
    add("--check", action="store_true", help="train the unsharded model too, compare every loss")
    given = parser.parse_args(argv)
    if given.steps < 1:
        raise _Mistake(f"--steps {given.steps}: expected at least 1.")
    if not 0 <= given.seed < 2**32:
        raise _Mistake(f"--seed {given.seed}: expected a number from 0 to {2**32 - 1}.")
    with _mistakes():
        precision = _precision(given.precision)
        backend = (given.backend or get_device("auto").dist_backend).lower()
        check_backend(backend)
        ranks = _ranks(given.ranks, backend)
    settings = Settings(
        text=given.text,
        steps=given.steps,
        backend=backend,
        precision=precision,
        out=given.out,
        check=given.check,
        seed=given.seed,
    )
    return settings, ranks


def _path(text: str) -> Path:
    if not text:  # as an unset variable gives; it must not mean the current folder
        raise argparse.ArgumentTypeError("a path is expected, and it is empty")
    return Path(text)


def _precision(name: str) -> Precision:
    usable = (Precision.FP32, Precision.AMP_BF16, Precision.BF16)
    if name.lower() in usable:
        return Precision(name.lower())
    known = name.lower() in tuple(Precision)
    reason = (
        f"The demo does not scale losses, which {name} needs to train well."
        if known
        else f"Unknown precision {name!r}."
    )
    raise ValueError(f"{reason} Choose one of: {', '.join(usable)}.")


def _ranks(asked: int | None, backend: str) -> int:
    launch = read_launch()
    if launch is not None:
        started = launch.world_size
        if asked not in (None, started):
            raise ValueError(
                f"--ranks {asked} was asked for, but the launcher started {started}. "
                "Leave --ranks out, or start the program without a launcher."
            )
        return started
    if asked is None:
        gpus = CUDADevice.count() if backend == dist.Backend.NCCL else _DEFAULT_RANKS
        asked = min(_DEFAULT_RANKS, gpus)
    check_world_size(asked, backend)
    return asked


def _run(settings: Settings, ranks: int) -> int:
    with _mistakes():
        text = read_text(settings.text, at_least=settings.window)
    launch = read_launch()
    reports = launch is None or launch.rank == 0
    if reports:
        _prepare(settings)
        print(
            f"Training a GPT on {len(text.data):,} bytes of {text.title}\n"
            f"across {ranks} rank{'s' * (ranks != 1)} ({settings.backend}, {settings.precision}).",
            flush=True,
        )
    if launch is not None:
        outcomes = _train_in_this_world(settings)
    else:
        outcomes = run_on_ranks(train, ranks, settings, backend=settings.backend, timeout_s=None)
    if not reports:
        return 0
    try:
        _mark(settings, losses=outcomes[0].losses, sent_nbytes=[o.sent_nbytes for o in outcomes])
    except OSError as error:
        raise TrineError(
            f"{settings.out / _MARKER} cannot be written: {error.strerror}. Make room there, or "
            "choose another folder."
        ) from error
    return 0 if print_report(settings, outcomes, find_recorder()) else 1


def _train_in_this_world(settings: Settings) -> list[Outcome]:
    mine = train(settings)
    outcomes: list[Outcome] = [mine] * dist.get_world_size()
    dist.all_gather_object(outcomes, mine)
    destroy_process_group()
    return outcomes


def _prepare(settings: Settings) -> None:
    """Make the folder for what the run writes; clear what an earlier run recorded there."""
    out = settings.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not (out / _MARKER).exists():
            raise _Mistake(
                f"--out {out} holds files that are not from an earlier run of the demo. "
                "Give an empty or a new folder."
            )
        _check_room(settings)
        _mark(settings)
        if settings.timeline_folder.exists():
            shutil.rmtree(settings.timeline_folder)
    except OSError as error:
        raise _Mistake(
            f"--out {out} cannot be written: {error.strerror}. Choose another folder."
        ) from error


def _check_room(settings: Settings) -> None:
    """Refuse, before training, a disk on which the checkpoint will find no room."""
    disk = shutil.disk_usage(settings.out)
    needed = settings.checkpoint_nbytes
    if disk.total and disk.free < needed:  # some network file systems know neither
        raise _Mistake(
            f"--out {settings.out} has room for {disk.free / 2**20:.0f} MiB, but the checkpoint "
            f"takes {needed / 2**20:.0f} MiB. Make room there, or choose another folder."
        )


def _mark(settings: Settings, **results: object) -> None:
    """Write what ran, so that a reader can tell, and a later run knows the folder is ours."""
    what = {
        "text": None if settings.text is None else str(settings.text),
        "steps": settings.steps,
        "backend": settings.backend,
        "precision": str(settings.precision),
        "seed": settings.seed,
    }
    (settings.out / _MARKER).write_text(json.dumps(what | results, indent=1) + "\n")
