"""GradReducer: from the whole gradients on each rank to the sharded ones the optimizer sees.

It owns the reduction of one parameter group: what is laid into the buffers, the
reduce-scatter over the ranks that share a copy, the all-reduce over the ranks that hold
copies, and the hand-over. `param_group` tells it when; it never touches gathered storage.

Note [Used somewhere]
    Behind its gradients each rank sends one number per parameter: positive if it has used it.
    Their sum is positive where any rank has, so ranks that used different parameters agree
    without a collective of their own. Only a rank that misses a gradient has to look. The
    numbers are scaled as the gradients are, so `_mark` makes them large enough to survive it.

Note [Gradients that wait]
    A backward may leave its gradients for a later one to reduce: whole, in
    `ShardedParam.keep_grad`, or added up over the ranks of one copy, here. In between a user
    may freeze or unfreeze parameters, cast them or exchange them. So what waits is added for
    each parameter by itself, and one that was trained then takes part in the next reduction
    though it is frozen now. Which ones do follows from what was frozen when, the same on all
    ranks, never from which gradients this rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trine.core import tracing
from trine.core.devices import Event
from trine.distributed._fsdp.collectives import Comm, Pending, PendingReduce
from trine.distributed._fsdp.comm_hook import CommHook
from trine.distributed._fsdp.finite import FiniteCheck
from trine.distributed._fsdp.grads import ShardedGrads
from trine.distributed._fsdp.layout import GroupLayout
from trine.distributed._fsdp.memory_counters import MemoryCounters
from trine.distributed._fsdp.modes import without_grad
from trine.distributed._fsdp.offload import HostMemory
from trine.distributed._fsdp.param import ShardedParam
from trine.distributed._fsdp.torch_internals import chunk_cat
from trine.distributed._fsdp.transfers import Transfer, Transfers
from trine.distributed.ledger import ledger_of
from trine.distributed.process_groups import BorrowedGroup

__all__ = ["GradReducer", "ReduceSettings"]


_KEPT_NBYTES = 16 * 2**10  # of gradients, for the next step


@dataclass
class ReduceSettings:
    """What a user sets for the reductions of one module; shared by its groups.

    Attributes:
        divide_by: what the sum over all ranks is divided by; None for their number.
        all_reduces: whether sums go to the other copies, or are kept until one does.
        hook: called with the reduced flat gradients of a group before they are handed out.
        finite: looks at each rank's own gradients before they are reduced.
        comm_hook: reduces in the place of the one collective that adds up; `divide_by` is 1 then.
    """

    divide_by: float | None = None
    all_reduces: bool = True
    hook: Callable[[Tensor], None] | None = None
    finite: FiniteCheck | None = None
    comm_hook: CommHook | None = None


@dataclass
class _Stored:
    """Gradients on their way to the host."""

    source: Tensor
    grads: ShardedGrads
    done: Event


@dataclass(eq=False)
class _Plan:
    """What follows from which parameters take part; made once for each choice."""

    params: list[ShardedParam]
    left_out: list[ShardedParam]
    layout: GroupLayout
    grads: ShardedGrads | None = None
    all_used: tuple[torch.dtype, float, Tensor] | None = None  # a result of `marks`, and for what

    def marks(
        self, used: list[bool], ranks: int, dtype: torch.dtype, device: torch.device, scale: float
    ) -> Tensor:
        """See Note [Used somewhere]; for each rank the same."""
        known = self.all_used
        if known is not None and known[0] is dtype and known[1] == scale and all(used):
            return known[2]
        mark = _mark(scale, ranks, (dtype, self.params[0].dtype))
        marks = torch.tensor([mark * here for here in used], dtype=dtype, device=device)
        marks = marks.repeat(ranks)
        if all(used):
            self.all_used = dtype, scale, marks
        return marks

    def parts(self, flat: Tensor) -> dict[ShardedParam, tuple[Tensor, Tensor]]:
        """Each parameter's elements of a flat buffer, and its mark."""
        end = self.layout.shard_numel
        chunks = torch.split_with_sizes(flat[:end], self.layout.chunk_numels)
        marks = flat[end:].unbind()
        return dict(zip(self.params, zip(chunks, marks, strict=True), strict=True))


