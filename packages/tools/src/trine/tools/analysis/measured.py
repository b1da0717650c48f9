"""What a run is compared by: its numbers per step, each with its spread over the steps.

Of every step the mean over the ranks is taken, and the spread is that over the steps. Ranks
wait for each other, so their steps are no independent measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.analysis.breakdown import PARTS, RankBreakdown
from trine.tools.analysis.spread import Spread
from trine.tools.analysis.unit_table import NUMBERS

__all__ = ["COUNTED", "Measured", "MeasuredCollective", "measure"]

COUNTED: Final = ("sent",)
"""Parts that are counted; the others are measured, in ns."""

_FIELDS: Final = {
    "step": "total_ns",
    **{name: f"{name}_ns" for name in (*PARTS, "hidden")},
}


@dataclass(frozen=True)
class MeasuredCollective:
    """One kind of collective of one unit, per step and rank.

    Attributes:
        unit: full name of the module; "" if it belongs to none.
        operation: such as all_gather.
        numbers: by name, see `unit_table.NUMBERS`.
    """

    unit: str
    operation: str
    numbers: dict[str, Spread]


@dataclass(frozen=True)
class Measured:
    """A run, as it is compared with others.

    Attributes:
        world_size: how many ranks it had.
        ranks: how many recorded steps.
        steps: how many steps there are.
        parts: where a step's time went, in ns: `step`, all of it; what it divides into, see
            `breakdown.PARTS`; beside it `hidden`, and `between`, the gap behind it. And
            `sent`, the bytes that a rank sent. Empty if there are no steps.
        collectives: by unit and operation, in the order in which they first ran.
    """

    world_size: int
    ranks: int
    steps: int
    parts: dict[str, Spread]
    collectives: list[MeasuredCollective]


def measure(world_size: int, ranks: Sequence[RankBreakdown]) -> Measured:
    """Measure a run by where the time of its ranks' steps went.

    Args:
        world_size: how many ranks it had.
        ranks: those that were recorded.
    """
    ranks = [rank for rank in ranks if rank.has_steps]
    numbers = sorted({row.step for rank in ranks for row in rank.steps})
    if not numbers:
        return Measured(world_size, 0, 0, {}, [])
    column = {number: at for at, number in enumerate(numbers)}
    columns = [torch.tensor([column[row.step] for row in rank.steps]) for rank in ranks]
    there = torch.zeros(len(numbers), dtype=torch.float64)
    for own in columns:
        there[own] += 1
    parts = {
        name: Spread.of(
            _sums(
                columns,
                [torch.tensor([getattr(row, field) for row in rank.steps]) for rank in ranks],
                there,
            )
        )
        for name, field in _FIELDS.items()
    }
    between = [torch.tensor([row.total_ns for row in rank.between]) for rank in ranks]
    gaps = [own[: gap.numel()] for own, gap in zip(columns, between, strict=True)]
    # Behind the last step there is no gap.
    parts["between"] = Spread.of(_sums(gaps, between, there)[: max(1, len(numbers) - 1)])
    collectives = _collectives(ranks, columns, there)
    sent = torch.zeros_like(there)
    for values in collectives.values():
        sent += values["nbytes"]
    parts["sent"] = Spread.of(sent)
    return Measured(
        world_size=world_size,
        ranks=len(ranks),
        steps=len(numbers),
        parts=parts,
        collectives=[
            MeasuredCollective(
                *key, {name: Spread.of(values) for name, values in numbers_of.items()}
            )
            for key, numbers_of in collectives.items()
        ],
    )


def _sums(columns: Sequence[Tensor], values: Sequence[Tensor], there: Tensor) -> Tensor:
    """The mean over the ranks, for every step."""
    sums = torch.zeros_like(there)
    for own, rows in zip(columns, values, strict=True):
        sums.scatter_add_(0, own, rows.double())
    return sums / there


def _collectives(
    ranks: Sequence[RankBreakdown], columns: Sequence[Tensor], there: Tensor
) -> dict[tuple[str, str], dict[str, Tensor]]:
    """By unit and operation the means over the ranks, for every step; zero where it did not run."""
    keys = list(dict.fromkeys(pair for rank in ranks for pair in rank.by_unit.pairs))
    places = {key: at for at, key in enumerate(keys)}
    width = there.numel()
    sums = {name: torch.zeros(len(keys) * width, dtype=torch.float64) for name in NUMBERS}
    for rank, own in zip(ranks, columns, strict=True):
        table = rank.by_unit
        pair = torch.tensor([places[key] for key in table.pairs] or [0])[table.pair]
        at = pair * width + own[table.step]
        for name, values in sums.items():
            values.scatter_add_(0, at, table.numbers[name].double())
    means = {name: values.view(len(keys), width) / there for name, values in sums.items()}
    return {key: {name: values[at] for name, values in means.items()} for key, at in places.items()}
