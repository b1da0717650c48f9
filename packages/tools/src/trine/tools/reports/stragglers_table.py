"""Say which ranks make the others wait: a verdict, then a line per rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, TextIO

from trine.tools.analysis.stragglers import RankLateness, Stragglers
from trine.tools.reports.tables import print_table
from trine.tools.text import format_ns, format_ranks, printable

__all__ = ["print_stragglers", "verdict"]

_SHOWN: Final = 10
_SENTENCES: Final = 3


def print_stragglers(found: Stragglers, file: TextIO | None = None) -> None:
    """Print the verdict, the skew of the collectives, and the ranks that are latest.

    Args:
        found: what to show.
        file: where; standard output if None.
    """
    file = file or sys.stdout
    lines = [*_heading(found), "", *verdict(found)]
    if len(found.ranks) > 1:
        lines += ["", "late: what a rank took longer for itself than the others; negative: less"]
    header, rows = _table(found)
    left = {0, header.index("host")} if "host" in header else {0}
    print_table(lines, header, rows, file, left={*left, len(header) - 1})


def verdict(found: Stragglers) -> list[str]:
    """Who makes the others wait, in sentences."""
    late, threshold = found.standing_out, found.threshold
    if not found.steps:
        return ["No step was recorded by all ranks, so they cannot be compared."]
    if len(found.ranks) < 2:
        return ["Only one rank was recorded, so there is nobody to compare it with."]
    if found.steps < threshold.min_steps:
        few = "1 step is" if found.steps == 1 else f"{found.steps} steps are"
        return [f"{few} too few to tell; record {threshold.min_steps} or more."]
    if not late:
        least = format_ns(threshold.min_share * found.step_ns)
        return [
            f"No rank stands out: none is late by {threshold.min_share:.0%} of a step ({least}), "
            f"and by {threshold.min_score:g} times what ranks and steps vary by."
        ]
    lines = [_sentence(rank) for rank in late[:_SENTENCES]]
    if len(late) > _SENTENCES:
        others = format_ranks(rank.rank for rank in late[_SENTENCES:])
        lines.append(f"So do {others}.")
    hosts = {rank.host for rank in late}
    if len(hosts) == 1 and len(late) > 1 and len(found.hosts) > 1:
        lines.append(f"All of them are on {printable(late[0].host)}: look at that machine.")
    return lines


def _sentence(rank: RankLateness) -> str:
    where = f", in {printable(rank.phase)!r}" if rank.phase and rank.phase != "other" else ""
    host = f" ({printable(rank.host)})"
    late = format_ns(rank.median_ns)
    return f"Rank {rank.rank}{host} makes everybody wait {late} a step{where} ({rank.share:.1%})."


def _heading(found: Stragglers) -> list[str]:
    ranks = f"{len(found.ranks)} of {found.world_size} ranks"
    if len(found.ranks) == found.world_size:
        ranks = f"{found.world_size} rank{'s' if found.world_size > 1 else ''}"
    lines = [ranks]
    if found.steps:
        lines[0] += f", {found.steps} step{'s' * (found.steps != 1)} of {format_ns(found.step_ns)}"
    if len(found.ranks) > 2:
        late = [rank.median_ns for rank in found.ranks]  # the latest first
        middle = format_ns(late[len(late) // 2])
        lines.append(
            f"ranks are late by {format_ns(late[-1])} (min), {middle} (median), "
            f"{format_ns(late[0])} (max) a step"
        )
    if found.left_out:
        lines.append(f"left out, since they recorded no step: {format_ranks(found.left_out)}")
    skew = found.skew
    if skew.collectives:
        lines.append(
            f"ranks come to a collective within {format_ns(skew.median_ns)} (median), "
            f"{format_ns(skew.p95_ns)} (p95), {format_ns(skew.max_ns)} (max) of each other"
        )
        if len(found.hosts) > 1:
            lines.append(printable(found.clock_note))
    return lines


def _table(found: Stragglers) -> tuple[list[str], list[list[str]]]:
    """Titles and cells; machines are named only if there are several, to fit 80 columns."""
    header = ["rank", "late\nmedian", "\np95", "\nmax", "of\nstep", "last\nin"]
    header += ["costs\na step", "comes\nafter", "waits\na step", "loses\nmost in"]
    rows = [_row(str(rank.rank), [rank], rank.phase) for rank in found.ranks[:_SHOWN]]
    hosts = [printable(rank.host) for rank in found.ranks[:_SHOWN]]
    if rest := found.ranks[_SHOWN:]:
        rows.append(_row(f"{len(rest)} more", rest, ""))
        hosts.append("")
    if len(found.hosts) < 2:
        return header, rows
    for host in found.hosts[:_SHOWN]:
        own = [rank for rank in found.ranks if rank.host == host.host]
        rows.append(_row("all of", own, ""))
        hosts.append(printable(host.host))
    rows = [[title, host, *cells] for (title, *cells), host in zip(rows, hosts, strict=True)]
    return [header[0], "host", *header[1:]], rows


def _row(title: str, ranks: Sequence[RankLateness], phase: str) -> list[str]:
    """One rank, or the medians of several and the worst of their maxima."""

    def middle(numbers: Sequence[float]) -> float:
        return sorted(numbers)[(len(numbers) - 1) // 2]

    arrives_ns = middle([rank.arrives_ns for rank in ranks])
    return [
        title,
        format_ns(middle([rank.median_ns for rank in ranks])),
        format_ns(middle([rank.p95_ns for rank in ranks])),
        format_ns(max(rank.max_ns for rank in ranks)),
        f"{middle([rank.share for rank in ranks]):.1%}",
        f"{middle([rank.last_share for rank in ranks]):.0%}",
        format_ns(middle([rank.cost_ns for rank in ranks])),
        format_ns(arrives_ns) if arrives_ns >= 0 else "",
        format_ns(middle([rank.waits_ns for rank in ranks])),
        printable(phase),
    ]
