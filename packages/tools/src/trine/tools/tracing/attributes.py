"""The further attributes of events, as lines of JSON: written once, read when asked for.

Both directions are forgiving. What JSON cannot hold is written as text, and so is read what
a reader could not pass on: an attribute is never a reason to lose an event.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

from trine.core.tracing import Attributes
from trine.tools.errors import TraceFileError

__all__ = ["MAX_ARGS", "StoredAttributes", "encode_attributes", "text_of"]

MAX_ARGS: Final = 1 << 14
"""Characters of one event's attributes as JSON."""

_INT64: Final = 1 << 63
_MAX_DEPTH: Final = 8


class StoredAttributes:
    """The attributes of a recording's events, kept as the bytes they were read as.

    Args:
        runs: lines of JSON, one bytes object per run of events.
        firsts: the place of each run's first line among all.
    """

    def __init__(self, runs: Sequence[bytes], firsts: Sequence[int]) -> None:
        self._runs = runs
        self._firsts = firsts
        self._split: tuple[int, list[bytes]] = (-1, [])  # the run last asked for

    def decode(self, place: int) -> Attributes:
        """The attributes at a place.

        Raises:
            TraceFileError: if what stands there is not a JSON object.
        """
        run = bisect_right(self._firsts, place) - 1
        if self._split[0] != run:
            self._split = run, self._runs[run].split(b"\n")
        try:
            found = json.loads(self._split[1][place - self._firsts[run]])
        except (ValueError, RecursionError) as error:
            raise TraceFileError(f"The attributes of an event are not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise TraceFileError("The attributes of an event are not a JSON object.")
        return {name: _plain(value) for name, value in found.items()}


def encode_attributes(args: Mapping[object, object]) -> str:
    """A JSON object in ASCII, at most `MAX_ARGS` long."""
    text = _encode({text_of(name): _plain(value) for name, value in args.items()})
    return text if len(text) <= MAX_ARGS else _encode({"left_out": f"{len(text)} bytes"})


def text_of(value: object) -> str:
    """`str(value)`, whatever the value does."""
    try:
        return str(value)
    except Exception:  # whatever a foreign __str__ does, the other events are worth keeping
        return f"<{type(value).__name__}>"


def _plain(value: object, depth: int = 0) -> object:
    """What JSON can hold and every reader can take; anything else as its text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {text_of(name): _plain(value[name], depth + 1) for name in value}
        if isinstance(value, (list, tuple)):
            return [_plain(item, depth + 1) for item in value]
    return text_of(value)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
