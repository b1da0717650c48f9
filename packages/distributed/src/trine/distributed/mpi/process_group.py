"""A process group of c10d over a communicator of MPI.

It answers to every name under which torch 2.11 to 2.14 asks for a collective: `dist`,
DTensor's functional collectives, DDP and distributed checkpoints. Here arguments are checked
and named; `operations` knows what to do, `progress` does it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs miss it

from trine.distributed.mpi import operations
from trine.distributed.mpi.buffers import check_on_cpu
from trine.distributed.mpi.progress import ANY_ORDER, Progress
from trine.distributed.mpi.reductions import Op, check_reducible, op_of
from trine.distributed.mpi.work import MPIWork, Steps
from trine.distributed.units import current_unit

__all__ = ["NAME", "MPIProcessGroup", "tag_of"]

NAME = "mpi4py"
"""What torch calls the backend: it keeps the name "mpi" for its own, which wheels lack."""

_MOST_TAGS = 32_000  # MPI promises 32767
_lanes = itertools.count(ANY_ORDER + 1)


def tag_of(name: str) -> int:
    """Keeps the making of a group apart from that of others of the same ranks."""
    return zlib.crc32(name.encode()) % _MOST_TAGS


class MPIProcessGroup(dist.ProcessGroup):
    """The ranks of a communicator.

    Args:
        comm: whose ranks are in the order of the group; owned from now on.
        timeout: how long an operation may take.
        store: of the group, for torch.
        progress: who drives the operations of this process.
    """

    def __init__(
        self, comm: MPI.Intracomm, timeout: timedelta, store: Store | None, progress: Progress
    ) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # with a store it refuses
        self._comm: MPI.Intracomm = comm
        self._messages: MPI.Intracomm = comm.Dup()
        self._timeout = timeout
        self._store = store
        self._progress = progress
        self._lane = next(_lanes)
        self._sequence = itertools.count()
        self._coalesced: list[MPIWork] | None = None
        self._description = ""
        self.setGroupName("")

    # --- what torch asks of a group, beside collectives -------------------------------------
    # In C++ the name lives in the backend that belongs to a group, and this one has none.

    def getBackendName(self) -> str:
        """The backend's name."""
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """The group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Give the group a name."""
        self._name = name
        self._where = f"of group {name or '(default)'} ({self.size()} ranks) on rank {self.rank()}"

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Say what the group is for."""
        self._description = description

    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        """This group: torch 2.14 asks it whether messages are better started together."""
        return self

    def get_group_store(self) -> Store | None:
        """The store in which the group's ranks met."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations may take from now on."""
        self._timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: operations are counted from the first."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    @property
    def supports_splitting(self) -> bool:
        """No: torch splits groups of accelerators only."""
        return False

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> MPIProcessGroup | None:
        """A group of some of these ranks, for whoever calls its methods.

        The functions of `torch.distributed` take groups that `dist.new_group` has made, as
        device meshes do. `dist.split_group` refuses every group without an accelerator before
        it asks the backend.

        Args:
            new_ranks: as numbered in this group; the order counts. Called by these at least.
            timeout: how long its operations may take; None for this group's.
            opts: nothing; for torch.
            group_name: its name, which tells groups apart that are made at the same time.
            group_desc: what it is for.
            device_types: nothing; for torch.

        Returns:
            None on ranks that are not among them.
        """
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self._name}:{','.join(map(str, new_ranks))}"
        members = self._comm.Get_group().Incl(new_ranks)
        comm = self._comm.Create_group(members, tag_of(name))
        split = MPIProcessGroup(comm, timeout or self._timeout, self._store, self._progress)
        split.setGroupName(name)
        split.setGroupDesc(group_desc or "")
        return split

    # --- start -----------------------------------------------------------------------------

    def _start(
        self,
        operation: str,
        steps: Steps,
        results: Sequence[Tensor],
        opts: Any = None,
        *,
        lane: int | None = None,
        found: list[MPIWork] | None = None,
        missing: Collection[int] = (),
    ) -> MPIWork:
        timeout = self._timeout
        asked = getattr(opts, "timeout", None)
        if asked is not None and timedelta(0) < asked < timeout:
            timeout = asked
        unit = current_unit()
        whose = f" (FSDP unit {unit})" if unit else ""
        label = f"{operation} #{next(self._sequence)}{whose} {self._where}"
        work = MPIWork(label, steps, timeout.total_seconds(), results, missing)
        if found is not None:
            found.append(work)
        waits = opts is not None and not getattr(opts, "asyncOp", True)
        if self._coalesced is not None:
            self._coalesced.append(work)
            waits = False
        self._progress.submit(self._lane if lane is None else lane, work, caller_waits=waits)
        return work

    def _each(self, steps: Callable[..., Steps], *arguments: Sequence[Any]) -> Steps:
        if len(arguments[0]) == 1:
            return steps(self._comm, *(each[0] for each in arguments))
        return self._all(steps, zip(*arguments, strict=True))

    def _all(self, steps: Callable[..., Steps], calls: Iterable[tuple[Any, ...]]) -> Steps:
        for each in calls:
            yield from steps(self._comm, *each)

    # --- moving ----------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MPIWork:
        """Give every rank the root's values."""
        check_on_cpu(*tensors)
        roots = [opts.rootRank] * len(tensors)
        steps = self._each(operations.broadcast, tensors, roots)
        return self._start("broadcast", steps, tensors, opts)

    def all_gather_single(self, out: Tensor, own: Tensor, opts: Any = None) -> MPIWork:
        """Lay every rank's tensor end to end."""
        self._check_parts("all_gather", out, own)
        steps = operations.all_gather(self._comm, out, own)
        return self._start("all_gather", steps, [out], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outs: list[Tensor], owns: list[Tensor], opts: Any = None
    ) -> MPIWork:
        """The same for several tensors."""
        for out, own in zip(outs, owns, strict=True):
            self._check_parts("all_gather", out, own)
        steps = self._each(operations.all_gather, outs, owns)
        return self._start("all_gather", steps, outs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outs: list[list[Tensor]], owns: list[Tensor], opts: Any = None) -> MPIWork:
        """Give every rank a list of every rank's tensor; `outs` holds one list per tensor."""
        for parts, own in zip(outs, owns, strict=True):
            check_on_cpu(own, *parts)
            self._check_list("all_gather", parts, own)

        def steps() -> Steps:
            for parts, own in zip(outs, owns, strict=True):
                whole = torch.empty((self.size(), own.numel()), dtype=own.dtype)
                yield from operations.all_gather(self._comm, whole, own)
                for part, row in zip(parts, whole, strict=True):
                    part.copy_(row.view(part.shape))

        flat = [part for parts in outs for part in parts]
        return self._start("all_gather", steps(), flat, opts)

    def allgather_coalesced(
        self, outs: list[list[Tensor]], owns: list[Tensor], opts: Any = None
    ) -> MPIWork:
        """The same, where `outs` holds one list per rank."""
        return self.allgather([list(parts) for parts in zip(*outs, strict=True)], owns, opts)

    def gather(self, outs: list[list[Tensor]], owns: list[Tensor], opts: Any) -> MPIWork:
        """Give the root a list of every rank's tensor."""
        parts = outs[0] if outs else []
        check_on_cpu(*owns, *parts)
        if self.rank() == opts.rootRank:
            self._check_list("gather", parts, owns[0])
        steps = operations.gather(self._comm, parts, owns[0], opts.rootRank)
        return self._start("gather", steps, parts, opts)

    def scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> MPIWork:
        """Give each rank its part of the root's list."""
        held = parts[0] if parts else []
        check_on_cpu(*outs, *held)
        if self.rank() == opts.rootRank:
            self._check_list("scatter", held, outs[0])
        steps = operations.scatter(self._comm, outs[0], held, opts.rootRank)
        return self._start("scatter", steps, outs, opts)

    def all_to_all_single(
        self,
        out: Tensor,
        sent: Tensor,
        out_rows: list[int] | None = None,
        sent_rows: list[int] | None = None,
        opts: Any = None,
    ) -> MPIWork:
        """Exchange rows: `sent_rows[r]` of `sent` go to rank r; None deals them out equally."""
        check_on_cpu(out, sent)
        steps = operations.all_to_all(
            self._comm,
            out,
            sent,
            self._counts("output", out, out_rows),
            self._counts("input", sent, sent_rows),
        )
        return self._start("all_to_all", steps, [out], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outs: list[Tensor], sent: list[Tensor], opts: Any = None) -> MPIWork:
        """Exchange tensors: `sent[r]` goes to rank r."""
        check_on_cpu(*outs, *sent)

        def steps() -> Steps:
            flat = torch.cat([tensor.reshape(-1) for tensor in sent])
            landing = flat.new_empty(sum(out.numel() for out in outs))
            counts = [out.numel() for out in outs]
            sent_counts = [tensor.numel() for tensor in sent]
            yield from operations.all_to_all(self._comm, landing, flat, counts, sent_counts)
            for out, part in zip(outs, torch.split(landing, counts), strict=True):
                out.copy_(part.view(out.shape))

        return self._start("all_to_all", steps(), outs, opts)

    def barrier(self, opts: Any = None) -> MPIWork:
        """Complete once every rank has come."""
        return self._start("barrier", operations.barrier(self._comm), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return once every rank has come.

        Args:
            timeout: how long to wait; None for the group's.
            wait_all_ranks: nothing. Every rank that has come knows all that have not.

        Raises:
            DistBackendError: naming the ranks that have not come. Nothing can be done in the
                group afterwards.
        """
        world = MPI.COMM_WORLD.Get_group()
        ranks = self._comm.Get_group().Translate_ranks(None, world)
        missing = dict(enumerate(ranks))
        steps = operations.monitored_barrier(self._comm, missing)
        asked = SimpleNamespace(asyncOp=False, timeout=timeout)
        self._start("monitored_barrier", steps, [], asked, missing=missing.values()).wait()

    # --- reducing --------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MPIWork:
        """Reduce over ranks, for every rank."""
        op = self._op(opts, *tensors)
        steps = self._each(operations.all_reduce, tensors, [op] * len(tensors))
        return self._start("all_reduce", steps, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> MPIWork:
        """Reduce over ranks, for the root; the others' tensors stay as they are."""
        op = self._op(opts, *tensors)

        def steps() -> Steps:
            for tensor in tensors:
                result = tensor.clone(memory_format=torch.contiguous_format)
                yield from operations.all_reduce(self._comm, result, op)
                if self.rank() == opts.rootRank:
                    tensor.copy_(result)

        return self._start("reduce", steps(), tensors, opts)

    def reduce_scatter_single(self, out: Tensor, rows: Tensor, opts: Any = None) -> MPIWork:
        """Reduce over ranks, each of which keeps its part."""
        self._check_parts("reduce_scatter", rows, out)
        steps = operations.reduce_scatter(self._comm, out, rows, self._op(opts, out))
        return self._start("reduce_scatter", steps, [out], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outs: list[Tensor], rows: list[Tensor], opts: Any = None
    ) -> MPIWork:
        """The same for several tensors."""
        for out, each in zip(outs, rows, strict=True):
            self._check_parts("reduce_scatter", each, out)
        ops = [self._op(opts, *outs)] * len(outs)
        steps = self._each(operations.reduce_scatter, outs, rows, ops)
        return self._start("reduce_scatter", steps, outs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any = None
    ) -> MPIWork:
        """The same, where the parts for the ranks are a list."""
        for out, each in zip(outs, parts, strict=True):
            self._check_list("reduce_scatter", each, out)
        op = self._op(opts, *outs)

        def steps() -> Steps:
            for out, each in zip(outs, parts, strict=True):
                rows = torch.cat([part.reshape(-1) for part in each])
                yield from operations.reduce_scatter(self._comm, out, rows, op)

        return self._start("reduce_scatter", steps(), outs, opts)

    # --- messages --------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> MPIWork:
        """Send to one rank."""
        check_on_cpu(*tensors)
        steps = operations.send(self._messages, tensors[0], to, tag)
        return self._start(f"send to rank {to}", steps, tensors, lane=ANY_ORDER)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MPIWork:
        """Receive from one rank."""
        check_on_cpu(*tensors)
        steps = operations.receive(self._messages, tensors[0], source, tag)
        return self._start(f"receive from rank {source}", steps, tensors, lane=ANY_ORDER)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MPIWork:
        """Receive from whoever sends first."""
        check_on_cpu(*tensors)
        started: list[MPIWork] = []

        def found(source: int) -> None:
            started[0].source = source

        steps = operations.receive_from_any(self._messages, tensors[0], tag, found)
        return self._start("receive from any rank", steps, tensors, lane=ANY_ORDER, found=started)

    recv_any_source = recv_anysource

    # --- several at once -------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return _Together(works)

    # --- the end ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Give the communicators back, once collectives under way are over.

        Every rank of the group must call it.
        """
        self._progress.finish(self._lane)
        comm, self._comm = self._comm, MPI.COMM_NULL
        messages, self._messages = self._messages, MPI.COMM_NULL
        if self._progress.broken is None and comm != MPI.COMM_NULL:
            comm.Free()
            # A message that nobody takes may be under way for as long as the job.
            if not self._progress.is_busy(ANY_ORDER):
                messages.Free()

    def abort(self) -> None:
        """End the whole job: operations of MPI cannot be taken back."""
        MPI.COMM_WORLD.Abort(1)

    # --- checks ----------------------------------------------------------------------------

    def _op(self, opts: Any, *tensors: Tensor) -> Op:
        check_on_cpu(*tensors)
        op = op_of(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        for tensor in tensors:
            check_reducible(tensor, op)
        return op

    def _check_parts(self, operation: str, whole: Tensor, part: Tensor) -> None:
        check_on_cpu(whole, part)
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise ValueError(
                f"{operation} over {self.size()} ranks takes a tensor {self.size()} times as large "
                f"as each rank's part, of the same dtype; got {whole.numel()} elements of "
                f"{whole.dtype} and a part of {part.numel()} of {part.dtype}."
            )

    def _check_list(self, operation: str, parts: Sequence[Tensor], own: Tensor) -> None:
        wrong = [part for part in parts if part.numel() != own.numel() or part.dtype != own.dtype]
        if len(parts) != self.size() or wrong:
            raise ValueError(
                f"{operation} over {self.size()} ranks takes a list of as many tensors, each of "
                f"{own.numel()} elements of {own.dtype}; got "
                f"{[(part.numel(), part.dtype) for part in parts]}."
            )

    def _counts(self, what: str, tensor: Tensor, rows: Sequence[int] | None) -> list[int]:
        ranks, length = self.size(), tensor.shape[0] if tensor.dim() else 0
        if not rows:
            if length % ranks:
                raise ValueError(
                    f"all_to_all over {ranks} ranks deals out the rows of its {what} equally, and "
                    f"{length} rows do not divide. Give the sizes of the parts."
                )
            return [tensor.numel() // ranks] * ranks
        if len(rows) != ranks or sum(rows) != length:
            raise ValueError(
                f"all_to_all over {ranks} ranks takes one size for each, which add up to the rows "
                f"of its {what}, {length}; got {list(rows)}."
            )
        return [each * prod(tensor.shape[1:]) for each in rows]


class _Together(dist.Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[MPIWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when all are over."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)
