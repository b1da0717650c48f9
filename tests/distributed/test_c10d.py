"""Everything that c10d offers, on every backend, against closed forms.

Rank r holds small integers that depend on r, so results are exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trine.distributed import barriers, monitored_barrier

RunOnRanks = Callable[..., list[Any]]

# torch 2.13 renamed these and warns about the old names; 2.11 has only the old ones.
_by_name: dict[str, Callable[..., Any]] = vars(dist)
all_gather_single = _by_name.get("all_gather_single") or _by_name["all_gather_into_tensor"]
reduce_scatter_single = _by_name.get("reduce_scatter_single") or _by_name["reduce_scatter_tensor"]

MOVED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)
SUMMED = tuple(dtype for dtype in MOVED if dtype not in (torch.bool, torch.complex64))


def on_mpi() -> bool:
    return dist.get_backend() == "mpi4py"


def here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def assert_equal(actual: Tensor, expected: Tensor, cell: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=f"{cell}: {actual}")


def held(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What a rank holds: 1, 2 or 3, in an order of its own."""
    values = (torch.arange(numel) + rank) % 3 + 1
    return values % 2 == 0 if dtype is torch.bool else values.to(dtype)


def moves_every_dtype() -> None:
    rank, ranks = here()
    for dtype in MOVED:
        if dtype not in SUMMED and not on_mpi():
            continue  # gloo gathers and scatters no booleans and no complex numbers
        for numel in (0, 1, 7):
            if numel == 0 and not on_mpi():
                continue  # and refuses empty tensors in some operations
            cell = (dtype, numel)
            own = held(rank, numel, dtype)
            everyone = [held(each, numel, dtype) for each in range(ranks)]

            parts = [torch.zeros_like(own) for _ in range(ranks)]
            dist.all_gather(parts, own)
            for part, expected in zip(parts, everyone, strict=True):
                assert_equal(part, expected, ("all_gather", cell))

            whole = torch.zeros(ranks * numel, dtype=dtype)
            all_gather_single(whole, own)
            assert_equal(whole, torch.cat(everyone), ("all_gather_single", cell))

            for root in range(ranks):
                sent = own.clone()
                dist.broadcast(sent, root)
                assert_equal(sent, everyone[root], ("broadcast", root, cell))

                gathered = [torch.zeros_like(own) for _ in range(ranks)] if rank == root else None
                dist.gather(own, gathered, dst=root)
                for part, expected in zip(gathered or [], everyone, strict=rank == root):
                    assert_equal(part, expected, ("gather", root, cell))

                dealt = torch.zeros_like(own)
                dist.scatter(dealt, everyone if rank == root else None, src=root)
                assert_equal(dealt, own, ("scatter", root, cell))

            received = torch.zeros(ranks * numel, dtype=dtype)
            dist.all_to_all_single(received, torch.cat([own] * ranks))
            assert_equal(received, torch.cat(everyone), ("all_to_all_single", cell))


def expected_reduction(rows: Tensor, op: Any) -> Tensor:
    """By plain torch, in a wide type."""
    wide = rows.to(torch.float64) if rows.is_floating_point() else rows.to(torch.int64)
    by_op: dict[Any, Callable[[], Tensor]] = {
        dist.ReduceOp.SUM: lambda: wide.sum(0),
        dist.ReduceOp.AVG: lambda: wide.sum(0) / len(rows),
        dist.ReduceOp.PRODUCT: lambda: wide.prod(0),
        dist.ReduceOp.MIN: lambda: wide.amin(0),
        dist.ReduceOp.MAX: lambda: wide.amax(0),
    }
    return by_op[op]().to(rows.dtype)


def reduces_every_dtype() -> None:
    rank, ranks = here()
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    if on_mpi():
        ops.append(dist.ReduceOp.AVG)
    for dtype in SUMMED:
        for op in ops:
            if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                continue
            for numel in (1, 5, 40_000):
                cell = (op, dtype, numel)
                rows = torch.stack([held(each, numel, dtype) for each in range(ranks)])
                expected = expected_reduction(rows, op)

                own = rows[rank].clone()
                dist.all_reduce(own, op)
                assert_equal(own, expected, ("all_reduce", cell))

                own = rows[rank].clone()
                dist.reduce(own, 0, op)
                if rank == 0 or on_mpi():
                    kept = expected if rank == 0 else rows[rank]
                    assert_equal(own, kept, ("reduce", cell))

                if numel <= 5:
                    sent = torch.cat([rows[rank]] * ranks)
                    out = torch.zeros(numel, dtype=dtype)
                    reduce_scatter_single(out, sent, op)
                    assert_equal(out, expected, ("reduce_scatter", cell))


