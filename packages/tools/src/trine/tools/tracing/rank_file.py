"""The file format of one rank's recording, version 2: records, each a line of JSON and bytes.

A record is one line of ASCII JSON, at most `MAX_HEAD_BYTES` long, whose `record` says what
it is and whose `nbytes` how many bytes follow it before the next line. The first is a
`header`; then come `events` (a run of them, a column after the other, little-endian, in the
order of `STORED`, then the events' attributes as lines of JSON), `clock` (how far the
rank's clock was from rank 0's), and at last `end`. Records are appended whole, so a file of
a process that was killed is readable up to its last whole record. The tables of texts,
threads and labels grow with the runs: each `events` record lists what is new in it.

Only the format: opening, naming and renaming files is up to the recorder and the reader.
Everything decoded here may come from elsewhere, so each number is checked before it is
believed.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from reprlib import repr as short
from typing import Final, NoReturn, TypeGuard, TypeVar

import torch

from trine.core.tracing import TraceEvent
from trine.tools.tracing.attributes import MAX_ARGS
from trine.tools.tracing.columns import (
    MAX_TABLE_BYTES,
    MAX_TEXT,
    Columns,
    ColumnsBuilder,
    Label,
    Texts,
)
from trine.tools.tracing.schema import (
    DTYPES,
    KINDS,
    LABEL,
    REASONS,
    STORED,
    VERSION,
    ClockReading,
    End,
    Header,
    Reason,
)

__all__ = [
    "FORMAT",
    "MAX_HEAD_BYTES",
    "MAX_RUN_BYTES",
    "RUN_EVENTS",
    "Decoder",
    "Encoder",
    "rank_file_name",
]

T = TypeVar("T")

FORMAT: Final = "trine-trace"
MAX_HEAD_BYTES: Final = 2 * MAX_TABLE_BYTES
MAX_RUN_BYTES: Final = 128 << 20
RUN_EVENTS: Final = 4096
"""How many events an encoder is given at a time at most."""

_INT64: Final = 1 << 63
_MAX_RANKS: Final = 1 << 24
_ROW_BYTES: Final = sum(array(code).itemsize for code in STORED.values())

assert sum(DTYPES[code].itemsize for code in STORED.values()) == _ROW_BYTES
assert RUN_EVENTS * (_ROW_BYTES + MAX_ARGS + 1) <= MAX_RUN_BYTES


def rank_file_name(rank: int) -> str:
    """`trace-rank00003.trine` for rank 3: zero-padded, so that folders list ranks in order."""
    return f"trace-rank{rank:05d}.trine"


class Encoder:
    """Makes the records of one file, which are to be written in the order they are made.

    Attributes:
        held: how many events are in the records made so far.
    """

    def __init__(self) -> None:
        self._builder = ColumnsBuilder()
        self._texts = 1  # of the table, so many are in the file; the empty text need not be
        self._threads = 0
        self._labels = 0
        self.held = 0

    def header(self, header: Header) -> bytes:
        """The first record."""
        return _record("header", {"format": FORMAT, "version": VERSION, **asdict(header)})

    def events(self, events: Sequence[TraceEvent], dropped: int) -> bytes:
        """The record of a run of events.

        Args:
            events: at most `RUN_EVENTS`.
            dropped: how many have not fitted since the recording began.
        """
        columns = self._builder.run(events)
        self.held += columns.count
        body = [_little_endian(values) for values in columns.fields.values()]
        head = {"count": columns.count, "args": columns.lines, "dropped": dropped}
        return _record("events", head | self._news(), b"".join((*body, columns.args)))

    def tables(self, dropped: int) -> bytes:
        """A record without events that has all that earlier ones put into the tables.

        After a header it stands for the records before it, which may then be left out:
        `held` is to be set to what remains.
        """
        self._texts, self._threads, self._labels = 1, 0, 0
        return _record("events", {"count": 0, "args": 0, "dropped": dropped} | self._news())

    def _news(self) -> dict[str, object]:
        built = self._builder
        news: dict[str, object] = {
            "texts": built.texts[self._texts :],
            "threads": built.threads[self._threads :],
            "labels": built.labels[self._labels :],
        }
        self._texts = len(built.texts)
        self._threads = len(built.threads)
        self._labels = len(built.labels)
        return news

    def clock(self, reading: ClockReading) -> bytes:
        """The record of a reading of the clocks."""
        return _record("clock", asdict(reading))

    def end(self, dropped: int, reason: Reason) -> bytes:
        """The last record."""
        return _record("end", asdict(End(self.held, dropped, reason)))


class Decoder:
    """Takes the records of one file in their order and checks each.

    Attributes:
        header: from the first record on.
        runs: the events.
        texts: the table of texts.
        threads: identifiers of threads.
        labels: what events have in common.
        readings: of the clocks, in their order.
        end: None until there is one.
        dropped: how many events did not fit, as last told.
    """

    def __init__(self) -> None:
        self.header: Header | None = None
        self.runs: list[Columns] = []
        self.texts = Texts()
        self.threads: list[int] = []
        self.labels: list[Label] = []
        self._table_bytes = 0
        self.readings: list[ClockReading] = []
        self.end: End | None = None
        self.dropped = 0

    def head(self, line: bytes) -> tuple[str, dict[str, object], int]:
        """What a record is, what its line says, and how many bytes follow it.

        Raises:
            ValueError: if it is no line of a record, or not one that can come here.
        """
        try:
            data = _decode(line)
        except ValueError:
            if self.header is None:
                raise _foreign() from None
            raise
        if not isinstance(data, dict) or not isinstance(data.get("record"), str):
            raise _foreign() if self.header is None else ValueError("it is not a record")
        what = str(data["record"])
        nbytes = data.get("nbytes")
        if self.header is None:
            if what != "header" or data.get("format") != FORMAT:
                raise _foreign()
            _check_version(data.get("version"))
        elif what == "header":
            raise ValueError("it is a second header")
        if self.end is not None:
            raise ValueError("there is more after the end")
        if type(nbytes) is not int or not 0 <= nbytes <= MAX_RUN_BYTES:
            raise ValueError(f"its nbytes is {short(nbytes):.40}")
        return what, data, nbytes

    def take(self, what: str, head: Mapping[str, object], body: bytearray) -> None:
        """Take a whole record. One of a kind not known here is passed over.

        Raises:
            ValueError: if it is damaged.
        """
        if what == "header":
            self.header = _header(head)
        elif what == "events":
            self._take_events(head, body)
        elif what == "clock":
            reading = ClockReading(
                _int(head, "at_ns", 0), _int(head, "offset_ns", -_INT64), _int(head, "error_ns", 0)
            )
            self.readings.append(reading)
        elif what == "end":
            reason = next((known for known in REASONS if known == head.get("reason")), None)
            if reason is None:
                raise ValueError(f"its reason is {short(head.get('reason')):.40}")
            held = sum(run.count for run in self.runs)
            self.end = End(_int(head, "events", 0), _int(head, "dropped", 0), reason)
            self.dropped = self.end.dropped
            if self.end.events != held:
                raise ValueError(
                    f"it announces {self.end.events} events, and the file holds {held}"
                )

    def _take_events(self, head: Mapping[str, object], body: bytearray) -> None:
        count, lines = _int(head, "count", 0), _int(head, "args", 0)
        self.dropped = _int(head, "dropped", 0)
        self._take_tables(head)
        if count > len(body) // _ROW_BYTES:
            raise ValueError(f"it announces {count} events in {len(body)} bytes")
        fields: dict[str, array[int] | array[float]] = {}
        at = 0
        with memoryview(body) as view:
            for name, code in STORED.items():
                column = array(code)
                size = count * column.itemsize
                column.frombytes(view[at : at + size])
                at += size
                if sys.byteorder == "big":  # pragma: no cover
                    column.byteswap()
                fields[name] = column
            args = bytes(view[at:])
        if args and (not args.isascii() or not args.endswith(b"\n")):
            raise ValueError("its attributes are not lines of JSON")
        if (found := args.count(b"\n")) != lines:
            raise ValueError(f"it announces {lines} attributes and holds {found}")
        run = Columns(count, fields, args, lines)
        if count:
            self._check(run)
        self.runs.append(run)

    def _take_tables(self, head: Mapping[str, object]) -> None:
        for text in _list(head, "texts", _is_text):
            if self.texts.find(text) >= 0:
                raise ValueError(f"it has the text {short(text):.40} a second time")
            self.texts.add(text)
            self._table_bytes += len(text)
        if self._table_bytes > MAX_TABLE_BYTES:
            raise ValueError(f"the names of the file are longer than {MAX_TABLE_BYTES} bytes")
        self.threads += _list(head, "threads", _is_thread)
        ends = [len(KINDS) if name == "kind" else len(self.texts) for name in LABEL]
        ends[LABEL.index("thread")] = len(self.threads)
        for label in _list(head, "labels", _is_label):
            for name, place, end in zip(LABEL, label, ends, strict=True):
                if place >= end:
                    raise ValueError(f"a label has {name} = {place}")
            self.labels.append(label)

    def _check(self, run: Columns) -> None:
        columns = {
            name: torch.frombuffer(run.fields[name], dtype=DTYPES[code])
            for name, code in STORED.items()
        }
        for name, first, end in (
            ("label", 0, len(self.labels)),
            ("args", -1, run.lines),
            *((name, 0, _INT64) for name in ("nbytes", "enqueue_ns", "start_ns", "end_ns")),
            ("sequence", -1, _INT64),
        ):
            low, high = (int(edge) for edge in columns[name].aminmax())
            if low < first or high >= end:
                raise ValueError(f"an event has {name} = {low if low < first else high}")
        if bool((columns["end_ns"] < columns["start_ns"]).any()):
            raise ValueError("an event ends before it starts")
        if bool((columns["start_ns"] < columns["enqueue_ns"]).any()):
            raise ValueError("an event starts before it was asked for")


def _record(what: str, head: Mapping[str, object], body: bytes = b"") -> bytes:
    line = _encode({"record": what, **head, "nbytes": len(body)})
    return line.encode("ascii") + b"\n" + body


def _little_endian(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":  # pragma: no cover
        values.byteswap()
    return values.tobytes()


def _foreign() -> ValueError:
    return ValueError(f"it is not the trace of a rank (no {FORMAT} header)")


def _check_version(version: object) -> None:
    if type(version) is not int or version != VERSION:  # True and 2.0 are not it
        raise ValueError(
            f"it has format version {short(version):.40}, and this trine-tools reads "
            f"version {VERSION}. Read it with the trine-tools that recorded it, or a newer one"
        )


def _header(data: Mapping[str, object]) -> Header:
    values: dict[str, object] = {}
    for field in fields(Header):
        value = data.get(field.name)
        # Annotations are text here, and every field is one of three types.
        if field.type == "int":
            good = type(value) is int and 0 <= value < _INT64
        elif field.type == "str":
            good = isinstance(value, str)
        else:
            good = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
        if not good:
            raise ValueError(f"its header has {field.name} = {short(value):.40}")
        values[field.name] = value
    header = Header(**values)  # type: ignore[arg-type]  # each was checked just above
    if not header.rank < header.world_size <= _MAX_RANKS:
        raise ValueError(f"its header claims rank {header.rank} of {header.world_size}")
    return header


def _int(head: Mapping[str, object], name: str, least: int) -> int:
    value = head.get(name)
    if type(value) is not int or not least <= value < _INT64:
        raise ValueError(f"its {name} is {short(value):.40}")
    return value


def _list(head: Mapping[str, object], name: str, good: Callable[[object], TypeGuard[T]]) -> list[T]:
    values = head.get(name)
    if not isinstance(values, list):
        raise ValueError(f"its {name} is {short(values):.40}")
    found: list[T] = []
    for value in values:
        if not good(value):
            raise ValueError(f"one of its {name} is {short(value):.40}")
        found.append(value)
    return found


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _is_label(value: object) -> TypeGuard[Label]:
    return (
        isinstance(value, list)
        and len(value) == len(LABEL)
        and all(type(place) is int and place >= 0 for place in value)
    )


def _is_thread(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2 * _INT64


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# ASCII, so a lone surrogate in a name stays an escape and a line stays a line.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decoder = json.JSONDecoder(parse_constant=_no_constant)


def _decode(line: bytes) -> object:
    try:
        return _decoder.decode(line.decode("ascii"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of it is not ASCII") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at column {error.colno}") from None
