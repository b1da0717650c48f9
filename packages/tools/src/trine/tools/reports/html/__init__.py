"""One HTML page about a run: `write_report`.

The page needs no network and no other file. Its pictures are SVG made here, its script and
style are of this package, and its policy lets nothing else run; names from traces are text.
"""

from trine.tools.reports.html.write import write_report

__all__ = ["write_report"]
