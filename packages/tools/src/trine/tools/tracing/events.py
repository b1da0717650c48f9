"""The events of one rank in memory: a tensor per field, so that millions can be summed up.

A field of text holds places in one table, `texts`, whose first entry is the empty text.
Nothing here reads or writes files.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, cast

import torch
from torch import Tensor

from trine.core.tracing import Attributes, Kind, TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.tracing.schema import COLUMNS, DTYPES, KINDS, TEXT_COLUMNS, WELL_KNOWN

__all__ = ["Columns", "Events", "EventsBuilder", "Texts"]

_INT64: Final = 1 << 63
_MAX_DEPTH: Final = 8
_MAX_TEXT: Final = 10_000  # characters of a name
_MAX_ARGS: Final = 1 << 18  # characters of an event's attributes


class Texts:
    """A table of texts in which each stands once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {"": 0}

    def place(self, text: str) -> int:
        """Where the text stands; it is added if it is new."""
        return self.places.setdefault(text, len(self.places))


@dataclass(frozen=True)
class Columns:
    """A run of events as they are stored.

    Attributes:
        count: how many.
        fields: by the name of the field, an array of the type code in `COLUMNS`.
        args: JSON objects, the attributes of the events that have any; their field `args`
            holds the place here, -1 for none.
    """

    count: int
    fields: dict[str, array[int] | array[float]]
    args: list[str]


class EventsBuilder:
    """Turns reported events into columns, a run at a time.

    Attributes:
        texts: the table that the fields of text refer to; shared by all runs.
        threads: identifiers of threads, in order of appearance; the field `thread` is a
            place in it.
    """

    def __init__(self) -> None:
        self.texts = Texts()
        self.threads: dict[int, int] = {}

    def columns(self, events: Sequence[TraceEvent]) -> Columns:
        """The columns of a run of events.

        Attributes that no reader could take are written as text, numbers out of range are
        brought into it: nothing that an event carries makes a recording unreadable.
        """
        args: list[str] = []
        rows = [self._row(event, args) for event in events]
        turned = zip(*rows, strict=True) if rows else ([] for _ in COLUMNS)
        fields = {
            name: array(code, values)
            for (name, code), values in zip(COLUMNS.items(), turned, strict=True)
        }
        return Columns(len(rows), fields, args)

    def _row(self, event: TraceEvent, args: list[str]) -> tuple[float, ...]:
        place = self.texts.place
        known, other = _split(event.args)
        start_ns = _count(event.start_ns)
        place_of_args = -1
        if other:
            place_of_args = len(args)
            args.append(_encode_args(other))
        thread = event.thread & (2 * _INT64 - 1)
        return (
            KINDS.index(event.kind),
            place(str(event.name)[:_MAX_TEXT]),
            place(str(event.category)[:_MAX_TEXT]),
            place(str(event.unit)[:_MAX_TEXT]),
            place(_label(known.get("group"))),
            place(_label(known.get("op"))),
            place(_label(known.get("dtype"))),
            place(_label(known.get("backend"))),
            place(_label(known.get("stream"))),
            self.threads.setdefault(thread, len(self.threads)),
            place_of_args,
            max(-_INT64, min(int(event.step), _INT64 - 1)),
            _integer(known.get("seq"), -1),
            _count(event.nbytes),
            min(_integer(known.get("enqueue_ns"), start_ns), start_ns),
            start_ns,
            max(start_ns, _count(event.end_ns)),
            _float(event.value),
        )


