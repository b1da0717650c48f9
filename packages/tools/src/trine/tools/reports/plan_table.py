"""Show plans to a person, several meshes side by side, and to programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import groupby
from typing import Any, TextIO

from trine.core.planning import Plan, UnitPlan, Usage
from trine.tools.analysis.advice import KINDS, advice
from trine.tools.reports.tables import print_table
from trine.tools.text import format_nbytes, printable

__all__ = ["plan_data", "print_plans", "verdict"]

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def print_plans(
    plans: Sequence[Plan], title: str, memory: int | None = None, file: TextIO | None = None
) -> None:
    """Print what each plan takes, and of a single one also what its units do.

    Args:
        plans: of one model on several meshes.
        title: what is planned, printable.
        memory: bytes that a rank has, if known.
        file: where; standard output if None.
    """
    file = file or sys.stdout
    first = plans[0]
    units = "1 unit" if len(first.units) == 1 else f"{len(first.units)} units"
    lines = [f"{title}: {_count(first.parameters)} parameters in {units}"]
    for plan in plans:
        lines.append(
            f"{_mesh(plan)}: {format_nbytes(plan.peak.total)} per rank at most, "
            + printable(plan.peak_at)
        )
        if memory is not None:
            lines.append(f"  {verdict(plan, memory)}")
    lines += [f"({note})" for note in first.notes]
    print_table(lines, ["per rank, at most", *map(_mesh, plans)], _rows(plans), file)
    if len(plans) == 1:
        print(file=file)
        header = ["unit", "parameters", "shard", "whole", "gradients", "state", "activations"]
        rows = [_unit_row(list(units)) for _, units in groupby(first.units, _alike)]
        print_table(
            ["of each unit, the most at any moment:"], [*header, "sent\na step"], rows, file
        )


def verdict(plan: Plan, memory: int) -> str:
    """Whether a plan fits, in a sentence, and what to do if it does not."""
    spare = memory - plan.peak.total
    if spare >= 0:
        return f"fits {format_nbytes(memory)} with {format_nbytes(spare)} to spare"
    return (
        f"does not fit {format_nbytes(memory)}: {format_nbytes(-spare)} too much. "
        f"{advice(asdict(plan.peak), offloads=plan.request.offload)}"
    )


def plan_data(plans: Sequence[Plan], memory: int | None = None) -> dict[str, Any]:
    """The same as JSON knows it; sizes in bytes."""
    made = []
    for plan in plans:
        request = {f.name: getattr(plan.request, f.name) for f in fields(plan.request)}
        for name in ("param_dtype", "reduce_dtype"):
            dtype = request[name]
            request[name] = None if dtype is None else str(dtype).removeprefix("torch.")
        request["inputs"] = [
            {"shape": list(each.shape), "dtype": str(each.dtype).removeprefix("torch.")}
            for each in plan.request.inputs
        ]
        data: dict[str, Any] = {
            "request": request,
            "parameters": plan.parameters,
            "peak": _usage_data(plan.peak),
            "peak_at": plan.peak_at,
            "between_steps": _usage_data(plan.between_steps),
            "host": _usage_data(plan.host),
            "sent": plan.sent,
            "units": [{**asdict(unit), "most": _usage_data(unit.most)} for unit in plan.units],
            "notes": list(plan.notes),
        }
        if memory is not None:
            data["memory"] = memory
            data["fits"] = plan.peak.total <= memory
            data["verdict"] = verdict(plan, memory)
        made.append(data)
    return {"format": "trine-plan", "version": 1, "plans": made}


def _usage_data(usage: Usage) -> dict[str, int]:
    return {**asdict(usage), "total": usage.total}


def _mesh(plan: Plan) -> str:
    copies = f"replicate={plan.request.replicate}," if plan.request.replicate > 1 else ""
    return f"{copies}shard={plan.request.shard}"


def _rows(plans: Sequence[Plan]) -> list[list[str]]:
    rows = []
    for kind, words in KINDS.items():
        if kind == "activations" and not plans[0].request.inputs:
            rows.append([words, *("not counted" for _ in plans)])
            continue
        rows.append([words, *(format_nbytes(getattr(plan.peak, kind)) for plan in plans)])
    rows.append(["total", *(format_nbytes(plan.peak.total) for plan in plans)])
    rows.append(["between steps", *(format_nbytes(p.between_steps.total) for p in plans)])
    if any(plan.host.total for plan in plans):
        rows.append(["host memory", *(format_nbytes(plan.host.total) for plan in plans)])
    for name in _COLLECTIVES:
        if any(plan.sent.get(name) for plan in plans):
            words = name.replace("_", "-") + " sent a step"
            rows.append([words, *(format_nbytes(plan.sent.get(name, 0)) for plan in plans)])
    return rows


def _alike(unit: UnitPlan) -> tuple[object, ...]:
    # The first and the last of equal layers wait for others for different times, so their
    # buffers differ; that alone does not make a line of the table.
    most = unit.most
    return unit.parameters, most.sharded, most.unsharded, most.optimizer, most.activations


def _unit_row(units: Sequence[UnitPlan]) -> list[str]:
    first, last = units[0], units[-1]
    name = printable(first.unit)
    if len(units) > 1:
        name = f"{name} ... {printable(last.unit)} ({len(units)})"
    most = first.most
    return [
        name,
        _count(first.parameters),
        format_nbytes(most.sharded),
        format_nbytes(most.unsharded),
        format_nbytes(most.gradients),
        format_nbytes(most.optimizer),
        format_nbytes(most.activations),
        format_nbytes(sum(first.sent.values())),
    ]


def _count(number: int) -> str:
    for factor, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g} {letter}"
    return str(number)