@dataclass
class _Kept:
    """Sums that have not been all-reduced yet, as a plan lays them."""

    plan: _Plan
    sums: Tensor

    def add_to(self, summed: Tensor, plan: _Plan) -> None:
        """Add to sums that another plan has laid, of these parameters and perhaps more."""
        if plan is self.plan:
            summed.add_(self.sums)
            return
        into = plan.parts(summed)
        for param, (chunk, mark) in self.plan.parts(self.sums).items():
            sums, marks = into[param]
            sums.add_(chunk)
            marks.add_(mark)


@dataclass
class _Reduction:
    """One reduction, from reduce-scatter to hand-over."""

    scatter: Transfer
    pending: PendingReduce
    plan: _Plan
    used: list[bool]
    summed: Tensor | None = None
    all_reduce: Pending | None = None
    all_reduce_transfer: Transfer | None = None
    stored: _Stored | None = None


class GradReducer:
    """Reduces the gradients of one group.

    Args:
        params: the group's parameters.
        comm: collectives over the ranks that share one copy.
        replicate_group: the ranks that hold the same part of other copies, if there are any.
        settings: what the user chose.
        transfers: waits, and reports.
        memory: reports what buffers take.
        host: where the gradients shall live, if not on the device.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        comm: Comm,
        replicate_group: dist.ProcessGroup | None,
        settings: ReduceSettings,
        transfers: Transfers,
        memory: MemoryCounters,
        host: HostMemory | None = None,
    ) -> None:
        self.comm = comm
        self.settings = settings
        self._params = list(params)
        self._replicate_group = None if replicate_group is None else BorrowedGroup(replicate_group)
        self._copies = 1 if replicate_group is None else replicate_group.size()
        self._transfers = transfers
        self._memory = memory
        self._host = host
        self._plans: dict[tuple[bool, ...], _Plan] = {}
        self._reduction: _Reduction | None = None
        self._kept: _Kept | None = None

    @property
    def owes(self) -> bool:
        """Whether gradients of an earlier backward wait that a reduction now would hand out."""
        hands_out = self._replicate_group is None or self.settings.all_reduces
        return hands_out and any(param.awaits_reduction for param in self._params)

    def forget_buffers(self) -> None:
        """The parameters' dtype or device has changed: buffers made before do not fit."""
        self._plans.clear()
        if self._reduction is not None:
            self._reduction.plan.grads = None

    @without_grad
    def start(self, dtype: torch.dtype) -> None:
        """Lay the gradients into a buffer of `dtype` and start the reduce-scatter."""
        assert self._reduction is None, "a second reduction before the first is finished"
        key = tuple([p.awaits_reduction or p.sharded.requires_grad for p in self._params])
        plan = self._plans.get(key)
        if plan is None:
            params = [p for p, wanted in zip(self._params, key, strict=True) if wanted]
            left_out = [p for p, wanted in zip(self._params, key, strict=True) if not wanted]
            layout = GroupLayout([param.layout for param in params], extra=len(params))
            plan = self._plans[key] = _Plan(params, left_out, layout)
        for param in plan.left_out:
            param.drop_grad()  # frozen since the forward that this backward is of
        if not plan.params:
            return
        grads, used = self._take(plan.params, dtype)
        if self.settings.finite is not None:
            self.settings.finite.note(plan.params, grads)
        ranks = self.comm.world_size
        if ranks * self._copies == 1 and not any(used):
            return
        device = plan.params[0].device
        grads.append(plan.marks(used, ranks, dtype, device, self._scale()))
        rows = self.comm.reduce_buffer((ranks, plan.layout.part_numel), dtype, device)
        chunk_cat(grads, ranks, rows)
        if tracing.enabled:
            self._memory.tell_buffers(self.comm.pool)
        del grads
        transfer = Transfer("reduce_scatter", dtype, rows.nbytes // ranks * (ranks - 1))
        pending = self._transfers.start(
            transfer, rows, lambda: self._reduce_scatter(rows, plan), self.comm.ledger
        )
        self._reduction = _Reduction(transfer, pending, plan, used)

    def _reduce_scatter(self, rows: Tensor, plan: _Plan) -> PendingReduce:
        hook = self.settings.comm_hook
        if hook is None or self._replicate_group is not None:
            return self.comm.reduce_scatter(rows)
        return hook.reduce_scatter(rows, len(plan.params), self.comm)

    def _take(
        self, params: Sequence[ShardedParam], dtype: torch.dtype
    ) -> tuple[list[Tensor], list[bool]]:
        """The gradients, zeros for those that are absent, and which are present."""
        grads: list[Tensor] = []
        used: list[bool] = []
        for param in params:
            grad = param.take_grad()
            used.append(grad is not None)
            if grad is None:
                zero = torch.zeros((), dtype=dtype, device=param.device)
                grad = zero.expand(param.layout.shape)
            elif grad.layout is not torch.strided:
                raise NotImplementedError(
                    f"The gradient of {param.fqn} is sparse ({grad.layout}); only dense "
                    "gradients can be reduced. Make the embedding with sparse=False."
                )
            elif param.dim != 0:
                grad = param.lay(grad)
            grads.append(grad)
        return grads, used

    @without_grad
    def advance(self) -> bool:
        """Take the reduction one collective, or the copy to the host, further; wait for that.

        Returns:
            True if nothing is under way any more: gradients are handed out, or kept.
        """
        reduction = self._reduction
        if reduction is None:
            return True
        if reduction.stored is not None:
            self._hand_out_stored(reduction, reduction.stored)
            return True
        if reduction.summed is None:
            self._transfers.wait(reduction.scatter, reduction.pending)
            if self._replicate_group is None:
                return self._hand_out(reduction)
            summed = self._add_up(reduction)
            if not self.settings.all_reduces:
                self._keep(reduction.plan, summed)
                return True
            self._start_all_reduce(reduction, self._replicate_group())
            return False
        assert reduction.all_reduce is not None
        assert reduction.all_reduce_transfer is not None
        self._transfers.wait(reduction.all_reduce_transfer, reduction.all_reduce)
        return self._hand_out(reduction)

    def _scale(self) -> float:
        divide_by = self.settings.divide_by
        return 1 / (self.comm.world_size * self._copies if divide_by is None else divide_by)

    def _add_up(self, reduction: _Reduction) -> Tensor:
        """Sums of this rank's part in a buffer of its own, with those that were kept."""
        plan = reduction.plan
        dtype = torch.promote_types(reduction.scatter.dtype, torch.float32)
        device = plan.params[0].device
        summed = self.comm.pool.acquire((plan.layout.part_numel,), dtype, device)
        if tracing.enabled:
            self._memory.tell_buffers(self.comm.pool)
        reduction.pending.sum_into(summed, self._scale())
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.add_to(summed, plan)
            self.comm.pool.release(kept.sums)
        reduction.summed = summed
        return summed

    def _keep(self, plan: _Plan, summed: Tensor) -> None:
        """Leave sums for a later reduction; see Note [Gradients that wait]."""
        self._reduction = None
        self._kept = _Kept(plan, summed)
        for param in plan.params:
            param.awaits_reduction = True

    def _start_all_reduce(self, reduction: _Reduction, group: dist.ProcessGroup) -> None:
        """Add up over the copies, in the dtype of the reduction."""
        wire = summed = reduction.summed
        assert summed is not None
        assert wire is not None
        if reduction.scatter.dtype is not summed.dtype:
            wire = self.comm.pool.acquire(
                tuple(summed.shape), reduction.scatter.dtype, summed.device
            )
            wire.copy_(summed)
            self.comm.pool.release(summed)
            reduction.summed = wire
        nbytes = 2 * wire.nbytes * (self._copies - 1) // self._copies
        transfer = Transfer("all_reduce", wire.dtype, nbytes)
        hook, marks = self.settings.comm_hook, len(reduction.plan.params)

        def all_reduce() -> Pending:
            if hook is not None:
                return hook.all_reduce(wire, marks, group)
            return Pending([dist.all_reduce(wire, group=group, async_op=True)])

        ledger = ledger_of(group)
        reduction.all_reduce = self._transfers.start(transfer, wire, all_reduce, ledger)
        reduction.all_reduce_transfer = transfer

    def _hand_out(self, reduction: _Reduction) -> bool:
        """Give the parameters their gradients, or (False) send these to the host first."""
        plan = reduction.plan
        grads = self._grads_for(plan)
        flat = grads.flat
        if self._host is not None:
            flat = self.comm.pool.acquire(tuple(flat.shape), flat.dtype, plan.params[0].device)
        if reduction.summed is None:
            reduction.pending.sum_into(flat, self._scale())
        else:
            flat.copy_(reduction.summed)
            self.comm.pool.release(reduction.summed)
        if self.settings.hook is not None:
            self.settings.hook(flat[: plan.layout.shard_numel])
        if self._host is not None:
            reduction.stored = _Stored(flat, grads, self._host.store(flat, grads.flat))
            return False
        self._reduction = None
        grads.hand_out(plan.params, _used_anywhere(reduction, grads))
        return True

    def _hand_out_stored(self, reduction: _Reduction, stored: _Stored) -> None:
        stored.done.synchronize()
        self.comm.pool.release(stored.source)
        self._reduction = None
        stored.grads.hand_out(reduction.plan.params, _used_anywhere(reduction, stored.grads))

    def _grads_for(self, plan: _Plan) -> ShardedGrads:
        """A gradient buffer that nobody sees: the one of the last step if that is so."""
        unset = all(param.sharded.grad is None for param in plan.params)
        if plan.grads is not None and unset and plan.grads.is_free():
            return plan.grads
        grads = ShardedGrads(plan.params, plan.layout, self._host)
        # Not a large one: it would take memory all through forward and backward, and next to
        # what is computed with it the making of DTensors is cheap.
        plan.grads = grads if unset and grads.flat.nbytes <= _KEPT_NBYTES else None
        return grads

    def drop(self) -> None:
        """Forget the reduction under way, and what was kept."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            (reduction.all_reduce or reduction.pending).wait()
            if reduction.stored is not None:
                reduction.stored.done.synchronize()
        self._kept = None
        if self.settings.finite is not None:
            self.settings.finite.take()


def _used_anywhere(reduction: _Reduction, grads: ShardedGrads) -> list[bool]:
    """Which parameters any rank has used; see Note [Used somewhere]."""
    used = reduction.used
    if all(used):
        return used
    return [here or abs(mark) > 0 for here, mark in zip(used, grads.extra.tolist(), strict=True)]


def _mark(scale: float, ranks: int, dtypes: Sequence[torch.dtype]) -> float:
    """What says "used" of a parameter and survives `scale`; see Note [Used somewhere].

    It is 1 unless 1 would underflow. A sum over `ranks` stays finite; a factor for which that
    is too small still takes every gradient with it.

    Args:
        scale: what the sum is multiplied by.
        ranks: that add up in half types.
        dtypes: that the sum passes through.
    """
    smallest = max(torch.finfo(dtype).tiny for dtype in dtypes)
    largest = min(torch.finfo(dtype).max for dtype in dtypes)
    return max(1.0, min(smallest / scale, largest / ranks))
