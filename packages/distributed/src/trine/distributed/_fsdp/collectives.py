"""The two collectives that sharding needs, in the form that suits a backend best.

A `Comm` works on flat buffers with one row per rank and knows nothing of parameters.
Every rank calls the same methods in the same order with the same shapes.

Facts behind the choice for gloo (two and four ranks, 64 MiB, against
`all_gather_into_tensor` = 1): N broadcasts 0.26 to 0.30; `reduce_scatter_tensor` 1.57 and
1.39, since it all-reduces everything; all-to-all plus a local sum 0.49 and 0.39. N scatters
take as long as an all-to-all where it is large and twice as long where it is small, and leave
this rank's own row where it is: one row less of memory, where memory counts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from trine.core import tracing
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed.ledger import ledger_of
from trine.distributed.process_groups import MPI4PY, BorrowedGroup, backend_of, timeout_of_groups

__all__ = [
    "C10dComm",
    "Comm",
    "GlooComm",
    "LocalComm",
    "MPIComm",
    "Pending",
    "PendingReduce",
    "SummedElsewhere",
    "comm_for",
]

# torch 2.13 renamed these and warns about the old names; 2.11 has only the old ones.
# Looked up by name, because type checkers refuse the old ones.
_by_name: dict[str, Callable[..., dist.Work | None]] = vars(dist)
_all_gather = _by_name.get("all_gather_single") or _by_name["all_gather_into_tensor"]
_reduce_scatter = _by_name.get("reduce_scatter_single") or _by_name["reduce_scatter_tensor"]
# Not among torch's public names.
_AllgatherOptions: Any = vars(distributed_c10d).get("AllgatherOptions")


# What torch's functions check and look up before they call the group costs the host more than
# the call. The engine's groups and tensors are known to be right, so it calls the group itself.
def _all_gather_single(
    out: Tensor, shard: Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    start = getattr(group, "all_gather_single", None)
    if start is None or _AllgatherOptions is None or out.is_complex():
        # Before torch 2.13, or for torch to take apart.
        return _all_gather(out, shard, group=group, async_op=async_op)
    options = _AllgatherOptions()
    options.asyncOp = async_op
    work: dist.Work | None = start(out, shard, options)
    return work


def _reduce_scatter_single(
    out: Tensor,
    rows: Tensor,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup,
    async_op: bool,
) -> dist.Work | None:
    start = getattr(group, "reduce_scatter_single", None)
    if start is None or out.is_complex():
        return _reduce_scatter(out, rows, op=op, group=group, async_op=async_op)
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    work: dist.Work | None = start(out, rows, options)
    return work


# Of a row, from where scatters are no slower than an all-to-all, and memory counts.
LARGE_NBYTES = 2**20


class Pending:
    """Collectives under way.

    Attributes:
        done_ns: when the last of them completed, by the clock of the tracing seam; 0 while
            unknown. Filled in only if a sink was listening when they were started.
        begun_ns: when the backend took up the first of them, if it says so; 0 while unknown.
    """

    __slots__ = ("_left", "_lock", "_works", "begun_ns", "done_ns")

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]
        self.begun_ns = self.done_ns = 0
        if tracing.enabled:
            self._left = len(self._works)
            self._lock = threading.Lock()
            for work in self._works:
                self._note_completion(work)

    def wait(self) -> None:
        """Return when the results may be used by work that is issued from now on."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        if works and tracing.enabled:
            self.begun_ns = min(getattr(work, "begun_ns", 0) for work in works)

    def _note_completion(self, work: dist.Work) -> None:
        def note(_: object) -> None:
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    self.done_ns = time.perf_counter_ns()

        # A backend without futures: completion is seen when it is waited for.
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(note)


class PendingReduce(ABC):
    """A reduce-scatter under way. Buffers return to the pool in `sum_into`."""

    pending: Pending

    def wait(self) -> None:
        """Return when `sum_into` will not block."""
        self.pending.wait()

    @abstractmethod
    def sum_into(self, out: Tensor, scale: float) -> None:
        """Write `scale` times the sum over ranks of this rank's row into `out` (1-D, any dtype)."""