@dataclass(frozen=True, eq=False)
class Events:
    """The events of one rank, in the order in which they were reported.

    That order is the order of their ends on each thread. Tensors are on the CPU, 1-D, all
    of one length, and not to be changed.

    Attributes:
        kind: place of the kind in `KINDS`; uint8.
        name, category, unit, group, operation, dtype, backend, stream: place of the text in
            `texts`; int32. 0, the empty text, means that there is none.
        thread: place of the thread in `threads`; int32.
        step: number of the step, -1 before the first; int64.
        sequence: which of the group's collectives it is, -1 for none; int64.
        nbytes: bytes that this rank sent; int64.
        enqueue_ns: when asynchronous work was asked for; `start_ns` otherwise; int64.
        start_ns: when it started, by the rank's own clock; int64.
        end_ns: when it ended; never before `start_ns`; int64.
        value: of counters, 0 otherwise; float64.
        texts: the table of texts.
        threads: identifiers of threads.
    """

    kind: Tensor
    name: Tensor
    category: Tensor
    unit: Tensor
    group: Tensor
    operation: Tensor
    dtype: Tensor
    backend: Tensor
    stream: Tensor
    thread: Tensor
    args: Tensor
    step: Tensor
    sequence: Tensor
    nbytes: Tensor
    enqueue_ns: Tensor
    start_ns: Tensor
    end_ns: Tensor
    value: Tensor
    texts: Sequence[str]
    threads: Sequence[int]
    _args: _Attributes

    @classmethod
    def of(cls, events: Iterable[TraceEvent]) -> Events:
        """The same events as columns."""
        builder = EventsBuilder()
        columns = builder.columns(list(events))
        return cls.join([columns], list(builder.texts.places), list(builder.threads))

    @classmethod
    def join(cls, runs: Sequence[Columns], texts: Sequence[str], threads: Sequence[int]) -> Events:
        """The events of several runs, one after the other.

        Args:
            runs: whose fields were checked against `texts` and `threads`.
            texts: the table of texts.
            threads: identifiers of threads.
        """
        held = [run for run in runs if run.count]
        tensors = {
            name: torch.cat(
                [torch.frombuffer(run.fields[name], dtype=DTYPES[code]) for run in held]
                or [torch.empty(0, dtype=DTYPES[code])]
            )
            for name, code in COLUMNS.items()
        }
        # Places of attributes count within their run; from here on within the recording.
        firsts = [0, *accumulate(len(run.args) for run in runs)]
        at = 0
        for run, first in zip(runs, firsts, strict=False):
            own = tensors["args"][at : at + run.count]
            own[own >= 0] += first
            at += run.count
        return cls(
            **tensors,
            texts=texts,
            threads=threads,
            _args=_Attributes([run.args for run in runs], firsts),
        )

    def __len__(self) -> int:
        return int(self.start_ns.numel())

    def __iter__(self) -> Iterator[TraceEvent]:
        """The events one by one, as a sink received them. Slow: use columns for sums."""
        step = 4096  # lists of a whole recording would take gigabytes
        for first in range(0, len(self), step):
            part = [self._column(name)[first : first + step].tolist() for name in COLUMNS]
            for row in zip(*part, strict=True):
                yield self._event(dict(zip(COLUMNS, row, strict=True)))

    def __getitem__(self, index: int) -> TraceEvent:
        return self._event(
            {name: cast(Tensor, getattr(self, name))[index].item() for name in COLUMNS}
        )

    def where(self, chosen: Tensor) -> Events:
        """The events that a mask of bools, or a tensor of places, chooses."""
        columns = {name: self._column(name)[chosen] for name in COLUMNS}
        return Events(**columns, texts=self.texts, threads=self.threads, _args=self._args)

    def place(self, text: str) -> int:
        """Where a text stands in `texts`; -1, which no event has, if it does not."""
        try:
            return list(self.texts).index(text) if text else 0
        except ValueError:
            return -1

    def is_kind(self, kind: Kind) -> Tensor:
        """A mask of the events of that kind."""
        return self.kind == KINDS.index(kind)

    def is_category(self, category: str) -> Tensor:
        """A mask of the events of that category."""
        return self.category == self.place(category)

    def attributes(self, index: int) -> Attributes:
        """Further attributes of one event; those with a field of their own are left out.

        Raises:
            TraceFileError: if the file has no attributes there.
        """
        place = int(self.args[index])
        return {} if place < 0 else self._args.decode(place)

    def parents(self) -> Tensor:
        """For each event the place of the span it lies in, -1 for none; int64.

        A span's parent is the innermost other span of its thread that it lies within, and so
        is that of an instant or a counter. Asynchronous work has the span it was enqueued in.
        """
        parents = torch.full((len(self),), -1, dtype=torch.int64)
        spans = self.is_kind("span")
        begins = torch.where(spans, self.start_ns, self.enqueue_ns)
        for thread in range(len(self.threads)):
            places = (self.thread == thread).nonzero().flatten()
            # By start; of those that start together spans first, longest first. Of equal ones
            # the inner was reported first, so the order of reports is turned around.
            places = places.flip(0)
            order = _order(-self.end_ns[places], (~spans[places]).to(torch.int64), begins[places])
            places = places[order]
            open_: list[tuple[int, int]] = []
            for place, begin, end, span in zip(
                places.tolist(),
                begins[places].tolist(),
                self.end_ns[places].tolist(),
                spans[places].tolist(),
                strict=True,
            ):
                # What ends where this begins is over, unless this is a point at its end.
                while open_ and open_[-1][1] <= begin and not (open_[-1][1] == begin == end):
                    open_.pop()
                inside = [at for at, until in open_ if not span or end <= until]
                if inside:
                    parents[place] = inside[-1]
                if span:
                    open_.append((place, end))
        return parents

    def _column(self, name: str) -> Tensor:
        return cast(Tensor, getattr(self, name))

    def _event(self, row: dict[str, float]) -> TraceEvent:
        texts = self.texts
        args: dict[str, object] = {}
        for name, column in WELL_KNOWN.items():
            place = int(row[column])
            if column in TEXT_COLUMNS:
                if place:
                    args[name] = texts[place]
            elif column == "sequence":
                if place >= 0:
                    args[name] = place
            elif place != row["start_ns"]:
                args[name] = place
        if row["args"] >= 0:
            args.update(self._args.decode(int(row["args"])))
        event = TraceEvent(
            cast(Kind, KINDS[int(row["kind"])]),
            texts[int(row["name"])],
            texts[int(row["category"])],
            texts[int(row["unit"])],
            int(row["nbytes"]),
            args or None,
            int(row["start_ns"]),
            int(row["end_ns"]),
            row["value"],
        )
        event.step = int(row["step"])
        event.thread = self.threads[int(row["thread"])]
        return event


