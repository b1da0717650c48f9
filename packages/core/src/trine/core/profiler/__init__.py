"""Time blocks, functions and loops by name, in the manner of pytorch-pfn-extras.

`record` and its relatives add to a `TimeSummary`, which keeps mean, deviation and
extremes per name, and report the same block to `trine.core.tracing`. Nothing here waits
for a device unless `TimeSummary.synchronize` is called.
"""

from trine.core.profiler.regions import record, record_function, record_iterable
from trine.core.profiler.statistics import DictSummary
from trine.core.profiler.time_summary import Report, TimeSummary, get_time_summary

__all__ = [
    "DictSummary",
    "Report",
    "TimeSummary",
    "get_time_summary",
    "record",
    "record_function",
    "record_iterable",
]
