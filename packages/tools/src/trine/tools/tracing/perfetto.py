"""Write traces as Perfetto protobuf, for ui.perfetto.dev and the trace processor.

One track per rank, in the order of ranks: `child_ordering` and `sibling_order_rank` say so,
which the Chrome format has no working way to do. It holds what the thread that trains did, so
that this is seen while the tracks below it, one per lane and counter, are folded. Slices of the
same collective are joined by a flow, whose arrows lead from the rank that started first to
the one that started last.

The field numbers are those of `protos/perfetto/trace` in Perfetto's repository.

Note [One lane after the other]: packets need not come in the order of time, readers sort
them. Those of equal time keep the order of the file, so within a lane the end of a slice
stands before the begin of the next, and that of an inner one before that of its outer one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from trine.tools.errors import TraceFileError
from trine.tools.text import printable
from trine.tools.tracing.aligned import aligned_events, clock_words
from trine.tools.tracing.clock import align
from trine.tools.tracing.events import Events
from trine.tools.tracing.lanes import lanes_of
from trine.tools.tracing.protobuf import double, fixed64, integer, message, text, varint
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.schema import KINDS, TEXT_COLUMNS
from trine.tools.tracing.write import written_beside

__all__ = ["write_perfetto"]

# Fields of Trace, TracePacket, TrackDescriptor and so on, by the name of their message.
_packet = partial(message, 1)
_SEQUENCE, _TRACK_EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 10, 11, 12, 13, 60
_UUID, _NAME, _PARENT, _COUNTER, _CHILD_ORDERING, _ORDER_RANK, _DESCRIPTION = 1, 2, 5, 8, 11, 12, 14
_CATEGORY, _ANNOTATION, _TYPE, _NAME_IID, _TRACK, _VALUE, _FLOW = 3, 4, 9, 10, 11, 44, 47
_BEGIN, _END, _INSTANT, _COUNT = 1, 2, 3, 4
_PACKET_TAG, _TIMESTAMP_TAG, _EVENT_TAG = b"\x0a", b"\x40", b"\x5a"  # with their type
_EXPLICIT: Final = 3
_CLEARED, _NEEDED = 1, 2
_SIZE_BYTES: Final = 3

# Tables of strings of a sequence, by their field in InternedData.
_CATEGORIES, _NAMES, _ANNOTATION_NAMES = 1, 2, 3

_ROOT: Final = 1
_PART: Final = 1 << 15
_MAX_KNOWN: Final = 1 << 12
_LABEL: Final = ("kind", *TEXT_COLUMNS)
_FURTHER: Final = ("start_ns", "end_ns", "enqueue_ns", "step", "sequence", "nbytes", "args")
_INSTANT_KIND, _ASYNC_KIND = KINDS.index("instant"), KINDS.index("async")
_MAX_SEQUENCE: Final = (1 << 40) - 1


def write_perfetto(traces: Sequence[RankTrace], out: Path) -> None:
    """Write the timeline of all ranks to one file of Perfetto's format.

    Args:
        traces: in the order of their ranks, as `read_traces` returns them.
        out: replaced if it exists, once the new file is complete.

    Raises:
        TraceFileError: if it cannot be written.
    """
    try:
        with written_beside(out) as file:
            for packet in _packets(traces):
                file.write(packet)
    except OSError as error:
        raise TraceFileError(
            f"The timeline cannot be written to {printable(str(out))}: {error.strerror or error}."
        ) from error


def _packets(traces: Sequence[RankTrace]) -> Iterator[bytes]:
    alignment = align(traces)
    uuids = count(_ROOT)
    yield _track(next(uuids), None, 0, "Ranks", description=alignment.note)
    groups: dict[str, int] = {}  # shared by the ranks, so that flows have the same number
    for trace, events in aligned_events(traces, alignment):
        about = (
            trace.header.host,
            f"pid {trace.header.pid}",
            clock_words(alignment, trace.header.rank),
        )
        yield from _Rank(trace.header.rank, events, uuids, groups).packets(about)


class _Rank:
    """The packets of one rank: one sequence, with strings interned for it."""

    def __init__(
        self, rank: int, events: Events, uuids: Iterator[int], groups: dict[str, int]
    ) -> None:
        self._rank = rank
        self._events = events
        self._uuids = uuids
        self._groups = groups
        self._common = integer(_SEQUENCE, rank + 1) + integer(_FLAGS, _NEEDED)
        self._interned: dict[tuple[int, str], int] = {}
        self._new: list[bytes] = []
        self._labels: dict[tuple[int, ...], tuple[bytes, int]] = {}
        self._numbers: dict[tuple[str, int], bytes] = {}

    def packets(self, about: Sequence[str]) -> Iterator[bytes]:
        own, words = next(self._uuids), ", ".join(filter(None, about))
        yield _track(own, _ROOT, self._rank, f"rank {self._rank}", description=words)
        yield _packet(integer(_SEQUENCE, self._rank + 1) + integer(_FLAGS, _CLEARED))
        order = count()
        for index, lane in enumerate(lanes_of(self._events)):
            uuid = own
            if index or lane.label != "main":
                uuid = next(self._uuids)
                yield _track(uuid, own, next(order), lane.label)
            yield from self._lane(uuid, lane.places)
        for name, curves in _counters(self._events).items():
            # A counter of many units is one track, which folds theirs.
            shared = next(self._uuids)
            nbytes = _SIZE_BYTES if name.startswith("memory.") else 0
            alone = list(curves) == [""]
            yield _track(shared, own, next(order), name, counter=nbytes if alone else None)
            for place, (unit, places) in enumerate(curves.items()):
                uuid = shared
                if not alone:
                    uuid = next(self._uuids)
                    yield _track(uuid, shared, place, unit or "(no unit)", counter=nbytes)
                yield from self._curve(uuid, places)

    def _lane(self, uuid: int, places: Tensor) -> Iterator[bytes]:
        """See Note [One lane after the other]."""
        events = self._events
        track = integer(_TRACK, uuid)
        end_rest = self._common + message(_TRACK_EVENT, integer(_TYPE, _END) + track)
        open_: list[int] = []
        columns = [getattr(events, name) for name in (*_LABEL, *_FURTHER)]
        for part in torch.split(places, _PART):
            lists = [column[part].tolist() for column in columns]
            labels = zip(*lists[: len(_LABEL)], strict=True)
            rows = zip(part.tolist(), labels, *lists[len(_LABEL) :], strict=True)
            packets: list[bytes] = []
            for place, label, start, end, enqueued, step, sequence, nbytes, args in rows:
                while open_ and open_[-1] <= start:
                    packets.append(_at(open_.pop(), end_rest))
                fixed, flows = self._labels.get(label) or self._label(label)
                content = fixed + track
                if step >= 0:
                    content += self._number("step", step)
                if nbytes:
                    content += self._number("nbytes", nbytes)
                if sequence >= 0:
                    content += self._number("seq", sequence)
                    if flows:
                        content += fixed64(_FLOW, flows | sequence & _MAX_SEQUENCE)
                if enqueued < start:
                    content += self._annotation("queued_ns", integer(4, start - enqueued))
                if args >= 0:
                    content += self._attributes(place)
                if self._new:
                    packets.append(_packet(self._common + message(_INTERNED, b"".join(self._new))))
                    self._new.clear()
                packets.append(
                    _at(start, self._common + _EVENT_TAG + varint(len(content)) + content)
                )
                if label[0] != _INSTANT_KIND:
                    open_.append(end)
            yield b"".join(packets)
        while open_:
            yield _at(open_.pop(), end_rest)

    def _curve(self, uuid: int, places: Tensor) -> Iterator[bytes]:
        start = integer(_TYPE, _COUNT) + integer(_TRACK, uuid)
        for part in torch.split(places, _PART):
            times = self._events.start_ns[part].tolist()
            for at, value in zip(times, self._events.value[part].tolist(), strict=True):
                yield _at(at, self._common + message(_TRACK_EVENT, start + double(_VALUE, value)))

    def _label(self, label: tuple[int, ...]) -> tuple[bytes, int]:
        """What events of a label have in common, and their flows' high bits, 0 for no flows."""
        texts = self._events.texts
        kind, name, category, unit, group, operation, dtype, backend, stream = label
        shown = f"{texts[name]} {texts[unit]}" if unit else texts[name]
        content = integer(_TYPE, _INSTANT if kind == _INSTANT_KIND else _BEGIN)
        content += integer(_NAME_IID, self._iid(_NAMES, shown))
        if category:
            content += integer(_CATEGORY, self._iid(_CATEGORIES, texts[category]))
        for key, place in (
            ("unit", unit),
            ("group", group),
            ("op", operation),
            ("dtype", dtype),
            ("backend", backend),
            ("stream", stream),
        ):
            if place:
                content += self._annotation(key, text(6, texts[place]))
        bits = 0
        if group and kind == _ASYNC_KIND:
            bits = self._groups.setdefault(texts[group], len(self._groups) + 1) << 40
        self._labels[label] = content, bits
        return content, bits

    def _attributes(self, place: int) -> bytes:
        return b"".join(
            self._annotation(name, _value(value))
            for name, value in self._events.attributes(place).items()
        )

    def _number(self, key: str, number: int) -> bytes:
        # Steps and sizes come by the thousand.
        known = self._numbers.get((key, number))
        if known is None:
            if len(self._numbers) >= _MAX_KNOWN:
                self._numbers.clear()
            known = self._annotation(key, integer(4, number))
            self._numbers[key, number] = known
        return known

    def _annotation(self, key: str, value: bytes) -> bytes:
        return message(_ANNOTATION, integer(1, self._iid(_ANNOTATION_NAMES, key)) + value)

    def _iid(self, table: int, content: str) -> int:
        known = self._interned.get((table, content))
        if known is None:
            known = self._interned[table, content] = len(self._interned) + 1
            self._new.append(message(table, integer(1, known) + text(2, content)))
        return known