def _order(*keys: Tensor) -> Tensor:
    """Places in the order of the last key, of the one before where that is equal, and so on."""
    order = torch.arange(keys[0].numel())
    for key in keys:
        order = order[key[order].argsort(stable=True)]
    return order


class _Attributes:
    """The attributes of a recording's events, kept as the text they were read as."""

    def __init__(self, runs: Sequence[Sequence[str]], firsts: Sequence[int]) -> None:
        self._runs = runs
        self._firsts = firsts

    def decode(self, place: int) -> Attributes:
        run = bisect_right(self._firsts, place) - 1
        try:
            found = json.loads(self._runs[run][place - self._firsts[run]])
        except (ValueError, RecursionError) as error:
            raise TraceFileError(f"The attributes of an event are not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise TraceFileError("The attributes of an event are not a JSON object.")
        return found


def _split(args: Attributes | None) -> tuple[Mapping[str, object], dict[str, object]]:
    """Attributes with a field of their own, and the others."""
    if not args:
        return {}, {}
    other = {name: value for name, value in args.items() if name not in WELL_KNOWN}
    return args, other


def _label(value: object) -> str:
    return "" if value is None else _text(value)[:_MAX_TEXT]


def _integer(value: object, otherwise: int) -> int:
    return value if type(value) is int and 0 <= value < _INT64 else otherwise


def _float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # whatever a sink's caller put there
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _count(value: float) -> int:
    """The nearest integer that a reader takes for a time or a size."""
    return max(0, min(int(value), _INT64 - 1))


def _encode_args(args: Mapping[str, object]) -> str:
    text = _encode({_text(name): _plain(value) for name, value in args.items()})
    return text if len(text) <= _MAX_ARGS else _encode({"left_out": f"{len(text)} bytes"})


def _plain(value: object, depth: int = 0) -> object:
    """What JSON can hold and every reader can take; anything else as its text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {_text(name): _plain(value[name], depth + 1) for name in value}
        if isinstance(value, (list, tuple)):
            return [_plain(item, depth + 1) for item in value]
    return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # whatever a foreign __str__ does, the other events are worth keeping
        return f"<{type(value).__name__}>"


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
