"""Whole parameters in the slots of modules for the time of a `with` block, and edits back.

Values, and gradients if they are asked for, are gathered one parameter at a time, as they are
stored and not as the module computes, into memory that belongs to nobody else. It knows the
states of the engine and never who asks.

Note [What comes back]
    What stands in a slot when the block ends is cut into rows again, whoever put it there: the
    parameter that was shown, with whatever its `data` is by then, or another one in its place.
    All of them are looked at before the first is written, so a refusal leaves all as they were.
    The rows are written through the sharded parameter, also where a rank holds none: by its
    version the engine sees that what it gathered before is old, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trine.distributed._fsdp.labels import transfers_for
from trine.distributed._fsdp.param import ShardedParam, attributes_of
from trine.distributed._fsdp.param_group import ParamGroup
from trine.distributed._fsdp.root import schedule_of
from trine.distributed._fsdp.showing import computing
from trine.distributed._fsdp.state import FSDPState
from trine.distributed._fsdp.torch_internals import (
    backward_running,
    local_tensor,
    put_parameters,
)
from trine.distributed._fsdp.transfers import Transfer
from trine.distributed.mesh import MeshAxes

__all__ = ["whole_params"]

_ALONE = (
    "One of them enters summon_full_params, which gathers parameters: every rank must enter it, "
    "also where one rank alone uses them (rank0_only=True shows them there only)."
)


@contextmanager
def whole_params(
    states: Sequence[FSDPState],
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """Show whole parameters inside; every rank must enter and leave together.

    Args:
        states: whose parameters, outermost first.
        writeback: keep what was edited, also if the block raises; else nothing done inside lasts.
        rank0_only: show them on the first rank that holds each, whose edits then reach all.
        offload_to_cpu: show copies in the memory of the host.
        with_grads: show, and write back, whole gradients too.

    Raises:
        RuntimeError: inside forward, backward, or another such block.
        ValueError: when the block ends, if what it leaves in a slot cannot be cut as before.
    """
    block = _Block(states, rank0_only, offload_to_cpu, with_grads)
    block.begin()
    try:
        yield
    finally:
        block.end(writeback)


class _Block:
    """One such block, from its first gather to the last row written."""

    def __init__(
        self,
        states: Sequence[FSDPState],
        rank0_only: bool,
        offload_to_cpu: bool,
        with_grads: bool,
    ) -> None:
        self._states = states
        self._rank0_only = rank0_only
        self._offload_to_cpu = offload_to_cpu
        self._with_grads = with_grads
        self._lent: list[ParamGroup] = []
        self._shown: list[_Shown] = []

    def begin(self) -> None:
        _refuse_if_busy(self._states)
        try:
            with torch.inference_mode(False), torch.no_grad():
                for state in self._states:
                    for group in state.groups:
                        group.lend()
                        self._lent.append(group)
                for ledger in {group.comm.ledger for group in self._lent}:
                    if ledger is not None:
                        ledger.doubt = _ALONE
                for group in self._lent:
                    for param in group.params:
                        self._shown.append(self._gathered(param, group))
                for state in self._states:
                    schedule_of(state).free_idle()  # buffers as large as parameters
                for each in self._shown:
                    each.show()
        except BaseException:
            self._take_back()
            raise

    def _gathered(self, param: ShardedParam, group: ParamGroup) -> _Shown:
        here = not self._rank0_only or _is_first(param.axes)
        shown = _Shown(param)
        values = [param.local]
        grad = param.sharded.grad if self._with_grads else None
        if grad is not None:
            shown.grad_dtype = grad.dtype
            values.append(_rows_of_grad(grad, param))
        wholes = []
        for local in values:
            whole = _gather(local, param, group, keep=here)
            if whole is not None:
                wholes.append(whole.cpu() if self._offload_to_cpu else whole)
        if here:
            shown.whole = param.as_whole(wholes[0])
            if len(wholes) > 1:
                shown.whole.grad = param.as_before(wholes[1].to(param.dtype))
        return shown

    def end(self, writeback: bool) -> None:
        try:
            if writeback:
                with torch.inference_mode(False), torch.no_grad():
                    self._write_back()
        finally:
            self._take_back()

    def _write_back(self) -> None:
        refusal: Exception | None = None
        edits: list[_Edit] = []
        try:
            edits = [_Edit() if each.whole is None else each.edit() for each in self._shown]
        except (TypeError, ValueError) as error:
            refusal = error
        if self._rank0_only and self._shown:
            edits = self._agree(edits, refused=refusal is not None)
        if refusal is not None:
            raise refusal
        for shown, edit in zip(self._shown, edits, strict=True):
            param = shown.param
            value, grad = edit.value, edit.grad
            if self._rank0_only:
                value = _from_first(value, param, param.dtype)
                if edit.has_grad:
                    grad = _from_first(grad, param, shown.grad_dtype or param.dtype)
            assert value is not None
            _write(param, value)
            param.sharded.requires_grad_(edit.trained)
            for name, attribute in edit.attributes.items():
                setattr(param.sharded, name, attribute)
            if self._with_grads:
                _write_grad(param, grad)

    def _agree(self, edits: list[_Edit], *, refused: bool) -> list[_Edit]:
        """What the first ranks have decided, known to all."""
        decided = [(edit.trained, edit.has_grad, False) for edit in edits]
        if refused:
            decided = [(False, False, True)] * len(self._shown)
        rows = torch.tensor(decided, dtype=torch.int64)
        start = 0
        for group in self._lent:
            end = start + len(group.params)
            axes = group.params[0].axes
            sent = rows[start:end].to(axes.device.torch_device)
            _broadcast(sent, axes)
            rows[start:end] = sent.cpu()
            start = end
        if bool(rows[:, 2].any()) and not refused:
            raise ValueError(
                f"Rank {dist.get_rank()} writes nothing back: the first rank, whose edits count "
                "with rank0_only, has refused them; see its error."
            )
        if refused:
            return []
        return [
            replace(edit, trained=bool(trained), has_grad=bool(has_grad))
            for edit, (trained, has_grad, _) in zip(edits, rows.tolist(), strict=True)
        ]

    def _take_back(self) -> None:
        for group in self._lent:
            group.take_back()
        # An exception that somebody keeps would keep this block, and with it what is whole.
        self._lent.clear()
        self._shown.clear()


@dataclass
class _Edit:
    """What a block leaves of one parameter; nothing, on a rank that shows none."""

    value: Tensor | None = None
    grad: Tensor | None = None
    attributes: dict[str, object] = field(default_factory=dict)
    trained: bool = False
    has_grad: bool = False


@dataclass(eq=False)
class _Shown:
    """A parameter and what is shown for it: None, where it stays sharded."""

    param: ShardedParam
    whole: nn.Parameter | None = None
    grad_dtype: torch.dtype | None = None

    def show(self) -> None:
        if self.whole is not None:
            put_parameters(self.param.faces(self.whole))

    def edit(self) -> _Edit:
        """What stands in the slots now; see Note [What comes back]."""
        param, found = self.param, self._found()
        value, grad = param.on_this_rank(found.detach()), found.grad
        if grad is not None:
            grad = param.on_this_rank(grad.detach())
        return _Edit(value, grad, attributes_of(found), found.requires_grad, grad is not None)

    def _found(self) -> nn.Parameter:
        param, shown = self.param, self.whole
        assert shown is not None
        in_slots = [slot.get() for slot in param.slots]
        others = {id(each): each for each in in_slots if each is not shown}
        if len(others) > 1:
            places = " and ".join(slot.name for slot in param.slots)
            raise ValueError(
                f"{param.fqn} is shared by {len(in_slots)} places ({places}), which were given "
                "different parameters inside summon_full_params. Give one of them a new one, and "
                "all get it."
            )
        found = next(iter(others.values()), shown)
        expected = tuple(param.sharded.shape)
        if found is None:
            given = "taken away"
        elif tuple(found.shape) != expected:
            given = f"given the shape {tuple(found.shape)}"
        elif isinstance(cast(object, found), DTensor) != isinstance(cast(object, shown), DTensor):
            given = f"replaced by a {type(found.data).__name__}"
        else:
            return found
        kind = "DTensor, distributed as before," if isinstance(shown.data, DTensor) else "tensor"
        raise ValueError(
            f"{param.fqn} was {given} inside summon_full_params on rank {dist.get_rank()}; "
            f"expected a {kind} of shape {expected}. Nothing is written back. Change the model "
            "before it is wrapped, or enter with writeback=False."
        )


def _refuse_if_busy(states: Sequence[FSDPState]) -> None:
    advice = "Call it between iterations, or between forward and backward."
    for state in states:
        schedule = schedule_of(state)
        if any(group.is_lent for group in state.groups):
            raise RuntimeError(
                f"summon_full_params was entered inside summon_full_params, which shows the "
                f"whole parameters of {state.name} already. Use those, or leave it first."
            )
        if schedule.in_backward:
            if backward_running() != -1:
                raise RuntimeError(
                    f"summon_full_params was entered inside backward, which is computing with "
                    f"the parameters of {state.name}. {advice}"
                )
            schedule.reset()  # the last backward raised and never ended
        if computing(state) is not None:
            raise RuntimeError(
                f"summon_full_params was entered inside the forward of {state.name}, which is "
                f"computing with its parameters. {advice}"
            )


def _gather(local: Tensor, param: ShardedParam, group: ParamGroup, *, keep: bool) -> Tensor | None:
    """The whole tensor of which each rank holds a part as it does of the parameter.

    Args:
        local: this rank's part, wherever it lives.
        param: how it is cut.
        group: whose ranks; each must call it.
        keep: whether this rank wants it.
    """
    comm, layout = group.comm, param.layout
    rows = local.reshape(1) if param.dim is None else param.lay(local)
    out = comm.gather_buffer((comm.world_size, layout.chunk_numel), local.dtype, param.device)
    own = out[comm.rank]
    own[: rows.numel()].copy_(rows.reshape(-1))
    transfers = transfers_for(comm)
    transfers.unit = param.fqn
    transfer = Transfer("all_gather", out.dtype, own.nbytes * (comm.world_size - 1))
    pending = transfers.start(transfer, out, lambda: comm.all_gather(out, own))
    transfers.wait(transfer, pending)
    whole = out.new_empty(param.shape) if keep else None
    if whole is not None:
        if param.dim:
            param.gather_from(out, whole)
        else:
            whole.view(-1).copy_(out.view(-1)[: whole.numel()])
    comm.release(out)
    return whole


def _rows_of_grad(grad: Tensor, param: ShardedParam) -> Tensor:
    local = local_tensor(grad) if isinstance(grad, DTensor) else grad
    if local.shape != param.local.shape or not isinstance(grad, DTensor):
        raise ValueError(
            f"The gradient of {param.fqn} is a {type(grad).__name__} of which rank "
            f"{dist.get_rank()} holds {tuple(local.shape)}; expected a DTensor of "
            f"{tuple(param.local.shape)}, like the parameter, to make it whole. Set it to None, "
            "or enter summon_full_params with with_grads=False."
        )
    return local


def _is_first(axes: MeshAxes) -> bool:
    groups = (axes.replicate_group, axes.shard_group)
    return all(group is None or group.rank() == 0 for group in groups)


def _broadcast(tensor: Tensor, axes: MeshAxes) -> None:
    """Give all ranks of a mesh what the first has."""
    for group, takes_part in (
        (axes.replicate_group, axes.shard_rank == 0),
        (axes.shard_group, True),
    ):
        if group is not None and takes_part and group.size() > 1:
            dist.broadcast(tensor, dist.get_process_group_ranks(group)[0], group=group)


def _from_first(value: Tensor | None, param: ShardedParam, dtype: torch.dtype) -> Tensor:
    """What the first rank has, on all ranks that hold the parameter."""
    if value is None:
        sent = torch.empty(param.shape, dtype=dtype, device=param.device)
    else:
        sent = value.to(param.device, dtype).contiguous()
    _broadcast(sent, param.axes)
    return sent


def _part_of(whole: Tensor, param: ShardedParam) -> Tensor:
    """This rank's rows of it, where they live; may share its memory."""
    first, end = param.layout.rows_of(param.axes.shard_rank)
    return param.lay(whole)[first:end].to(param.local.device)


def _write(param: ShardedParam, whole: Tensor) -> None:
    rows = _part_of(whole, param).to(param.dtype)
    cast(Tensor, param.sharded).copy_(param.as_dtensor(rows))


def _write_grad(param: ShardedParam, whole: Tensor | None) -> None:
    sharded = param.sharded
    if whole is None:
        sharded.grad = None
        return
    rows = _part_of(whole, param)
    if isinstance(sharded.grad, DTensor):
        local_tensor(sharded.grad).copy_(param.own(rows))
    else:
        sharded.grad = param.as_dtensor(rows.to(param.dtype, copy=True).contiguous())