def bitwise() -> None:
    rank, ranks = here()
    rows = torch.stack([torch.arange(6) * 7 + each for each in range(ranks)])
    ops = {
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    for op, function in ops.items():
        expected = rows[0]
        for row in rows[1:]:
            expected = function(expected, row)
        own = rows[rank].clone()
        dist.all_reduce(own, op)
        assert_equal(own, expected, op)


def sums_in_the_order_of_ranks() -> None:
    from trine.distributed.mpi import operations

    operations._CHUNK_BYTES = 2**12  # so that parts travel in several
    rank, ranks = here()
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            rows = torch.randn(ranks, ranks * 7001).to(dtype)
            # In fp32 and, for half types, rounded once.
            total = torch.zeros(rows[0].shape)
            for row in rows:
                total += row.float()
            if op == dist.ReduceOp.AVG:
                total /= ranks
            expected = total.to(dtype)

            own = rows[rank].clone()
            dist.all_reduce(own, op)
            assert_equal(own, expected, ("all_reduce", dtype, op))

            odd = rows[rank][:-1].clone()  # does not divide by the ranks
            dist.all_reduce(odd, op)
            assert_equal(odd, expected[:-1], ("all_reduce of odd parts", dtype, op))

            sent, out = rows[rank].clone(), torch.empty(7001, dtype=dtype)
            reduce_scatter_single(out, sent, op)
            assert_equal(out, expected.view(ranks, -1)[rank], ("reduce_scatter", dtype, op))
            assert_equal(sent, rows[rank], ("what was sent", dtype, op))

            place = sent.view(ranks, -1)[rank]  # of the result, as some programs want it
            reduce_scatter_single(place, sent, op)
            assert_equal(place, expected.view(ranks, -1)[rank], ("in place", dtype, op))


def uneven_parts() -> None:
    rank, ranks = here()
    # Rank r sends q + 1 rows of value r to rank q.
    sent_rows = [each + 1 for each in range(ranks)]
    out_rows = [rank + 1] * ranks
    sent = torch.full((sum(sent_rows), 2), float(rank))
    out = torch.zeros(sum(out_rows), 2)
    dist.all_to_all_single(out, sent, out_rows, sent_rows)
    assert_equal(out[:, 0], torch.arange(float(ranks)).repeat_interleave(rank + 1), "rows")


def strided() -> None:
    rank, ranks = here()
    base = torch.arange(12.0).view(3, 4) + 100 * rank
    everyone = [torch.arange(12.0).view(3, 4).t() + 100 * each for each in range(ranks)]

    own = base.t()
    dist.broadcast(own, 0)
    assert_equal(own, everyone[0], "broadcast")

    own = (torch.arange(12.0).view(3, 4) + 100 * rank).t()
    dist.all_reduce(own)
    assert_equal(own, torch.stack(everyone).sum(0), "all_reduce")

    own = (torch.arange(12.0).view(3, 4) + 100 * rank).t()
    parts = [torch.zeros(3, 4).t() for _ in range(ranks)]
    dist.all_gather(parts, own)
    for part, expected in zip(parts, everyone, strict=True):
        assert_equal(part, expected, "all_gather")


def aliases() -> None:
    rank, ranks = here()
    whole = torch.zeros(ranks, 3)
    whole[rank] = rank
    # From its own place in the result, as sharded training does, and from another's.
    all_gather_single(whole.view(-1), whole[rank])
    assert_equal(whole, torch.arange(float(ranks))[:, None].expand(ranks, 3), "own place")
    whole = torch.zeros(ranks, 3)
    other = (rank + 1) % ranks
    whole[other] = rank
    all_gather_single(whole.view(-1), whole[other])
    assert_equal(whole, torch.arange(float(ranks))[:, None].expand(ranks, 3), "another's place")


def messages() -> None:
    rank, ranks = here()
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    own, other = torch.full((4,), float(rank)), torch.zeros(4)
    works = [dist.irecv(other, source, tag=3), dist.isend(own, to, tag=3)]
    for work in works:
        assert work is not None
        work.wait()
    assert_equal(other, torch.full((4,), float(source)), "ring")

    if rank == 0:
        seen = set()
        for _ in range(ranks - 1):
            came = torch.zeros(1)
            source = dist.recv(came, tag=5)
            assert came.item() == source
            seen.add(source)
        assert seen == set(range(1, ranks))
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=5)

    pairs = [
        dist.P2POp(dist.isend, own, to),
        dist.P2POp(dist.irecv, other, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    assert_equal(other, torch.full((4,), float((rank - 1) % ranks)), "batch")


def objects() -> None:
    rank, ranks = here()
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
    assert everyone == [{"rank": each, "text": "x" * each} for each in range(ranks)]
    sent = [rank, "root"]
    dist.broadcast_object_list(sent, src=ranks - 1)
    assert sent == [ranks - 1, "root"]


def groups() -> None:
    rank, _ = here()
    even = dist.new_group([0, 2])
    odd = dist.new_group([1, 3])
    mine = even if rank % 2 == 0 else odd
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=mine)
    assert total.item() == (2 if rank % 2 == 0 else 4)

    for shape, names in (((4,), ("a",)), ((2, 2), ("a", "b")), ((2, 1, 2), ("a", "b", "c"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for axis, name in enumerate(names):
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=mesh[name].get_group())
            peers = mesh.mesh.movedim(axis, -1).reshape(-1, shape[axis]).tolist()
            ours = next(each for each in peers if rank in each)
            assert total.item() == sum(ours), (shape, name)


def split() -> None:
    rank, ranks = here()
    order = list(range(ranks))[::-1]  # all but the last of this order
    assert dist.group.WORLD is not None
    part = dist.group.WORLD.split_group(order[:-1])
    assert (part is None) == (rank == order[-1])
    if part is not None:
        assert part.rank() == order.index(rank)
        total = torch.tensor([float(rank)])
        part.allreduce([total], dist.AllreduceOptions()).wait()
        assert total.item() == sum(order[:-1])


def monitored() -> None:
    for _ in range(2):
        monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    group = dist.new_group([0])
    monitored_barrier(group)  # nothing on ranks that are not in it


def absent() -> None:
    """Over the store, as on backends that have no monitored barrier of their own."""
    rank, _ = here()
    world = dist.group.WORLD
    assert world is not None
    barriers._meet(world, timedelta(seconds=30))
    barriers._meet(world, None)
    if rank != 1:
        with pytest.raises(dist.DistBackendError, match=r"#2 .* These ranks have not come: 1\."):
            barriers._meet(world, timedelta(seconds=1))


def dtensors() -> None:
    rank, ranks = here()
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(5.0 * 3).view(5, 3)
    dealt = distribute_tensor(whole, mesh, [Shard(0)])
    assert_equal(dealt.full_tensor(), whole, "full")
    assert_equal(dealt.redistribute(placements=[Shard(1)]).full_tensor(), whole, "all-to-all")
    product = dealt @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    assert isinstance(product, DTensor)
    assert_equal(product.full_tensor(), whole @ whole.t(), "product")

    total = functional.all_reduce(torch.full((3,), float(rank)), "sum", mesh)
    assert_equal(total + 0, torch.full((3,), sum(range(ranks)) * 1.0), "functional all_reduce")
    parts = functional.reduce_scatter_tensor(torch.ones(ranks * 2), "sum", 0, mesh)
    assert_equal(parts + 0, torch.full((2,), float(ranks)), "functional reduce_scatter")


def ddp() -> None:
    rank, ranks = here()
    torch.manual_seed(0)
    reference = torch.nn.Linear(4, 2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model.module.load_state_dict(reference.state_dict())
    batches = torch.randn(ranks, 3, 4)
    for loss in (
        model(batches[rank]).square().mean(),
        torch.stack([reference(x).square().mean() for x in batches]).mean(),
    ):
        loss.backward()
    # fp32, a few terms in another order.
    torch.testing.assert_close(
        model.module.weight.grad, reference.weight.grad, rtol=1e-5, atol=1e-6
    )


def asynchronous() -> None:
    rank, ranks = here()
    tensors = [torch.full((1000,), float(rank + each)) for each in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_completed()
    for each, tensor in enumerate(tensors):
        assert tensor[0].item() == sum(range(ranks)) + each * ranks
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=30))


def other_devices() -> None:
    with pytest.raises(ValueError, match="moves tensors of the CPU, and this one is on meta"):
        dist.all_reduce(torch.empty(2, device="meta"))


def larger_than_a_call() -> None:
    from trine.distributed.mpi import buffers

    buffers.MOST_BYTES = 8  # as if MPI could count this far only
    moves_every_dtype()
    messages()
    rank, ranks = here()
    own = held(rank, 50, torch.float32)
    dist.all_reduce(own)
    rows = torch.stack([held(each, 50, torch.float32) for each in range(ranks)])
    assert_equal(own, rows.sum(0), "all_reduce")


EVERYWHERE = (
    moves_every_dtype,
    reduces_every_dtype,
    bitwise,
    uneven_parts,
    objects,
    asynchronous,
    monitored,
)
WITH_OTHERS = (messages, dtensors, ddp, absent)
# gloo adds up half types in half precision, wants contiguous tensors, overwrites what is sent
# from another rank's place in the result, and speaks torch's words.
ON_MPI = (sums_in_the_order_of_ranks, strided, aliases, other_devices, split, larger_than_a_call)


def everything() -> list[str]:
    """All bodies in one launch, since ranks take seconds to start; returns their names."""
    _, ranks = here()
    bodies: list[Callable[[], None]] = [*EVERYWHERE]
    bodies += WITH_OTHERS if ranks > 1 else ()
    bodies += [groups] if ranks == 4 else ()
    bodies += ON_MPI if on_mpi() and ranks > 1 else ()
    for body in bodies:
        body()
        dist.barrier()
    return [body.__name__ for body in bodies]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_everything_that_c10d_offers(
    run_on_ranks: RunOnRanks, backend: str, world_size: int
) -> None:
    bodies = run_on_ranks(everything, world_size)[0]

    assert ("sums_in_the_order_of_ranks" in bodies) == (backend == "mpi" and world_size > 1)
