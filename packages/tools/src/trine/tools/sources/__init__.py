"""Read recordings of ranks, whoever made them: ours, torch.profiler's, the flight recorder's."""

from trine.tools.sources.join import join_profiler
from trine.tools.sources.reading import read, source_files

__all__ = ["join_profiler", "read", "source_files"]
