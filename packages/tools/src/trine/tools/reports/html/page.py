"""Put a report together: what it says at the top, and its sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trine.tools.analysis.breakdown import RunBreakdown, break_down
from trine.tools.analysis.stragglers import find_stragglers
from trine.tools.reports.html import ranks, step_time, units
from trine.tools.reports.html.memory import memory
from trine.tools.reports.html.model import Page
from trine.tools.reports.html.timelines import timelines
from trine.tools.text import format_ns, format_ranks, printable
from trine.tools.tracing.reader import RankTrace

__all__ = ["build_page"]

_MAX_NAMES: Final = 8


def build_page(traces: Sequence[RankTrace], title: str) -> Page:
    """The contents of a report.

    Args:
        traces: of the ranks of one run, at least one.
        title: of the page.
    """
    run = break_down(traces)
    late = find_stragglers(traces)
    verdict = [step_time.sentence(run), ranks.sentence(late), units.sentence(run)]
    return Page(
        title=printable(title),
        verdict=[text for text in verdict if text],
        facts=_facts(traces, run),
        notes=_notes(traces),
        sections=[
            step_time.step_time(run),
            timelines(traces, run),
            units.units(run),
            memory(traces),
            ranks.ranks(late),
        ],
    )


def _facts(traces: Sequence[RankTrace], run: RunBreakdown) -> list[tuple[str, str]]:
    headers = [trace.header for trace in traces]
    spans = [trace.events for trace in traces if len(trace.events)]
    longest_ns = max((int((own.end_ns.max() - own.start_ns.min())) for own in spans), default=0)
    facts = [
        ("ranks", f"{len(traces)} of {headers[0].world_size}"),
        ("hosts", _names([header.host for header in headers])),
        ("Python", _names([header.python for header in headers])),
        ("torch", _names([header.torch for header in headers])),
        ("recorded", f"{format_ns(longest_ns)}, {sum(map(len, spans))} events"),
        ("clocks", run.alignment.note),
    ]
    every = [header.environment for header in headers]
    for name in dict.fromkeys(name for environment in every for name in environment):
        values = [environment[name] for environment in every if name in environment]
        facts.append((printable(name), _names(values)))
    return facts


def _notes(traces: Sequence[RankTrace]) -> list[str]:
    """What a reader should know before believing the numbers."""
    notes = []
    world_size = traces[0].header.world_size
    if len(traces) < world_size:
        missing = set(range(world_size)) - {trace.header.rank for trace in traces}
        notes.append(f"No trace of {format_ranks(missing)} was read.")
    if cut_off := [trace.header.rank for trace in traces if trace.end is None]:
        notes.append(f"The recording of {format_ranks(cut_off)} was cut off; its end is missing.")
    if dropped := sum(trace.dropped for trace in traces):
        notes.append(f"{dropped} events did not fit the recorders; the earliest steps are missing.")
    return notes


def _names(every: Sequence[str]) -> str:
    """The different ones of them."""
    different = list(dict.fromkeys(map(printable, every)))
    shown = ", ".join(different[:_MAX_NAMES])
    rest = len(different) - _MAX_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
