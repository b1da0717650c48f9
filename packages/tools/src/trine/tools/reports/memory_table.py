"""Show the memory of a run to a person."""

from __future__ import annotations

import sys
from typing import TextIO

from trine.tools.analysis.advice import KINDS
from trine.tools.analysis.memory import MemoryUse, UnitMemory
from trine.tools.reports.tables import print_table
from trine.tools.text import format_nbytes, printable

__all__ = ["print_memory"]

# Each in up to two lines, so that the table fits 80 columns.
_TITLES = {
    "sharded": "shards",
    "unsharded": "whole",
    "gradients": "grads",
    "optimizer": "state",
    "activations": "activa-\ntions",
    "communication": "buffers",
}


def print_memory(use: MemoryUse, file: TextIO | None = None) -> None:
    """Print the peak, what it is made of, and one line per unit.

    Args:
        use: what to show.
        file: where; standard output if None.
    """
    file = file or sys.stdout
    lines = [printable(use.explained)]
    if use.advice:
        lines.append(use.advice)
    if len(use.ranks) > 1:
        each = ", ".join(f"{peak.rank}: {format_nbytes(peak.nbytes)}" for peak in use.ranks[:16])
        more = f", and {len(use.ranks) - 16} more" if len(use.ranks) > 16 else ""
        lines.append(f"peaks by rank: {each}{more}")
    for peak in use.ranks:
        if peak.rank == use.worst and peak.allocated is not None:
            rest = peak.allocated - peak.nbytes
            lines.append(
                f"allocated in all {format_nbytes(peak.allocated)}"
                + (f", {format_nbytes(rest)} of it for what is not listed" if rest > 0 else "")
            )
    if use.missing:
        names = ", ".join(KINDS[kind] for kind in use.missing)
        lines.append(
            f"not recorded: {names}; to record what there is of it, use trine trace run --memory, "
            "or profile(memory=True)"
        )
    if not use.units:
        print_table(lines, [], [], file)
        return
    lines.append(f"below: of rank {use.worst}, the most at any moment; at peak: all at that moment")
    shown = [kind for kind in _TITLES if any(unit.most.get(kind) for unit in use.units)]
    rows = [_row(unit, shown) for unit in use.units]
    total = sum(sum(unit.at_peak.values()) for unit in use.units)
    rows.append(["total", *("" for _ in shown), format_nbytes(total)])
    print_table(lines, ["unit", *(_TITLES[kind] for kind in shown), "at peak"], rows, file)


def _row(unit: UnitMemory, shown: list[str]) -> list[str]:
    cells = [format_nbytes(unit.most[kind]) if kind in unit.most else "" for kind in shown]
    name = printable(unit.unit) or "(no unit)"
    return [name, *cells, format_nbytes(sum(unit.at_peak.values()))]
