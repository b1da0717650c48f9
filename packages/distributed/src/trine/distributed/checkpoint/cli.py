"""The command line of checkpoints: what can be done to one without ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trine.core import TrineError
from trine.distributed.checkpoint.consolidate import consolidate

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Turn a checkpoint into one safetensors file."""
    parser = _Parser(prog="trine checkpoint", description="Work on a checkpoint without ranks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "consolidate",
        prog="trine checkpoint consolidate",
        help="write the model as one safetensors file",
        description="Write the model of a checkpoint as one safetensors file, one tensor at a "
        "time. The checkpoint is compared with its checksums first.",
    )
    command.add_argument("path", type=Path, metavar="PATH", help="folder of the checkpoint")
    command.add_argument("out", type=Path, metavar="OUT", help="file to write, *.safetensors")
    try:
        given = parser.parse_args(argv)
        consolidate(given.path, given.out)
    except (_Mistake, TrineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, _Mistake) else 1
    print(f"Wrote {given.out} ({given.out.stat().st_size / 1e6:.1f} MB).")
    return 0


class _Mistake(Exception):
    """What was asked for cannot be understood; the message says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Mistake(f"{message}. See --help.")
