"""Record what a training run did on every rank, and turn it into timelines and reports.

Importing this package imports none of its parts: `trine.tools.tracing` records, reads and
merges; `trine.tools.reports` sums up; `trine.tools.cli` is the command `trine`.
"""

from importlib.metadata import version

__version__ = version("trine-tools")

__all__ = ["__version__"]
