"""From reported events to columns, a run at a time: what a recorder does beside training.

It runs on a thread that shares the interpreter with the training, so its cost per event
matters. Most events look like an earlier one but for their times: what is alike is looked up
by one key and stored once, as a label.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import gt
from typing import Final, TypeGuard, overload

from trine.core.tracing import Attributes, TraceEvent
from trine.tools.tracing.attributes import MAX_ARGS, encode_attributes, text_of
from trine.tools.tracing.schema import KINDS, STORED, WELL_KNOWN

__all__ = ["MAX_TABLE_BYTES", "MAX_TEXT", "Columns", "ColumnsBuilder", "Label", "Texts"]

MAX_TEXT: Final = 1_000
"""Characters of a name."""

MAX_TABLE_BYTES: Final = 16 << 20
"""How long the names of a recording may be together, as JSON."""

Label = tuple[int, ...]
"""Places of an event's kind, texts and thread, in the order of `schema.LABEL`."""

_TOO_MANY: Final = "(one of too many names)"
_MAX_KNOWN: Final = 1 << 16  # labels that are looked up; more are stored again
_MAX_SHAPES: Final = 1 << 12
_INT64: Final = 1 << 63
_NEVER: Final = _INT64 - 1  # later than any start
_LABEL_ARGS: Final = ("group", "op", "dtype", "backend", "stream")


class Texts(Sequence[str]):
    """A table of texts in which each stands once; the first is the empty one."""

    def __init__(self) -> None:
        self._texts = [""]
        self._places = {"": 0}

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._texts[index]

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: str) -> int:
        """Where the text stands, at the end if it is new."""
        place = self._places.setdefault(text, len(self._texts))
        if place == len(self._texts):
            self._texts.append(text)
        return place

    def find(self, text: str) -> int:
        """Where the text stands, -1 if it does not."""
        return self._places.get(text, -1)


@dataclass(frozen=True)
class Columns:
    """A run of events as they are stored.

    Attributes:
        count: how many.
        fields: by the name of the field, an array of the type code in `schema.STORED`.
        args: lines of JSON, the attributes of the events that have any; their field `args`
            holds the place of a line, -1 for none.
        lines: how many.
    """

    count: int
    fields: dict[str, array[int] | array[float]]
    args: bytes
    lines: int


