"""The folder of a run, which holds the recordings of that run only."""

from __future__ import annotations

from pathlib import Path

from trine.tools.errors import TraceFileError
from trine.tools.tracing.rank_file import rank_file_name
from trine.tools.tracing.reader import rank_files

__all__ = ["remove_other_worlds"]


def remove_other_worlds(directory: Path, world_size: int) -> None:
    """Delete recordings of ranks that a world of this size does not have.

    Those of its own ranks are left to them: they may be done already.

    Raises:
        TraceFileError: if one cannot be deleted.
    """
    ours = {rank_file_name(rank) for rank in range(world_size)}
    try:
        for file in rank_files(directory):
            if file.name not in ours:
                file.unlink(missing_ok=True)
    except OSError as error:
        raise TraceFileError(
            f"Recordings of an earlier run in {directory} cannot be deleted: "
            f"{error.strerror or error}."
        ) from error
