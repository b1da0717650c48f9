"""From traces to numbers: where the time of a run went."""

from trine.tools.analysis.summary import (
    CollectiveSummary,
    StepSummary,
    Summary,
    UnitSummary,
    summarize,
)
from trine.tools.reports.table import print_summary

__all__ = [
    "CollectiveSummary",
    "StepSummary",
    "Summary",
    "UnitSummary",
    "print_summary",
    "summarize",
]
