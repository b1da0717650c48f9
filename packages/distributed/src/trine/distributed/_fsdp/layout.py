"""Which rows of a parameter each rank holds, and where a group's shards lie in its buffers.

Integers only: no torch, no ranks talking. Everything is computed from shapes, so every
rank computes the same.

A parameter of `rows` rows is cut along dim 0 into `world_size` chunks of
`ceil(rows / world_size)` rows, the last ones shorter or empty. This is the cut of
`torch.chunk`, hence of DTensor's `Shard(0)`. In a buffer every rank's chunk has the full
chunk size, the missing rows being padding that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["GroupLayout", "ShardLayout"]


@dataclass(frozen=True)
class ShardLayout:
    """How one parameter is cut.

    Attributes:
        shape: shape of the whole parameter, at least 1-D.
        world_size: number of ranks that share it.
    """

    shape: tuple[int, ...]
    world_size: int

    def __post_init__(self) -> None:
        if not self.shape:
            raise ValueError("a parameter without dims has no rows to cut")
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return prod(self.shape[1:])

    @property
    def chunk_rows(self) -> int:
        """Rows of a full chunk."""
        return -(-self.shape[0] // self.world_size)

    @property
    def chunk_numel(self) -> int:
        """Elements of a full chunk: what each rank contributes to a collective."""
        return self.chunk_rows * self.row_numel

    @property
    def numel(self) -> int:
        """Elements of the whole parameter, without padding."""
        return prod(self.shape)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """First row that `rank` holds and the row after its last; equal if it holds none."""
        rows, chunk = self.shape[0], self.chunk_rows
        return min(rank * chunk, rows), min((rank + 1) * chunk, rows)

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Shape of the rows that `rank` holds."""
        first, end = self.rows_of(rank)
        return (end - first, *self.shape[1:])


class GroupLayout:
    """Where each of a group's parameters lies when their chunks are laid end to end.

    Args:
        shards: the parameters' layouts, in the order of the buffers.
        extra: elements appended to every rank's chunk, for the group's own use.

    Attributes:
        chunk_numels: elements of one rank's chunk of each parameter.
        offsets: where each of these chunks begins in one rank's part.
        shard_numel: elements of one rank's part, without the extra ones.
        part_numel: the same with the extra ones.
    """

    def __init__(self, shards: Sequence[ShardLayout], extra: int = 0) -> None:
        self.shards = tuple(shards)
        self.chunk_numels = [shard.chunk_numel for shard in self.shards]
        self.offsets: list[int] = []
        end = 0
        for numel in self.chunk_numels:
            self.offsets.append(end)
            end += numel
        self.shard_numel = end
        self.part_numel = end + extra
