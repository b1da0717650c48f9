"""Gathering again among few ranks, from pieces that they keep between forward and backward.

Resharding to a smaller world size: the ranks that share one copy are taken `n` at a time, as
neighbours. When its forward has ended, each of them keeps one `n`-th of what was gathered;
for backward the pieces are put together within the `n`, which may be one machine. What this
costs is memory in between, `1/n` of the whole instead of the shard alone.

The gathered storage is one flat buffer without gaps, so it is cut into `n` equal pieces
wherever parameters begin and end, and the pieces arrive where they belong.
"""

from __future__ import annotations

from torch import Tensor

from trine.distributed._fsdp.collectives import Comm, Pending

__all__ = ["SubgroupGather"]


class SubgroupGather:
    """Keeps this rank's piece of a flat buffer, and fills the buffer from those of a subgroup.

    It does not know when what it keeps becomes old.

    Args:
        comm: collectives over the subgroup, whose size divides that of every buffer.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._piece: Tensor | None = None

    @property
    def holds_piece(self) -> bool:
        """Whether there is something to gather from."""
        return self._piece is not None

    @property
    def piece_nbytes(self) -> int:
        """Bytes of the piece; 0 if there is none."""
        return 0 if self._piece is None else self._piece.nbytes

    def keep(self, whole: Tensor) -> None:
        """Copy this rank's piece of `whole` (1-D), whose memory may then be freed."""
        self._piece = self._rows(whole)[self.comm.rank].clone()

    def drop(self) -> None:
        """Free the piece."""
        self._piece = None

    def nbytes(self, whole: Tensor) -> int:
        """Bytes that this rank sends to fill `whole`."""
        return whole.nbytes // self.comm.world_size * (self.comm.world_size - 1)

    def fill(self, whole: Tensor) -> Pending:
        """Start to fill `whole` (1-D, of any content), and let go of the piece."""
        rows, piece = self._rows(whole), self._piece
        assert piece is not None
        own = rows[self.comm.rank]
        own.copy_(piece)
        self._piece = None
        return self.comm.all_gather(rows, own)

    def _rows(self, whole: Tensor) -> Tensor:
        return whole.view(self.comm.world_size, -1)