def _counters(events: Events) -> dict[str, dict[str, Tensor]]:
    """Name and unit to the places, in the order of time, of each curve; as they first occur."""
    # A curve has no place for NaN and infinity.
    chosen = (events.is_kind("counter") & events.value.isfinite()).nonzero().flatten()
    chosen = chosen[events.start_ns[chosen].argsort(stable=True)]
    keys = events.name[chosen].long() * len(events.texts) + events.unit[chosen]
    curves: dict[str, dict[str, Tensor]] = {}
    order = keys.argsort(stable=True)
    _, counts = torch.unique_consecutive(keys[order], return_counts=True)
    parts = torch.split(chosen[order], counts.tolist())
    for places in sorted(parts, key=lambda own: int(events.start_ns[own[0]])):
        name, unit = int(events.name[places[0]]), int(events.unit[places[0]])
        curves.setdefault(events.texts[name], {})[events.texts[unit]] = places
    return curves


def _track(
    uuid: int,
    parent: int | None,
    order: int,
    name: str,
    *,
    description: str = "",
    counter: int | None = None,
) -> bytes:
    content = integer(_UUID, uuid) + text(_NAME, name)
    if parent is not None:
        content += integer(_PARENT, parent)
    if description:
        content += text(_DESCRIPTION, description)
    if counter is not None:
        content += message(_COUNTER, integer(3, counter) if counter else b"")
    content += integer(_CHILD_ORDERING, _EXPLICIT) + integer(_ORDER_RANK, order)
    return _packet(message(_DESCRIPTOR, content))


def _at(at_ns: int, rest: bytes) -> bytes:
    """A packet with a time; written out, because there are two for each slice."""
    content = _TIMESTAMP_TAG + varint(at_ns) + rest
    return _PACKET_TAG + varint(len(content)) + content


def _value(value: object) -> bytes:
    """The field of a debug annotation that holds a value."""
    if isinstance(value, bool):
        return integer(2, value)
    if isinstance(value, int):
        return integer(4, value)
    if isinstance(value, float):
        return double(5, value)
    return text(6, value if isinstance(value, str) else json.dumps(value))
