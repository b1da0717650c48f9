"""A step of the engine on units that only count bytes.

What is gathered, freed and reduced when is decided by the engine's own schedule, buffers come
from its own pool (of meta tensors), and sizes from its own layouts. What `PlannedUnit` does
for itself is what `ParamGroup`, `GradReducer` and the collectives of each backend do to memory;
tests hold it to the counters that these report.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import LARGE_NBYTES
from trine.distributed._fsdp.layout import GroupLayout, ShardLayout
from trine.distributed.planning.units import Owned

__all__ = ["Memory", "PlannedUnit", "Ranks"]

_META = torch.device("meta")


@dataclass(frozen=True)
class Ranks:
    """Who takes part, and how bytes travel.

    Attributes:
        shard: ranks that share one copy.
        copies: how many copies there are.
        backend: who carries the bytes.
        again_among: how many ranks gather for backward; None for all.
        offload: whether shards and gradients live on the host.
    """

    shard: int
    copies: int
    backend: str
    again_among: int | None = None
    offload: bool = False


@dataclass
class Memory:
    """What is alive on the device, and the most that ever was.

    Attributes:
        pool: of communication buffers.
        now: bytes by kind and unit.
        most: the most that `now` had, each for itself.
        moment: what is going on, for people.
        peak: bytes of all kinds at the worst moment so far.
        peak_by_kind: the same by kind.
        peak_at: what was going on.
        sent: bytes that this rank has sent, by unit and collective.
    """

    pool: BufferPool = field(default_factory=BufferPool)
    now: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    most: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    totals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    moment: str = ""
    peak: int = -1
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    peak_at: str = ""
    sent: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, kind: str, unit: str, nbytes: int) -> None:
        """So many bytes more, or fewer, from now on."""
        key = kind, unit
        self.now[key] += nbytes
        self.totals[kind] += nbytes
        self.most[key] = max(self.most[key], self.now[key])
        if nbytes > 0:
            self._look()

    def borrow(self, unit: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer of the pool."""
        buffer = self.pool.acquire(shape, dtype, _META)
        self.add("communication", unit, buffer.nbytes)
        return buffer

    def give_back(self, unit: str, buffer: Tensor) -> None:
        """Return a buffer to the pool, which may keep it."""
        self.add("communication", unit, -buffer.nbytes)
        self.pool.release(buffer)

    def usage(self) -> dict[str, int]:
        """Bytes by kind, idle buffers included."""
        found = dict(self.totals)
        found["communication"] = found.get("communication", 0) + self.pool.idle_nbytes
        return found

    def forget_peak(self) -> None:
        """Look for the worst moment, and what is sent, from now on."""
        self.peak = -1
        self.sent.clear()

    def _look(self) -> None:
        total = sum(self.totals.values()) + self.pool.idle_nbytes
        if total > self.peak:
            self.peak, self.peak_at = total, self.moment
            self.peak_by_kind = self.usage()


