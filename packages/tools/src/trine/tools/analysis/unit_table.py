"""Communication added up by FSDP unit, operation and step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.tracing.events import Events

__all__ = ["NUMBERS", "Cells", "Labels", "UnitTable", "UnitTotals"]

NUMBERS: Final = ("count", "nbytes", "in_flight_ns", "exposed_ns", "wait_ns", "hidden_ns")
"""What is added up."""

_WAIT: Final = "wait "


class Labels:
    """Which unit and operation an event belongs to, as one number.

    Args:
        events: of one rank.
    """

    def __init__(self, events: Events) -> None:
        texts = list(events.texts)
        places = {text: place for place, text in enumerate(texts)}
        named: list[int] = []
        for text in tuple(texts):
            # Who does not say the operation names the event after it: "wait all_gather".
            operation = text.removeprefix(_WAIT)
            place = places.setdefault(operation, len(texts))
            if place == len(texts):
                texts.append(operation)
            named.append(place)
        self._texts = texts
        self._named = torch.tensor(named or [0], dtype=torch.int64)
        self._events = events

    def of(self, places: Tensor) -> Tensor:
        """The number of each event at these places; int64."""
        events = self._events
        operation = events.operation[places].long()
        operation = torch.where(operation > 0, operation, self._named[events.name[places].long()])
        return events.unit[places].long() * len(self._texts) + operation

    def pairs(self, numbers: Tensor) -> list[tuple[str, str]]:
        """Unit and operation of each number."""
        width = len(self._texts)
        return [
            (self._texts[number // width], self._texts[number % width])
            for number in numbers.tolist()
        ]


@dataclass(frozen=True, eq=False)
class Cells:
    """Numbers of events, to be added up.

    Attributes:
        pairs: unit and operation, in the order in which they occur.
        pair: place in `pairs`, one for each event; int64, 1-D.
        step: place of the step, for each; int64, 1-D.
        numbers: some of `NUMBERS`, for each; int64, 1-D.
    """

    pairs: list[tuple[str, str]]
    pair: Tensor
    step: Tensor
    numbers: Mapping[str, Tensor]


@dataclass(frozen=True)
class UnitTotals:
    """Communication of one kind for one unit, of one rank, within its steps.

    Attributes:
        unit: full name of the module; "" if it belongs to none.
        operation: such as all_gather.
        count: how many were started.
        nbytes: bytes that the rank sent.
        in_flight_ns: how long they were under way, summed.
        exposed_ns: how long they blocked the training thread after all ranks had come.
        wait_ns: the same before.
        hidden_ns: how long they were under way and nothing blocked it, summed.
    """

    unit: str
    operation: str
    count: int
    nbytes: int
    in_flight_ns: int
    exposed_ns: int
    wait_ns: int
    hidden_ns: int


@dataclass(frozen=True, eq=False)
class UnitTable:
    """Communication of one rank by unit, operation and step: a row for each that occurs.

    What a collective moves and how long it is under way counts in the step in which it was
    started, how long it blocked in the step that it blocked.

    Attributes:
        pairs: unit and operation, in the order in which they were first started.
        pair: of each row, place in `pairs`; int64, 1-D.
        step: of each row, place in the rank's steps; int64, 1-D.
        numbers: for each of `NUMBERS` a number per row; int64, 1-D.
    """

    pairs: list[tuple[str, str]]
    pair: Tensor
    step: Tensor
    numbers: Mapping[str, Tensor]

    @classmethod
    def of(cls, *every: Cells) -> UnitTable:
        """Add up what may come in several parts."""
        places: dict[tuple[str, str], int] = {}
        pair = [
            torch.tensor(
                [places.setdefault(name, len(places)) for name in cells.pairs] or [0],
                dtype=torch.int64,
            )[cells.pair]
            for cells in every
        ]
        step = torch.cat([cells.step for cells in every])
        width = int(step.max()) + 1 if step.numel() else 1
        rows, inverse = torch.unique(torch.cat(pair) * width + step, return_inverse=True)
        parts = torch.split(inverse, [cells.step.numel() for cells in every])
        numbers = {name: torch.zeros_like(rows) for name in NUMBERS}
        for cells, own in zip(every, parts, strict=True):
            for name, values in cells.numbers.items():
                numbers[name].scatter_add_(0, own, values)
        return cls(list(places), rows // width, rows % width, numbers)

    def totals(self) -> list[UnitTotals]:
        """Sums over all steps, in the order of `pairs`."""
        sums = [
            torch.zeros(len(self.pairs), dtype=torch.int64)
            .scatter_add_(0, self.pair, self.numbers[name])
            .tolist()
            for name in NUMBERS
        ]
        return [
            UnitTotals(unit, operation, *row)
            for (unit, operation), *row in zip(self.pairs, *sums, strict=True)
        ]
