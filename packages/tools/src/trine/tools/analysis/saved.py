"""Read what a run is compared by: from its recording, or from a summary of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trine.tools.analysis.measured import Measured, MeasuredCollective
from trine.tools.analysis.spread import Spread
from trine.tools.analysis.summary import summarize
from trine.tools.analysis.unit_table import NUMBERS
from trine.tools.errors import NotComparableError, TraceFileError
from trine.tools.sources import read_each
from trine.tools.text import printable

__all__ = ["SUMMARY_FORMAT", "SUMMARY_VERSION", "read_measured"]

SUMMARY_FORMAT: Final = "trine-summary"
SUMMARY_VERSION: Final = 2

_MAX_BYTES: Final = 64 << 20
# Sums and ratios of numbers between them are finite still.
_LEAST: Final = 1e-30
_MOST: Final = 1e30
_FIRST: Final = 1 << 20  # of a file: enough to see what it is


def read_measured(path: Path) -> Measured:
    """The numbers of a run.

    Args:
        path: the folder of a run, a recording, or a file that holds a summary as JSON.

    Raises:
        TraceFileError: if it cannot be read.
        NotComparableError: if the summary is of another version.
    """
    if path.is_file() and _is_json(path):
        return _from_json(path)
    return summarize(read_each(path)).per_step


def _is_json(path: Path) -> bool:
    """Whether it may be a summary; recordings begin like JSON too, with their own words."""
    try:
        with path.open("rb") as file:
            begin = file.read(_FIRST).lstrip()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    return begin.startswith(b"{") and SUMMARY_FORMAT.encode() in begin


def _from_json(path: Path) -> Measured:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _unreadable(path, f"it is longer than {_MAX_BYTES} bytes")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != SUMMARY_FORMAT:
        raise _unreadable(path, f'its "format" is not {SUMMARY_FORMAT!r}')
    if data.get("version") != SUMMARY_VERSION:
        version = printable(repr(data.get("version")))
        raise NotComparableError(
            f"{printable(str(path))} is a summary of version {version}, and this trine-tools "
            f"compares version {SUMMARY_VERSION}: write it anew with `trine trace summary --json`."
        )
    try:
        return _measured(_object(data, "per_step"))
    except ValueError as error:
        raise _unreadable(path, str(error)) from error


def _measured(data: Mapping[str, object]) -> Measured:
    collectives = data.get("collectives")
    if not isinstance(collectives, list):
        raise ValueError('"collectives" is no list')
    parts = _object(data, "parts")
    steps = _count(data, "steps")
    if steps and not {"step", "sent"} <= parts.keys():
        raise ValueError('"parts" lacks "step" or "sent"')
    return Measured(
        world_size=_count(data, "world_size"),
        ranks=_count(data, "ranks"),
        steps=steps,
        parts={name: _spread(parts, name) for name in parts},
        collectives=[_collective(each) for each in collectives],
    )


def _collective(data: object) -> MeasuredCollective:
    if not isinstance(data, dict):
        raise ValueError('one of "collectives" is no object')
    unit, operation = data.get("unit"), data.get("operation")
    if not isinstance(unit, str) or not isinstance(operation, str):
        raise ValueError('one of "collectives" has no unit or operation')
    numbers = _object(data, "numbers")
    return MeasuredCollective(unit, operation, {name: _spread(numbers, name) for name in NUMBERS})


def _spread(data: Mapping[str, object], name: str) -> Spread:
    own = _object(data, name)
    return Spread(_number(own, "median"), _number(own, "mad"), _count(own, "count"))


def _object(data: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = data.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{name!r} is no object")
    return found


def _number(data: Mapping[str, object], name: str) -> float:
    found = data.get(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{name!r} is no number")
    try:
        number = float(found)
    except OverflowError:
        number = _MOST
    if number and not _LEAST < number < _MOST:
        raise ValueError(f"{name!r} is out of range")
    return number


def _count(data: Mapping[str, object], name: str) -> int:
    found = data.get(name)
    if type(found) is not int or not 0 <= found < 1 << 62:
        raise ValueError(f"{name!r} is no count")
    return found


def _unreadable(path: Path, reason: str) -> TraceFileError:
    return TraceFileError(f"{printable(str(path))} cannot be read: {printable(reason)}.")
