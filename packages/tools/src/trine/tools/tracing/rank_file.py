"""The file format of one rank's trace: JSON lines, a header first, then one event a line.

Only the format: what a line looks like and what it must look like to be accepted.
Opening, naming and renaming files is up to the recorder and the reader. Everything
decoded here may come from elsewhere, so each field is checked before it is believed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from reprlib import repr as short
from typing import Final, NoReturn, get_args

from trine.core.tracing import Attributes, Kind, TraceEvent

__all__ = [
    "FORMAT",
    "MAX_LINE_BYTES",
    "VERSION",
    "Header",
    "decode_event",
    "decode_header",
    "encode_event",
    "encode_header",
    "rank_file_name",
]

FORMAT: Final = "trine-trace"
VERSION: Final = 1
MAX_LINE_BYTES: Final = 1 << 20

_KINDS: Final = frozenset(get_args(Kind))
_INT64: Final = 1 << 63
_MAX_RANKS: Final = 1 << 24
_MAX_DEPTH: Final = 8
_NOT_FINITE: Final = frozenset({"nan", "inf", "-inf"})


@dataclass(frozen=True)
class Header:
    """Where and when one rank's events were recorded.

    Attributes:
        rank: the rank that recorded.
        world_size: how many ranks took part.
        host: name of its machine.
        clock: two ranks with the same text here read the same `perf_counter_ns` clock.
        pid: its process.
        python: version of its interpreter.
        torch: version of its torch.
        perf_counter_ns: reading of the events' clock, taken together with `unix_ns`.
        unix_ns: reading of the wall clock, in ns since 1970.
        events: how many events follow.
        dropped: how many were recorded but did not fit.
    """

    rank: int
    world_size: int
    host: str
    clock: str
    pid: int
    python: str
    torch: str
    perf_counter_ns: int
    unix_ns: int
    events: int
    dropped: int


def rank_file_name(rank: int) -> str:
    """`trace-rank00003.jsonl` for rank 3: zero-padded, so that folders list ranks in order."""
    return f"trace-rank{rank:05d}.jsonl"


def encode_header(header: Header) -> str:
    """The first line of a rank's file, without its line break."""
    return _encode({"format": FORMAT, "version": VERSION, **asdict(header)})


def decode_header(line: str) -> Header:
    """The header that a first line holds.

    Raises:
        ValueError: if it is not the header of a trace that this version reads.
    """
    try:
        data = _decode(line)
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"it is not the trace of a rank (no {FORMAT} header)")
    version = data.get("version")
    if type(version) is not int or version != VERSION:  # True and 1.0 equal 1, and are not it
        raise ValueError(
            f"it has format version {short(version):.40}, and this trine-tools reads "
            f"version {VERSION}. Read it with the trine-tools that recorded it, or a newer one"
        )
    values: dict[str, object] = {}
    for field in fields(Header):
        value = data.get(field.name)
        # Annotations are text here, and every field is one of two types.
        good = _is_count(value) if field.type == "int" else isinstance(value, str)
        if not good:
            raise ValueError(f"its header has {field.name} = {short(value):.40}")
        values[field.name] = value
    header = Header(**values)  # type: ignore[arg-type]  # each was checked just above
    if not header.rank < header.world_size <= _MAX_RANKS:
        raise ValueError(f"its header claims rank {header.rank} of {header.world_size}")
    return header


def encode_event(event: TraceEvent) -> str:
    """One event as a compact JSON array, without its line break.

    Attributes that no reader could take are written as text; nothing an event can carry
    makes a file unreadable.
    """
    args = event.args if _is_plain(event.args) else _plain_mapping(event.args)
    line = _encode(_fields(event, args))
    if len(line) >= MAX_LINE_BYTES:  # ASCII: characters are bytes
        line = _encode(_fields(event, {"left_out": f"{len(line)} bytes"}, longest_text=200))
    return line


def decode_event(line: str) -> TraceEvent:
    """The event that a line holds.

    Raises:
        ValueError: if the line is not an event.
    """
    data = _decode(line)
    if not isinstance(data, list) or len(data) != 11:
        raise ValueError("it is not a list of 11 fields")
    kind, name, category, unit, nbytes, start_ns, end_ns, step, thread, value, args = data
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"unknown kind {short(kind):.40}")
    if not (isinstance(name, str) and isinstance(category, str) and isinstance(unit, str)):
        raise ValueError("name, category and unit must be text")
    if not (_is_count(nbytes) and _is_count(start_ns) and _is_count(end_ns)):
        raise ValueError("bytes, start and end must be integers from 0 to 2**63 - 1")
    if end_ns < start_ns:
        raise ValueError(f"it ends ({end_ns}) before it starts ({start_ns})")
    if type(step) is not int or not -_INT64 <= step < _INT64:
        raise ValueError(f"step is {short(step):.40}")
    if type(thread) is not int or not 0 <= thread < 2 * _INT64:
        raise ValueError(f"thread is {short(thread):.40}")
    number = _number(value)
    if number is None:
        raise ValueError(f"value is {short(value):.40}")
    if args is not None and not isinstance(args, dict):
        raise ValueError("its attributes are not an object")
    if not _is_plain(args):
        raise ValueError(
            f"its attributes hold a number that is not finite or not below 2**63, or are nested "
            f"more than {_MAX_DEPTH} deep"
        )
    event = TraceEvent(
        kind,  # type: ignore[arg-type]  # one of the four: checked above
        name,
        category,
        unit,
        nbytes,
        args,
        start_ns,
        end_ns,
        number,
    )
    event.step = step
    event.thread = thread
    return event


def _fields(
    event: TraceEvent, args: Attributes | None, longest_text: int | None = None
) -> list[object]:
    start_ns = _count(event.start_ns)
    value = _number(event.value)
    return [
        event.kind,
        str(event.name)[:longest_text],
        str(event.category)[:longest_text],
        str(event.unit)[:longest_text],
        _count(event.nbytes),
        start_ns,
        max(start_ns, _count(event.end_ns)),
        max(-_INT64, min(int(event.step), _INT64 - 1)),
        event.thread,
        value if value is not None and math.isfinite(value) else str(value or "nan"),
        args,
    ]


def _is_plain(value: object, depth: int = 0) -> bool:
    """Whether a file may hold this as it is: JSON, with numbers and depths that all can take."""
    if value is None or isinstance(value, (str, bool)):
        return True
    if isinstance(value, int):
        return -_INT64 <= value < _INT64
    if isinstance(value, float):
        return math.isfinite(value)
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(value[key], depth + 1) for key in value)
    return isinstance(value, list) and all(_is_plain(item, depth + 1) for item in value)


def _plain_mapping(args: Attributes | None) -> Attributes | None:
    return None if args is None else {_text(key): _plain(args[key]) for key in args}


def _plain(value: object, depth: int = 0) -> object:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {_text(key): _plain(value[key], depth + 1) for key in value}
        if isinstance(value, (list, tuple)):
            return [_plain(item, depth + 1) for item in value]
    return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # whatever a foreign __str__ does, the other events are worth keeping
        return f"<{type(value).__name__}>"


def _number(value: object) -> float | None:
    """What the field `value` of an event holds, or None if that is no number."""
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _count(value: float) -> int:
    """The nearest integer that a reader takes for a time or a size."""
    return max(0, min(int(value), _INT64 - 1))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _INT64


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decoder = json.JSONDecoder(parse_constant=_no_constant)


def _decode(line: str) -> object:
    try:
        return _decoder.decode(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at column {error.colno}") from None