class ColumnsBuilder:
    """Turns reported events into columns.

    Attributes:
        texts: the table that labels refer to; shared by all runs.
        threads: identifiers of threads, in order of appearance.
        labels: what is alike in many events; the field `label` is a place in it.
    """

    def __init__(self) -> None:
        self.texts = Texts()
        self.threads: list[int] = []
        self.labels: list[Label] = []
        self._room = MAX_TABLE_BYTES
        self._known: dict[object, int] = {}
        self._shapes: dict[tuple[object, ...], tuple[tuple[object, ...], str]] = {}
        self._thread_places: dict[int, int] = {}

    def run(self, events: Sequence[TraceEvent]) -> Columns:
        """The columns of a run of events.

        Attributes that no reader could take are written as text, numbers out of range are
        brought into it: nothing that an event carries makes a recording unreadable.
        """
        labels: list[int] = []
        places: list[int] = []
        sequences: list[int] = []
        enqueued: list[int] = []
        lines: list[str] = []
        known = self._known
        for event in events:
            if args := event.args:
                label, sequence, enqueue_ns, line = self._with_args(event, args)
                labels.append(label)
                sequences.append(sequence)
                enqueued.append(enqueue_ns)
                places.append(len(lines) if line else -1)
                if line:
                    lines.append(line)
                continue
            key = (event.kind, event.name, event.unit, event.category, event.thread)
            try:
                labels.append(known[key])
            except (KeyError, TypeError):  # new, or a name that cannot be looked up
                labels.append(self._label(event, key))
            sequences.append(-1)
            enqueued.append(_NEVER)
            places.append(-1)
        starts = _integers([event.start_ns for event in events])
        ends = _integers([event.end_ns for event in events])
        if any(map(gt, starts, ends)):
            ends = array("q", map(max, starts, ends))
        fields: dict[str, array[int] | array[float]] = {
            "step": _integers([event.step for event in events], -_INT64),
            "sequence": array("q", sequences),
            "nbytes": _integers([event.nbytes for event in events]),
            "enqueue_ns": array("q", map(min, enqueued, starts)),
            "start_ns": starts,
            "end_ns": ends,
            "value": _floats([event.value for event in events]),
            "label": array("i", labels),
            "args": array("i", places),
        }
        assert fields.keys() == STORED.keys()
        text = "\n".join(lines) + "\n" if lines else ""
        return Columns(len(events), fields, text.encode("ascii"), len(lines))

    def _with_args(self, event: TraceEvent, args: Attributes) -> tuple[int, int, int, str]:
        """Label, sequence number, time of enqueueing and a line of JSON, which may be empty."""
        try:
            get = args.get
            key = (
                event.kind,
                event.name,
                event.unit,
                event.category,
                event.thread,
                get("group"),
                get("op"),
                get("dtype"),
                get("backend"),
                get("stream"),
            )
            try:
                label = self._known[key]
            except (KeyError, TypeError):
                label = self._label(event, key)
            others, template = self._shapes.get(names := tuple(args)) or self._shape(names)
            if (sequence := get("seq")) is None:
                sequence = -1
            elif not _is_count(sequence):
                sequence, others, template = -1, (*others, "seq"), ""
            if (enqueue_ns := get("enqueue_ns")) is None:
                enqueue_ns = _NEVER
            elif not _is_count(enqueue_ns):
                enqueue_ns, others, template = _NEVER, (*others, "enqueue_ns"), ""
            line = _line(template, others, args) if others else ""
        except Exception:  # a foreign mapping may do anything; the event is worth keeping
            return self._label(event, None), -1, _NEVER, ""
        return label, sequence, enqueue_ns, line

    def _shape(self, names: tuple[object, ...]) -> tuple[tuple[object, ...], str]:
        """Of attributes with these names those without a field, and a template for integers."""
        others = tuple(name for name in names if name not in WELL_KNOWN)
        pairs = ",".join(f"{json.dumps(text_of(name)).replace('%', '%%')}:%d" for name in others)
        shape = others, f"{{{pairs}}}"
        if len(pairs) > MAX_ARGS // 2 or any(type(name) is not str for name in names):
            shape = others, ""
        if len(self._shapes) < _MAX_SHAPES:
            self._shapes[names] = shape
        return shape

    def _label(self, event: TraceEvent, key: tuple[object, ...] | None) -> int:
        """Store a label and remember it under its key."""
        args = key[5:] if key is not None and len(key) > 5 else (None,) * len(_LABEL_ARGS)
        label = (
            KINDS.index(event.kind) if event.kind in KINDS else KINDS.index("instant"),
            self._text(event.name),
            self._text(event.category),
            self._text(event.unit),
            *(0 if value is None else self._text(value) for value in args),
            self._thread(event.thread),
        )
        self.labels.append(label)
        if key is not None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            with suppress(TypeError):  # one that cannot be looked up is stored each time
                self._known[key] = len(self.labels) - 1
        return len(self.labels) - 1

    def _text(self, value: object) -> int:
        text = text_of(value)[:MAX_TEXT]
        if (place := self.texts.find(text)) >= 0:
            return place
        self._room -= len(json.dumps(text)) + 1
        return self.texts.add(text if self._room >= 0 else _TOO_MANY)

    def _thread(self, thread: int) -> int:
        place = self._thread_places.setdefault(thread, len(self.threads))
        if place == len(self.threads):
            self.threads.append(thread & (2 * _INT64 - 1))
        return place


def _line(template: str, names: tuple[object, ...], args: Attributes) -> str:
    values = tuple([args[name] for name in names])  # type: ignore[index]  # from the mapping itself
    if template:
        for value in values:
            if type(value) is not int or not -_INT64 <= value < _INT64:
                break
        else:
            return template % values
    return encode_attributes(dict(zip(names, values, strict=True)))


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _INT64


def _integers(values: list[int], least: int = 0) -> array[int]:
    """Values as they are, or, if one does not fit, each brought into the range."""
    try:
        made = array("q", values)
        if not made or min(made) >= least:
            return made
    except (TypeError, OverflowError):
        pass
    return array("q", [_into_range(value, least) for value in values])


def _into_range(value: object, least: int) -> int:
    try:
        return max(least, min(int(value), _INT64 - 1))  # type: ignore[call-overload, no-any-return]  # whatever a caller put there
    except (TypeError, ValueError, OverflowError):
        return max(least, 0)


def _floats(values: list[float]) -> array[float]:
    try:
        return array("d", values)
    except (TypeError, OverflowError):
        return array("d", [_float(value) for value in values])


def _float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # whatever a caller put there
    except (TypeError, ValueError, OverflowError):
        return float("nan")
