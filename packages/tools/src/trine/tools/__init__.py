"""Record what a training run did on every rank, and turn it into timelines and reports.

`profile` records a training loop, or the steps of it that a `Window` chooses.
`trine.tools.tracing` records, reads and merges; `trine.tools.reports` sums up;
`trine.tools.cli` is the command `trine`. Importing this package imports none of its parts.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trine.tools.recording.profiler import profile
    from trine.tools.recording.window import Window

__version__ = version("trine-tools")

__all__ = ["Window", "__version__", "profile"]


def __getattr__(name: str) -> object:
    # Recording imports torch, which `trine --help` need not wait for.
    if name == "profile":
        from trine.tools.recording.profiler import profile

        return profile
    if name == "Window":
        from trine.tools.recording.window import Window

        return Window
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
