"""The section on ranks that make others wait."""

from __future__ import annotations

from typing import Final

from trine.tools.analysis.stragglers import RankLateness, Stragglers
from trine.tools.reports.html.model import (
    Cell,
    Section,
    Table,
    count_cell,
    ns_cell,
    share_cell,
    text_cell,
)
from trine.tools.reports.stragglers_table import verdict

__all__ = ["ranks", "sentence"]

_MAX_ROWS: Final = 64
_UNKNOWN: Final = Cell("", "")


def ranks(found: Stragglers) -> Section:
    """Who makes the others wait, and a row per rank, the latest first."""
    texts = [" ".join(verdict(found))]
    if not found.ranks or len(found.ranks) < 2:
        return Section("ranks", "Stragglers", texts)
    texts.append(
        "A rank is late by as much as it took longer for itself, waiting left out, than the "
        "quicker half of the others did for the same step."
    )
    if len(found.ranks) > _MAX_ROWS:
        texts.append(f"Of {len(found.ranks)} ranks, the {_MAX_ROWS} latest are shown.")
    header = ["rank", "host", "late, median", "late, p95", "late, max", "of the step"]
    header += ["comes after the first", "waits a step", "loses most in", "verdict"]
    rows = [_row(rank) for rank in found.ranks[:_MAX_ROWS]]
    return Section("ranks", "Stragglers", texts, tables=[Table("Lateness", header, rows)])


def sentence(found: Stragglers) -> str:
    """The verdict, if there is one to be told at the top."""
    return " ".join(verdict(found)) if len(found.ranks) > 1 else ""


def _row(rank: RankLateness) -> list[Cell]:
    return [
        count_cell(rank.rank),
        text_cell(rank.host),
        ns_cell(rank.median_ns),
        ns_cell(rank.p95_ns),
        ns_cell(rank.max_ns),
        share_cell(rank.share),
        ns_cell(rank.arrives_ns) if rank.arrives_ns >= 0 else _UNKNOWN,
        ns_cell(rank.waits_ns),
        text_cell(rank.phase),
        text_cell("straggler" if rank.stands_out else ""),
    ]
