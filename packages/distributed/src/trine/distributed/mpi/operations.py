"""The collectives, each as steps over non-blocking calls of MPI.

Each is a generator: it yields requests and goes on when they are complete. Every rank of the
communicator runs the same one with the same sizes. Reductions are an exchange followed by a
sum on each rank: faster here than MPI's own, in the order of the ranks, for every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from trine.distributed.mpi import buffers
from trine.distributed.mpi.buffers import Scratch, as_bytes, laid_out, pieces, written_back
from trine.distributed.mpi.reductions import Op, check_reducible, reduce_rows
from trine.distributed.mpi.work import Steps

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "receive",
    "receive_from_any",
    "reduce_scatter",
    "scatter",
    "send",
]

_SMALL_BYTES = 2**16  # up to which one exchange of everything beats two of the parts
_scratch = Scratch()


def barrier(comm: MPI.Comm) -> Steps:
    """Complete once every rank has come."""
    yield [comm.Ibarrier()]


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
    if max(whole.nbytes, sent.nbytes) > buffers.MOST_BYTES:
        yield from _pairwise(comm, whole, sent, out_counts, sent_counts)
    else:
        yield [comm.Ialltoallv(laid_out(sent, sent_counts), laid_out(whole, out_counts))]
    if copied:
        out.copy_(whole)


def _pairwise(
    comm: MPI.Comm,
    out: Tensor,
    sent: Tensor,
    out_counts: Sequence[int],
    sent_counts: Sequence[int],
) -> Steps:
    """With one rank after the other, in pieces; for more than MPI can count at once."""
    to_ranks = torch.split(sent.view(-1), list(sent_counts))
    from_ranks = torch.split(out.view(-1), list(out_counts))
    from_ranks[comm.rank].copy_(to_ranks[comm.rank])
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        requests = [comm.Irecv(as_bytes(piece), source) for piece in pieces(from_ranks[source])]
        requests += [comm.Isend(as_bytes(piece), to) for piece in pieces(to_ranks[to])]
        yield requests


def reduce_scatter(comm: MPI.Comm, out: Tensor, rows: Tensor, op: Op) -> Steps:
    """Reduce over ranks, and keep this rank's part: `rows` holds one part for each rank."""
    check_reducible(out, op)
    whole, copied = written_back(out)
    numel = out.numel()
    with _scratch.lend(comm.size * numel, out.dtype) as received:
        counts = [numel] * comm.size
        yield from all_to_all(comm, received, rows.reshape(-1), counts, counts)
        reduce_rows(received.view(comm.size, numel), op, whole.view(-1))
    if copied:
        out.copy_(whole)


def all_reduce(comm: MPI.Comm, tensor: Tensor, op: Op) -> Steps:
    """Reduce over ranks, and give every rank the result."""
    check_reducible(tensor, op)
    flat = tensor.contiguous().view(-1)
    ranks, numel = comm.size, flat.numel()
    if ranks * flat.nbytes <= _SMALL_BYTES or numel < ranks:
        with _scratch.lend(ranks * numel, flat.dtype) as received:
            yield from all_gather(comm, received, flat)
            reduce_rows(received.view(ranks, numel), op, flat)
    else:
        part = -(-numel // ranks)
        with _scratch.lend(ranks * part, flat.dtype) as padded:
            padded[:numel].copy_(flat)
            padded[numel:].zero_()
            own = padded.view(ranks, part)[comm.rank]
            with _scratch.lend(ranks * part, flat.dtype) as received:
                counts = [part] * ranks
                yield from all_to_all(comm, received, padded, counts, counts)
                reduce_rows(received.view(ranks, part), op, own)
            yield from all_gather(comm, padded, own)
            flat.copy_(padded[:numel])
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


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