class PlannedUnit:
    """The parameters of one unit that have one dtype; what the schedule takes for a unit.

    Args:
        name: full name of the module.
        params: of one dtype.
        ranks: who takes part.
        gather_dtype: in which parameters are gathered and computed with.
        reduce_dtype: in which gradients are sent.
        memory: where bytes are counted.
    """

    def __init__(
        self,
        name: str,
        params: list[Owned],
        ranks: Ranks,
        gather_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        memory: Memory,
    ) -> None:
        self.name = name
        self.params = params
        self.dtype = params[0].dtype
        self._ranks = ranks
        self._gather_dtype = gather_dtype
        self._reduce_dtype = reduce_dtype
        self._memory = memory
        self.layout = GroupLayout([ShardLayout(each.shape, ranks.shard) for each in params])
        trained = [each for each in params if each.trained]
        self._grad_numel = sum(each.numel for each in trained)
        reduced = [ShardLayout(each.shape, ranks.shard) for each in trained]
        self._part_numel = GroupLayout(reduced, extra=len(reduced)).part_numel
        self.shard_nbytes = self.layout.shard_numel * self.dtype.itemsize
        self._whole_nbytes = ranks.shard * self.layout.shard_numel * gather_dtype.itemsize
        self.grad_shard_nbytes = self._part_numel * self.dtype.itemsize
        self._out: Tensor | None = None
        self._holds = "nothing"
        self._piece = 0
        self._whole_grads = 0
        self._reducing: list[Tensor] = []
        self._summed: Tensor | None = None
        self._storing: Tensor | None = None
        memory.add("sharded", name, 0 if ranks.offload else self.shard_nbytes)

    def _set(self, kind: str, nbytes: int) -> None:
        self._memory.add(kind, self.name, nbytes)

    def _sends(self, collective: str, nbytes: int) -> None:
        self._memory.sent[self.name, collective] += nbytes

    # --- gathering, as ParamGroup does it ---------------------------------------------

    def unshard(self) -> None:
        """A buffer for all rows; or the whole in place, from the pieces of few ranks."""
        if self._holds != "nothing":
            return
        ranks, itemsize = self._ranks, self._gather_dtype.itemsize
        self._holds = "coming"
        if self._piece:
            few = ranks.again_among or 1
            self._sends("all_gather", self._whole_nbytes // few * (few - 1))
            self._set("unsharded", self._whole_nbytes)
            self._drop_piece()
            return
        rows = ranks.shard - self._gathers_others_only()
        self._sends("all_gather", self.layout.shard_numel * itemsize * (ranks.shard - 1))
        self._out = self._memory.borrow(
            self.name, (rows, self.layout.shard_numel), self._gather_dtype
        )

    def _gathers_others_only(self) -> bool:
        as_it_is = not self._ranks.offload and self.dtype is self._gather_dtype
        is_gloo = self._ranks.backend == "gloo" and self._ranks.shard > 1
        return as_it_is and is_gloo and self.shard_nbytes >= LARGE_NBYTES

    def wait_for_unshard(self) -> None:
        """The whole parameters, then the buffer back."""
        if self._holds == "whole":
            return
        self.unshard()
        if self._out is not None:
            self._set("unsharded", self._whole_nbytes)
            self._memory.give_back(self.name, self._out)
            self._out = None
        self._holds = "whole"

    def reshard(self) -> None:
        """Free what was gathered."""
        self._drop_piece()
        if self._holds == "nothing":
            return
        self.wait_for_unshard()
        self._set("unsharded", -self._whole_nbytes)
        self._holds = "nothing"

    def reshard_until_backward(self) -> None:
        """Free all but a piece, where few ranks are to gather again."""
        few = self._ranks.again_among
        if few is None or self._holds != "whole":
            self.reshard()
            return
        self._piece = self._whole_nbytes // few
        self._set("unsharded", self._piece)
        self._set("unsharded", -self._whole_nbytes)
        self._holds = "nothing"

    def _drop_piece(self) -> None:
        self._set("unsharded", -self._piece)
        self._piece = 0

    # --- reducing, as GradReducer does it ---------------------------------------------

    def compute_grads(self) -> None:
        """What autograd does in backward: a whole gradient for each trained parameter."""
        self._whole_grads = self._grad_numel * self._gather_dtype.itemsize
        self._set("gradients", self._whole_grads)

    def reduce_grads(self) -> None:
        """Lay the gradients into rows, and start the reduce-scatter."""
        if not self._part_numel:
            return
        ranks, dtype, part = self._ranks, self._reduce_dtype, self._part_numel
        rows = self._memory.borrow(self.name, (ranks.shard, part), dtype)
        self._set("gradients", -self._whole_grads)
        self._whole_grads = 0
        self._sends("reduce_scatter", part * dtype.itemsize * (ranks.shard - 1))
        received = self._received(rows)
        self._reducing = [rows]
        if received:
            self._reducing.append(self._memory.borrow(self.name, received, dtype))

    def _received(self, rows: Tensor) -> tuple[int, ...]:
        """Shape of what arrives, by the `Comm` of each backend; () for nothing."""
        ranks, part = self._ranks.shard, self._part_numel
        if ranks == 1:
            return ()
        exact = torch.promote_types(rows.dtype, torch.float32) is rows.dtype
        if self._ranks.backend == "nccl" or (self._ranks.backend == "mpi" and exact):
            return (part,)
        large = self._ranks.backend == "gloo" and rows[0].nbytes >= LARGE_NBYTES
        return (ranks - 1, part) if large else (ranks, part)

    def finish_reduce(self) -> bool:
        """Take the reduction one collective, or the copy to the host, further."""
        if not self._reducing and self._summed is None and self._storing is None:
            return True
        if self._storing is not None:
            self._memory.give_back(self.name, self._storing)
            self._storing = None
            return True
        if self._ranks.copies > 1 and self._summed is None:
            self._start_all_reduce()
            return False
        self._hand_out()
        return self._storing is None

    def _start_all_reduce(self) -> None:
        exact = torch.promote_types(self._reduce_dtype, torch.float32)
        summed = self._memory.borrow(self.name, (self._part_numel,), exact)
        self._return_rows()
        if exact is not self._reduce_dtype:
            wire = self._memory.borrow(self.name, (self._part_numel,), self._reduce_dtype)
            self._memory.give_back(self.name, summed)
            summed = wire
        copies = self._ranks.copies
        self._sends("all_reduce", 2 * summed.nbytes * (copies - 1) // copies)
        self._summed = summed

    def _hand_out(self) -> None:
        if self._ranks.offload:
            self._storing = self._memory.borrow(self.name, (self._part_numel,), self.dtype)
        else:
            self._set("gradients", self.grad_shard_nbytes)
        self._return_rows()
        if self._summed is not None:
            self._memory.give_back(self.name, self._summed)
            self._summed = None

    def _return_rows(self) -> None:
        for buffer in self._reducing:
            self._memory.give_back(self.name, buffer)
        self._reducing = []

    def zero_grad(self) -> None:
        """The sharded gradients are freed, as by `optimizer.zero_grad()`."""
        if not self._ranks.offload:
            self._set("gradients", -self._memory.now["gradients", self.name])

    # --- what no rehearsal needs ------------------------------------------------------

    def keep_grads(self) -> None:
        """Each backward reduces here."""

    def take_up_grads(self) -> bool:
        """Nothing waits."""
        return False

    def reset(self) -> None:
        """Nothing breaks off."""
