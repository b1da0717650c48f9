"""The order in which the doctor looks, and the command around it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from trine.core.doctor.backends import check_gloo, check_mpi, check_nccl
from trine.core.doctor.checks import Check, Diagnosis, Status
from trine.core.doctor.devices import check_devices
from trine.core.doctor.hardware import check_cores, check_memory
from trine.core.doctor.software import check_packages, check_python, check_torch
from trine.core.doctor.world import check_world

__all__ = ["examine", "main"]

_LIMIT_S = 60.0
_NOBODY_READS = 128 + 13  # as of a program that SIGPIPE ends


def examine(limit_s: float = _LIMIT_S) -> Diagnosis:
    """Look at everything. Takes seconds; processes are started and are gone at the end.

    Args:
        limit_s: how long each probe that runs in processes of its own may take.
    """
    return Diagnosis(tuple(_checks(limit_s)))


def main(argv: Sequence[str] | None = None) -> int:
    """Say whether training can start on this machine: devices, backends, versions, memory.

    Returns:
        0 if it can, 1 if it cannot, 141 if its output was closed before the verdict was out;
        wrong arguments end the program with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m trine.core.doctor",
        description="Say whether training can start on this machine, and if not, how to mend it.",
        epilog="Exit status: 0 if training can start (warnings included), 1 if it cannot, "
        "141 if nobody read its output to the end.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=_LIMIT_S,
        metavar="SECONDS",
        help="how long one probe may take, the import of torch included (default: %(default)g)",
    )
    options = parser.parse_args(argv)
    try:
        diagnosis = _report(options.limit, as_json=options.json)
    except BrokenPipeError:
        # `... | head` has read enough, which says nothing about the machine. What is still
        # in the buffer has to go somewhere, or the interpreter complains at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    return 0 if diagnosis.can_start else 1


def _report(limit_s: float, *, as_json: bool) -> Diagnosis:
    found: list[Check] = []
    for check in _checks(limit_s):
        found.append(check)
        if not as_json:
            print(check.to_text(), flush=True)  # at once: the next one may take a while
    diagnosis = Diagnosis(tuple(found))
    text = json.dumps(diagnosis.to_dict(), indent=2) if as_json else f"\n{diagnosis.verdict}"
    print(text, flush=True)
    return diagnosis


def _checks(limit_s: float) -> Iterator[Check]:
    yield from _guarded("python", check_python)
    yield from _guarded("torch", check_torch)
    yield from _guarded("packages", check_packages)
    yield from _guarded("device", lambda: check_devices(limit_s))
    nccl = list(_guarded("nccl", lambda: check_nccl(limit_s)))
    yield from nccl
    needed = all(check.status != "ok" for check in nccl)
    yield from _guarded("gloo", lambda: check_gloo(limit_s, needed=needed), needed=needed)
    yield from _guarded("mpi", lambda: check_mpi(limit_s), needed=False)
    yield from _guarded("world", lambda: check_world(os.environ, torch.cuda.device_count()))
    yield from _guarded("cores", lambda: check_cores(os.environ), needed=False)
    yield from _guarded("memory", check_memory)


def _guarded(
    name: str, look: Callable[[], Iterable[Check]], *, needed: bool = True
) -> Iterator[Check]:
    """What `look` finds; its own failure is a finding, not the end of the examination.

    Where training needs what `look` looks at, that failure is an error: nobody has seen
    that it is there.
    """
    status: Status = "error" if needed else "warning"
    try:
        yield from look()
    except Exception as error:
        yield Check(
            name,
            status,
            f"could not be examined: {type(error).__name__}: {error}",
            "If this is not a limit of the machine (open files, memory, processes), it is a "
            "fault of the doctor: please report it with the output of --json.",
        )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not a time between 0 and 86400 seconds")
    return seconds