class Comm(ABC):
    """Collectives over the ranks among which parameters are sharded.

    Args:
        pool: where buffers come from.
        rank: which of the ranks this one is.
        world_size: how many there are.
        backend: who carries the bytes, for reports.
        group: the ranks, or None for this one alone; not kept alive.

    Attributes:
        averages: whether the backend is asked to divide.
        ledger: counts the collectives of the group; None if there is no other rank.
    """

    can_average = False
    """Whether the backend can divide before it adds, so that half types do not overflow."""

    def __init__(
        self,
        pool: BufferPool,
        rank: int,
        world_size: int,
        backend: str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.pool = pool
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.averages = False
        self._borrowed = None if group is None else BorrowedGroup(group)
        self.ledger = None if group is None else ledger_of(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks, of which this one must not be the only one."""
        assert self._borrowed is not None
        return self._borrowed()

    def use_pool(self, pool: BufferPool) -> None:
        """Take buffers from `pool` from now on."""
        self.pool = pool

    def gathers_others_only(self, shard: Tensor) -> bool:
        """Whether a buffer without a row for `shard` itself, this rank's, is better."""
        return False

    def gather_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer for `all_gather`; to be released."""
        return self.pool.acquire(shape, dtype, device)

    def reduce_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer for `reduce_scatter`, which releases it."""
        return self.pool.acquire(shape, dtype, device)

    def release(self, buffer: Tensor) -> None:
        """Take back what `gather_buffer` lent."""
        self.pool.release(buffer)

    def separate(self, made: dict[dist.ProcessGroup, dist.ProcessGroup]) -> Comm:
        """The same collectives in a process group of their own. Every rank must call it.

        Args:
            made: groups made so far, by the group whose ranks they have; added to.
        """
        return self

    @abstractmethod
    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """Start to fill row r of `out` with the `shard` of rank r.

        Args:
            out: shape (world_size, n), contiguous; overwritten. Or without this rank's row,
                if `gathers_others_only`.
            shard: shape (n,), contiguous, dtype of `out`; may be this rank's row of it.
        """

    @abstractmethod
    def reduce_scatter(self, rows: Tensor) -> PendingReduce:
        """Start to sum over ranks; this rank gets the sum of its row.

        Args:
            rows: shape (world_size, n), contiguous, from the pool; given up by the caller.
        """


class LocalComm(Comm):
    """One rank: nothing is sent."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(pool, 0, 1, "local")

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """A copy, unless it is there."""
        if out.data_ptr() != shard.data_ptr():
            out[0].copy_(shard)
        return Pending([])

    def reduce_scatter(self, rows: Tensor) -> PendingReduce:
        """The only row."""
        return _LocalSum(Pending([]), [rows[0]], [rows], self.pool)


class GlooComm(Comm):
    """gloo: broadcasts instead of its all-gather; rows sent and a sum instead of its reduce."""

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool) -> None:
        super().__init__(pool, group.rank(), group.size(), "gloo", group)
        self._broadcasts: list[dist.BroadcastOptions] = []
        self._scatters: list[dist.ScatterOptions] = []
        for root in range(self.world_size):
            broadcast, scatter = dist.BroadcastOptions(), dist.ScatterOptions()
            broadcast.rootRank = scatter.rootRank = root
            broadcast.asyncOp = scatter.asyncOp = True
            self._broadcasts.append(broadcast)
            self._scatters.append(scatter)

    def separate(self, made: dict[dist.ProcessGroup, dist.ProcessGroup]) -> Comm:
        """See `Comm.separate`."""
        return GlooComm(_twin(self.group, made), self.pool)

    def gathers_others_only(self, shard: Tensor) -> bool:
        """If it is large: what is saved must be worth a copy in three pieces."""
        return shard.nbytes >= LARGE_NBYTES

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """One broadcast from each rank, all under way at once."""
        after = self.rank + (out.shape[0] == self.world_size)
        works: list[dist.Work | None] = []
        if shard.numel():
            group = self.group
            rows = [*out[: self.rank], shard, *out[after:]]
            for row, options in zip(rows, self._broadcasts, strict=True):
                works.append(group.broadcast([row], options))
        if after > self.rank:
            own = out[self.rank]
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)  # while the broadcasts run
        return Pending(works)

    def reduce_scatter(self, rows: Tensor) -> PendingReduce:
        """Every rank sends; the sum is formed in `sum_into`, in the order of ranks."""
        if rows[0].nbytes >= LARGE_NBYTES:
            return self._scatter(rows)
        received = self.pool.acquire(tuple(rows.shape), rows.dtype, rows.device)
        work = dist.all_to_all_single(
            received.view(-1), rows.view(-1), group=self.group, async_op=True
        )
        return _LocalSum(Pending([work]), list(received), [rows, received], self.pool)

    def _scatter(self, rows: Tensor) -> PendingReduce:
        """One scatter from each rank, all under way at once."""
        received = self.pool.acquire(
            (self.world_size - 1, *rows.shape[1:]), rows.dtype, rows.device
        )
        # gloo copies this rank's own row to where it is.
        parts = [*received[: self.rank], rows[self.rank], *received[self.rank :]]
        works: list[dist.Work | None] = []
        group = self.group
        for root, options in enumerate(self._scatters):
            sent = [list(rows)] if root == self.rank else []
            works.append(group.scatter([parts[root]], sent, options))
        return _LocalSum(Pending(works), parts, [rows, received], self.pool)


class MPIComm(Comm):
    """MPI: its all-gather, and sums in the order of ranks, which gives gloo's bits."""

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool) -> None:
        super().__init__(pool, group.rank(), group.size(), "mpi", group)
        # Ours does, chunk by chunk and behind the computation; torch's own leaves it to MPI.
        self._sums_in_order = dist.get_backend(group) == MPI4PY

    def separate(self, made: dict[dist.ProcessGroup, dist.ProcessGroup]) -> Comm:
        """See `Comm.separate`."""
        return MPIComm(_twin(self.group, made), self.pool)

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """The backend's all-gather."""
        if not shard.numel():
            return Pending([])
        return Pending([_all_gather_single(out.view(-1), shard, group=self.group, async_op=True)])

    def reduce_scatter(self, rows: Tensor) -> PendingReduce:
        """Reduced by the backend where it does not round; else an all-to-all, and a sum later."""
        if self._sums_in_order and rows.dtype is torch.promote_types(rows.dtype, torch.float32):
            total = self.pool.acquire(tuple(rows.shape[1:]), rows.dtype, rows.device)
            work = _reduce_scatter_single(total, rows.view(-1), group=self.group, async_op=True)
            return _LocalSum(Pending([work]), [total], [rows, total], self.pool)
        received = self.pool.acquire(tuple(rows.shape), rows.dtype, rows.device)
        work = dist.all_to_all_single(
            received.view(-1), rows.view(-1), group=self.group, async_op=True
        )
        return _LocalSum(Pending([work]), list(received), [rows, received], self.pool)


class _LocalSum(PendingReduce):
    """Part r came from rank r. Half types are summed in fp32.

    Args:
        pending: until the parts are there.
        parts: of equal shape and dtype.
        buffers: to be released when they have been added up.
        pool: where to.
    """

    def __init__(
        self,
        pending: Pending,
        parts: Sequence[Tensor],
        buffers: Sequence[Tensor],
        pool: BufferPool,
    ) -> None:
        self.pending = pending
        self._parts = parts
        self._buffers = buffers
        self._pool = pool

    def sum_into(self, out: Tensor, scale: float) -> None:
        self.wait()
        first, *others = self._parts
        exact = torch.promote_types(first.dtype, torch.float32)
        if not others and out.dtype is first.dtype:
            torch.mul(first, scale, out=out)
        else:
            total = out if out.dtype is exact else torch.empty_like(out, dtype=exact)
            if others and first.dtype is exact:
                torch.add(first, others.pop(0), out=total)
            else:
                total.copy_(first)
            for part in others:
                total.add_(part)
            if scale != 1.0:
                total.mul_(scale)
            if total is not out:
                out.copy_(total)
        for buffer in self._buffers:
            self._pool.release(buffer)


class C10dComm(Comm):
    """Any other backend: its own all-gather and reduce-scatter."""

    def __init__(
        self, group: dist.ProcessGroup, pool: BufferPool, backend: str | None = None
    ) -> None:
        backend = backend or dist.get_backend(group)
        super().__init__(pool, group.rank(), group.size(), backend, group)
        self.can_average = self.averages = self.backend == "nccl"

    def separate(self, made: dict[dist.ProcessGroup, dist.ProcessGroup]) -> Comm:
        """See `Comm.separate`."""
        return C10dComm(_twin(self.group, made), self.pool, self.backend)

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """The backend's all-gather."""
        if not shard.numel():
            return Pending([])
        return Pending([_all_gather_single(out.view(-1), shard, group=self.group, async_op=True)])

    def reduce_scatter(self, rows: Tensor) -> PendingReduce:
        """The backend's reduce-scatter."""
        result = self.pool.acquire((rows.shape[1],), rows.dtype, rows.device)
        op = dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM
        work = _reduce_scatter_single(result, rows.view(-1), op=op, group=self.group, async_op=True)
        times = float(self.world_size) if self.averages else 1.0
        return SummedElsewhere(Pending([work]), result, rows, times, self.pool)


class SummedElsewhere(PendingReduce):
    """The backend has reduced; `times` its result is the sum."""

    def __init__(
        self, pending: Pending, result: Tensor, sent: Tensor, times: float, pool: BufferPool | None
    ) -> None:
        self.pending = pending
        self._result = result
        self._sent = sent
        self._times = times
        self._pool = pool

    def sum_into(self, out: Tensor, scale: float) -> None:
        self.wait()
        scale *= self._times
        if scale == 1.0:
            out.copy_(self._result)
        elif out.dtype is self._result.dtype:
            torch.mul(self._result, scale, out=out)
        else:
            out.copy_(self._result).mul_(scale)
        if self._pool is not None:
            self._pool.release(self._sent)
            self._pool.release(self._result)


def _twin(
    group: dist.ProcessGroup, made: dict[dist.ProcessGroup, dist.ProcessGroup]
) -> dist.ProcessGroup:
    if group not in made:
        ranks = dist.get_process_group_ranks(group)
        twin = dist.new_group(ranks, use_local_synchronization=True, timeout=timeout_of_groups())
        assert isinstance(twin, dist.ProcessGroup)
        made[group] = twin
    return made[group]


def comm_for(group: dist.ProcessGroup | None, pool: BufferPool, kind: str) -> Comm:
    """The collectives that suit the backend that moves tensors of a kind of device in a group.

    Args:
        group: the ranks; None is this rank alone.
        pool: where buffers come from.
        kind: of the device on which the buffers are.
    """
    if group is None or group.size() == 1:
        return LocalComm(pool)
    backend = backend_of(group, kind)
    if backend == "gloo":
        return GlooComm(group, pool)
    if backend in ("mpi", MPI4PY):
        return MPIComm(group, pool)
    return C10dComm(group, pool, backend)
