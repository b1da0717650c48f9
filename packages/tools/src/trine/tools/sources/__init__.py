"""Read recordings of ranks, whoever made them: ours, torch.profiler's, the flight recorder's."""

from trine.tools.sources.join import join_profiler
from trine.tools.sources.reading import read, read_each, source_files

__all__ = ["join_profiler", "read", "read_each", "source_files"]
