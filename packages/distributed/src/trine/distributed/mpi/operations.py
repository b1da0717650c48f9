"""The collectives, each as steps over non-blocking calls of MPI.

Each is a generator: it yields requests and goes on when they are complete. Every rank of the
communicator runs the same one with the same sizes. Reductions are an exchange followed by a
sum on each rank: faster here than MPI's own, in the order of the ranks, for every dtype.

What is exchanged travels in messages from rank to rank. MPICH's non-blocking all-to-all moves
one small piece for each test of its request, also what a rank sends to itself: 64 MiB took
two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from trine.distributed.mpi import buffers
from trine.distributed.mpi.buffers import Landing, Scratch, as_bytes, pieces, written_back
from trine.distributed.mpi.reductions import Op, reduce_rows
from trine.distributed.mpi.work import Steps

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "receive",
    "receive_from_any",
    "reduce_scatter",
    "scatter",
    "send",
]

_ROLL_CALL = 1  # the tag; what gather and scatter send has 0
_NOTHING: buffers.Spec = [None, 0, MPI.BYTE]
_SMALL_BYTES = 2**16  # up to which one exchange of everything beats two of the parts
# Of a part that is reduced while the next arrives: what arrives is still in the cache, and little
# memory is enough. Of smaller ones, many under way at once take long to be told apart.
_CHUNK_BYTES = 2**22
_MOST_CHUNKS = 64
_scratch = Scratch()


def barrier(comm: MPI.Comm) -> Steps:
    """Complete once every rank has come."""
    yield [comm.Ibarrier()]


def monitored_barrier(comm: MPI.Comm, missing: dict[int, int]) -> Steps:
    """Complete once every rank has come, and know which have not.

    Args:
        comm: the ranks.
        missing: by rank of `comm`, its number in the world; ranks that have come are taken out.
    """
    del missing[comm.rank]
    sent = [comm.Isend(_NOTHING, rank, _ROLL_CALL) for rank in missing]
    awaited = {rank: comm.Irecv(_NOTHING, rank, _ROLL_CALL) for rank in missing}
    while missing:
        for rank in [rank for rank in missing if awaited[rank].Test()]:
            del missing[rank]
        if missing:
            yield []
    yield sent


def broadcast(comm: MPI.Comm, tensor: Tensor, root: int) -> Steps:
    """Give every rank the root's values."""
    if comm.rank == root:
        whole, copied = tensor.contiguous(), False
    else:
        whole, copied = written_back(tensor)
    for piece in pieces(whole):
        yield [comm.Ibcast(as_bytes(piece), root)]
    if copied:
        tensor.copy_(whole)


def all_gather(comm: MPI.Comm, out: Tensor, own: Tensor) -> Steps:
    """Lay every rank's `own` end to end into `out`, which may hold `own` at its place."""
    whole, copied = written_back(out)
    if not own.numel():
        return
    own = own.contiguous()
    parts = whole.view(comm.size, -1)
    place = parts[comm.rank]
    if place.data_ptr() != own.data_ptr():
        if _overlap(own, whole):
            own = own.clone()
        if whole.nbytes > buffers.MOST_BYTES:
            place.copy_(own.view(-1))
    if whole.nbytes > buffers.MOST_BYTES:
        for root in range(comm.size):
            yield from broadcast(comm, parts[root], root)
    else:
        # MPI forbids that what is sent overlaps with what is received, unless it is told.
        in_place = place.data_ptr() == own.data_ptr()
        sent = MPI.IN_PLACE if in_place else as_bytes(own)
        memory, _, kind = as_bytes(whole)
        yield [comm.Iallgather(sent, [memory, own.nbytes, kind])]
    if copied:
        out.copy_(whole)


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def all_to_all(
    comm: MPI.Comm,
    out: Tensor,
    sent: Tensor,
    out_counts: Sequence[int],
    sent_counts: Sequence[int],
) -> Steps:
    """Send part r of `sent` to rank r, and lay what comes from rank r at part r of `out`.

    Args:
        comm: the ranks.
        out: overwritten.
        sent: contiguous or not.
        out_counts: elements from each rank.
        sent_counts: elements to each rank.
    """
    whole, copied = written_back(out)
    sent = sent.contiguous()
    if _overlap(sent, whole):
        sent = sent.clone()
    from_ranks = torch.split(whole.view(-1), list(out_counts))
    to_ranks = torch.split(sent.view(-1), list(sent_counts))
    yield _send_parts(comm, to_ranks) + _receive_parts(comm, from_ranks)
    from_ranks[comm.rank].copy_(to_ranks[comm.rank])
    if copied:
        out.copy_(whole)


def _send_parts(comm: MPI.Comm, parts: Sequence[Tensor]) -> list[MPI.Request]:
    """Start to send part r to rank r, but for this rank's own."""
    rank, ranks = comm.rank, comm.size
    others = [(rank + step) % ranks for step in range(1, ranks)]
    return [comm.Isend(as_bytes(piece), to) for to in others for piece in pieces(parts[to])]


def _receive_parts(comm: MPI.Comm, parts: Sequence[Tensor]) -> list[MPI.Request]:
    """Start to fill part r with what rank r sends, but for this rank's own."""
    rank, ranks = comm.rank, comm.size
    others = [(rank - step) % ranks for step in range(1, ranks)]
    return [comm.Irecv(as_bytes(piece), rank) for rank in others for piece in pieces(parts[rank])]


