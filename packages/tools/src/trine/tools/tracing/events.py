"""The events of one rank in memory: a tensor per field, so that millions can be summed up.

A field of text holds places in one table, `texts`, whose first entry is the empty text.
Nothing here reads or writes files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, cast

import torch
from torch import Tensor

from trine.core.tracing import Attributes, Kind, TraceEvent
from trine.tools.tracing.attributes import StoredAttributes
from trine.tools.tracing.columns import Columns, ColumnsBuilder, Label, Texts
from trine.tools.tracing.schema import (
    COLUMNS,
    DTYPES,
    KINDS,
    LABEL,
    STORED,
    TEXT_COLUMNS,
    WELL_KNOWN,
)

__all__ = ["Events"]

_PART: Final = 4096  # events turned into objects at a time


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
    texts: Texts
    threads: Sequence[int]
    _args: StoredAttributes

    @classmethod
    def of(cls, events: Iterable[TraceEvent]) -> Events:
        """The same events as columns."""
        builder = ColumnsBuilder()
        columns = builder.run(list(events))
        return cls.join([columns], builder.texts, builder.threads, builder.labels)

    @classmethod
    def join(
        cls,
        runs: Sequence[Columns],
        texts: Texts,
        threads: Sequence[int],
        labels: Sequence[Label],
    ) -> Events:
        """The events of several runs, one after the other.

        Args:
            runs: whose places were checked.
            texts: the table of texts.
            threads: identifiers of threads.
            labels: the table of labels.
        """
        runs = [run for run in runs if run.count]
        columns = {
            name: torch.cat(
                [torch.frombuffer(run.fields[name], dtype=DTYPES[code]) for run in runs]
                or [torch.empty(0, dtype=DTYPES[code])]
            )
            for name, code in STORED.items()
        }
        # Places of attributes count within their run; from here on within the recording.
        firsts = list(accumulate((run.lines for run in runs), initial=0))
        at = 0
        for run, first in zip(runs, firsts, strict=False):
            own = columns["args"][at : at + run.count]
            own[own >= 0] += first
            at += run.count
        label = columns.pop("label")
        table = torch.tensor(labels, dtype=torch.int32).reshape(-1, len(LABEL))
        for index, name in enumerate(LABEL):
            columns[name] = table[:, index].to(DTYPES[COLUMNS[name]])[label]
        return cls(
            **columns,
            texts=texts,
            threads=threads,
            _args=StoredAttributes([run.args for run in runs], firsts),
        )

    def __len__(self) -> int:
        return int(self.start_ns.numel())

    def __iter__(self) -> Iterator[TraceEvent]:
        """The events one by one, as a sink received them. Slow: use columns for sums."""
        for first in range(0, len(self), _PART):
            part = [self._column(name)[first : first + _PART].tolist() for name in COLUMNS]
            for row in zip(*part, strict=True):
                yield self._event(dict(zip(COLUMNS, row, strict=True)))

    def __getitem__(self, index: int) -> TraceEvent:
        return self._event({name: self._column(name)[index].item() for name in COLUMNS})

    def where(self, chosen: Tensor) -> Events:
        """The events that a mask of bools, or a tensor of places, chooses."""
        columns = {name: self._column(name)[chosen] for name in COLUMNS}
        return Events(**columns, texts=self.texts, threads=self.threads, _args=self._args)

    def place(self, text: str) -> int:
        """Where a text stands in `texts`; -1, which no event has, if it does not."""
        return self.texts.find(text)

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
        asyncs = self.is_kind("async")
        begins = torch.where(asyncs, self.enqueue_ns, self.start_ns)
        ends = torch.where(asyncs, self.enqueue_ns, self.end_ns)
        for thread in range(len(self.threads)):
            # By start; of those that start together spans first, longest first. Of equal ones
            # the inner was reported first, so the order of reports is turned around.
            places = (self.thread == thread).nonzero().flatten().flip(0)
            order = _order(-ends[places], (~spans[places]).to(torch.int64), begins[places])
            places = places[order]
            found: list[int] = []
            open_: list[tuple[int, int]] = []
            for place, begin, end, span in zip(
                places.tolist(),
                begins[places].tolist(),
                ends[places].tolist(),
                spans[places].tolist(),
                strict=True,
            ):
                # What ends where this begins is over, unless this is a point at its end. What
                # ends before this does is no parent of it, nor of what follows, which starts
                # within this: so ends on the stack only fall, and a step costs no search.
                while open_ and (open_[-1][1] < end or (open_[-1][1] == begin and begin != end)):
                    open_.pop()
                found.append(open_[-1][0] if open_ else -1)
                if span:
                    open_.append((place, end))
            parents[places] = torch.tensor(found, dtype=torch.int64)
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