def reduce_scatter(comm: MPI.Comm, out: Tensor, rows: Tensor, op: Op) -> Steps:
    """Reduce over ranks, and keep this rank's part: `rows` holds one part for each rank."""
    whole, copied = written_back(out)
    rows = rows.contiguous()
    if not rows.numel():
        return
    if rows.nbytes <= _SMALL_BYTES:
        landing = Landing.lend(comm.size, out.numel(), out.dtype)
        memory, _, kind = as_bytes(rows)
        yield [comm.Ialltoall([memory, whole.nbytes, kind], landing.memory)]
        reduce_rows(landing.rows, op, whole.view(-1), landing.rows[0])
        landing.give_back()
    else:
        parts = rows.view(comm.size, -1)
        if whole.data_ptr() != parts[comm.rank].data_ptr() and _overlap(rows, whole):
            parts = parts.clone()
        yield from _reduce_parts(comm, parts, op, whole.view(-1))
    if copied:
        out.copy_(whole)


def _reduce_parts(comm: MPI.Comm, parts: Tensor, op: Op, out: Tensor) -> Steps:
    """Reduce row r of `parts` for rank r, chunk by chunk, into `out`, which may be this row."""
    ranks, rank, numel = comm.size, comm.rank, out.numel()
    width = min(max(_CHUNK_BYTES // out.itemsize, -(-numel // _MOST_CHUNKS)), numel)
    chunks = [parts[:, start : start + width].unbind() for start in range(0, numel, width)]
    sends = [request for chunk in chunks for request in _send_parts(comm, chunk)]
    with _scratch.lend(ranks * width, out.dtype) as memory:
        landing = memory.view(ranks, width)
        for chunk, result in zip(chunks, torch.split(out, width), strict=True):
            rows = list(landing[:, : len(result)].unbind())
            spare, rows[rank] = rows[rank], chunk[rank]
            yield _receive_parts(comm, rows)
            reduce_rows(rows, op, result, spare)
        yield sends


def all_reduce(comm: MPI.Comm, tensor: Tensor, op: Op) -> Steps:
    """Reduce over ranks, and give every rank the result."""
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    if comm.size * flat.nbytes <= _SMALL_BYTES:
        yield from _all_reduce_small(comm, flat.view(-1), op)
    else:
        # Equal parts, and the few elements that are left.
        parts = flat.view(-1)[: flat.numel() // comm.size * comm.size].view(comm.size, -1)
        own = parts[comm.rank]
        yield from _all_reduce_small(comm, flat.view(-1)[parts.numel() :], op)
        if own.numel():
            yield from _reduce_parts(comm, parts, op, own)
            yield from all_gather(comm, parts, own)
    if flat is not tensor:
        tensor.copy_(flat)


def _all_reduce_small(comm: MPI.Comm, flat: Tensor, op: Op) -> Steps:
    """Everyone sends all there is, and reduces it."""
    if flat.numel():
        landing = Landing.lend(comm.size, flat.numel(), flat.dtype)
        yield [comm.Iallgather(as_bytes(flat), landing.memory)]
        reduce_rows(landing.rows, op, flat, landing.rows[0])
        landing.give_back()


def gather(comm: MPI.Comm, outs: Sequence[Tensor], own: Tensor, root: int) -> Steps:
    """Give the root every rank's `own`."""
    if comm.rank != root:
        yield [comm.Isend(as_bytes(piece), root) for piece in pieces(own.contiguous())]
        return
    landing = [written_back(out) for out in outs]
    landing[root][0].copy_(own)
    yield [
        comm.Irecv(as_bytes(piece), source)
        for source, (whole, _) in enumerate(landing)
        if source != root
        for piece in pieces(whole)
    ]
    for out, (whole, copied) in zip(outs, landing, strict=True):
        if copied:
            out.copy_(whole)


def scatter(comm: MPI.Comm, out: Tensor, parts: Sequence[Tensor], root: int) -> Steps:
    """Give each rank its part of what the root holds."""
    if comm.rank == root:
        held = [part.contiguous() for part in parts]
        yield [
            comm.Isend(as_bytes(piece), to)
            for to, part in enumerate(held)
            if to != root
            for piece in pieces(part)
        ]
        out.copy_(held[root])
    else:
        yield from receive(comm, out, root, 0)


def send(comm: MPI.Comm, tensor: Tensor, to: int, tag: int) -> Steps:
    """Send to one rank."""
    yield [comm.Isend(as_bytes(piece), to, tag) for piece in pieces(tensor.contiguous())]


def receive(comm: MPI.Comm, tensor: Tensor, source: int, tag: int) -> Steps:
    """Receive from one rank."""
    whole, copied = written_back(tensor)
    yield [comm.Irecv(as_bytes(piece), source, tag) for piece in pieces(whole)]
    if copied:
        tensor.copy_(whole)


def receive_from_any(
    comm: MPI.Comm, tensor: Tensor, tag: int, found: Callable[[int], None]
) -> Steps:
    """Receive from whoever sends first; `found` is told who that is."""
    status = MPI.Status()
    while not comm.Iprobe(MPI.ANY_SOURCE, tag, status):
        yield []
    found(status.source)
    yield from receive(comm, tensor, status.source, tag)
