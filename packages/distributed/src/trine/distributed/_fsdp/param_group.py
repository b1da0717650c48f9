"""ParamGroup: the parameters that are gathered and reduced together. It acts, never decides.

All parameters of a group have one dtype, one mesh and one policy, so one flat buffer and
one collective serve them all. The schedule calls `unshard`, `wait_for_unshard`, `reshard`,
`reshard_until_backward`, `reduce_grads`, `finish_reduce` and `reset`; each does what it says
whatever came before, and nothing where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trine.core import tracing
from trine.core.devices import Event
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import Comm, Pending
from trine.distributed._fsdp.custom_comm import AllGather, CustomComm, ReduceScatter
from trine.distributed._fsdp.labels import transfers_for
from trine.distributed._fsdp.layout import GroupLayout
from trine.distributed._fsdp.memory_counters import MemoryCounters
from trine.distributed._fsdp.modes import without_grad
from trine.distributed._fsdp.offload import HostMemory
from trine.distributed._fsdp.optimizer_steps import StepCount, count_optimizer_steps
from trine.distributed._fsdp.param import ShardedParam, faces_of, rows_in, trainable
from trine.distributed._fsdp.plain_steps import step_on_plain_tensors
from trine.distributed._fsdp.policies import MixedPrecisionPolicy
from trine.distributed._fsdp.reducer import GradReducer, ReduceSettings
from trine.distributed._fsdp.subgroup import SubgroupGather
from trine.distributed._fsdp.torch_internals import (
    Faces,
    all_stand,
    backward_running,
    put_parameters,
    versions_of,
)
from trine.distributed._fsdp.transfers import Transfer
from trine.distributed.mesh import MeshAxes

__all__ = ["ParamGroup", "refuse_meta"]


class _Storage(Enum):
    """What the gathered storage holds."""

    EMPTY = "empty"
    FILLING = "filling"
    WHOLE = "whole"
    LENT = "lent"  # nothing, and the slots are somebody else's


@dataclass
class _Gather:
    transfer: Transfer
    pending: Pending
    out: Tensor | None  # None: it arrives in place
    own: Tensor | None  # this rank's row, if it is not in `out`
    recalled: bool  # for backward, after a forward


class ParamGroup:
    """Parameters gathered by one all-gather and reduced by one reduce-scatter.

    Args:
        params: at least one, all of one dtype.
        axes: the ranks they are cut over, and those that hold copies.
        comm: collectives over the ranks they are cut over.
        policy: dtypes to gather and reduce in.
        settings: how to reduce.
        again: how to gather for backward, if not like for forward.
        host: where shards and gradients live, if not on the device.

    Attributes:
        name: full name of the module whose parameters these are; see `rename`.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        axes: MeshAxes,
        comm: Comm,
        policy: MixedPrecisionPolicy,
        settings: ReduceSettings,
        again: SubgroupGather | None = None,
        host: HostMemory | None = None,
    ) -> None:
        # Those cut along dim 0 come first: one operation serves them all.
        self.params = sorted(params, key=lambda param: bool(param.dim))
        self.axes = axes
        self.comm = comm
        self.policy = policy
        self.name = "(root)"
        self._names_below = [param.fqn for param in self.params]
        self.layout = GroupLayout([param.layout for param in self.params])
        self._host = host
        self._fetched: Event | None = None  # behind the last read of shards on the host
        self._holds = _Storage.EMPTY
        self._gather: _Gather | None = None
        self._again = again
        self._transfers = transfers_for(comm)
        self._memory = MemoryCounters(self.params)
        self._reducer = GradReducer(
            self.params, comm, axes.replicate_group, settings, self._transfers, self._memory, host
        )
        self._gathered_at = (-1, -1)
        self._flat: Tensor | None = None
        self._steps = StepCount()
        count_optimizer_steps()
        step_on_plain_tensors()
        for param in self.params:
            param.steps = self._steps
            param.show_sharded()
        if not any(param.local.is_meta for param in self.params):
            self._allocate()

    # --- buffers ----------------------------------------------------------------------

    def _allocate(self) -> None:
        """Lay the shards into one flat buffer and make the gathered storage."""
        dtypes = {param.dtype for param in self.params}
        if len(dtypes) != 1:
            names = ", ".join(f"{param.fqn}: {param.dtype}" for param in self.params)
            raise ValueError(
                f"The parameters of one group must have one dtype; now they have {names}. "
                "Cast all of them, or none."
            )
        dtype = dtypes.pop()
        floating = dtype.is_floating_point
        self._gather_dtype = (self.policy.param_dtype or dtype) if floating else dtype
        self._reduce_dtype = (self.policy.reduce_dtype or self._gather_dtype) if floating else dtype
        home, host = self.params[0].local.device, self._host
        device = home if host is None else host.device.torch_device
        ranks, layout = self.comm.world_size, self.layout
        with torch.inference_mode(False), torch.no_grad():
            if host is None:
                flat = torch.zeros(layout.shard_numel, dtype=dtype, device=home)
            else:
                flat = host.empty(layout.shard_numel, dtype).zero_()
            whole = torch.empty(ranks * layout.shard_numel, dtype=self._gather_dtype, device=device)
            self._padded: list[Tensor] = []
            self._scattered: list[tuple[ShardedParam, int, Tensor]] = []
            for param, offset, numel in zip(
                self.params, layout.offsets, layout.chunk_numels, strict=True
            ):
                rows = rows_in(flat, offset, param.layout.shape_of(self.comm.rank))
                start = ranks * offset
                padded = _view(whole, start, (ranks, numel))
                param.bind(param.own(rows), _view(whole, start, param.shape))
                if param.dim:
                    # Views of their own: writing through the parameter itself would tell
                    # autograd that what it has saved has changed.
                    self._scattered.append((param, offset, _view(whole, start, param.shape)))
                else:
                    self._padded.append(padded)
        self._flat = flat
        self._sharded_faces = self._faces([param.sharded for param in self.params])
        self._wholes = [param.unsharded for param in self.params if param.unsharded is not None]
        self._whole_faces = self._faces(self._wholes)
        self._watched = [param.sharded for param in self.params]
        self._stood = faces_of((param.slots[0], param.sharded) for param in self.params)
        self._locals = [param.local for param in self.params]
        self._apart = [param for param in self.params if not param.linked]
        self._shown = trainable(self._watched)
        self._whole_flat = whole
        self._whole = whole.untyped_storage()
        self._whole_nbytes = self._whole.nbytes()
        self._whole.resize_(0)
        self._drop_piece()
        self._reducer.forget_buffers()

    def _faces(self, params: Sequence[nn.Parameter]) -> Faces:
        owned = zip(self.params, params, strict=True)
        return faces_of((slot, face) for param, face in owned for slot in param.slots)

    def _moved(self) -> bool:
        """Whether somebody exchanged a parameter or its memory."""
        if all_stand(self._stood, self._watched, self._locals):
            return False
        return any(param.moved for param in self.params)

    def _refresh(self, moved: bool) -> None:
        """Have all shards in the flat buffer, made anew if one was exchanged, cast or moved."""
        if moved:
            for param in self.params:
                param.refresh()
            refuse_meta(self.meta_names(), self.home)
            self._refuse_elsewhere()
            self._allocate()
        for param in self._apart:
            param.fill()

    @property
    def gathers_again_among(self) -> int | None:
        """How many ranks gather for backward, if not those that gather for forward."""
        return None if self._again is None else self._again.comm.world_size

    @property
    def home(self) -> str:
        """The kind of device on which the shards live."""
        host = self._host
        return (self.axes.device.torch_device if host is None else host.home).type

    def _refuse_elsewhere(self) -> None:
        away = [param for param in self.params if param.local.device.type != self.home]
        if not away:
            return
        listed = _listed([f"{param.fqn} (on {param.local.device})" for param in away])
        cause = "mesh" if self._host is None else "CPUOffloadPolicy"
        raise RuntimeError(
            f"These parameters are not on {self.home}, where their {cause} wants them: {listed}. "
            f"Give them memory there, model.to_empty(device='{self.home}'), "
            f"or move them back, model.to('{self.home}')."
        )

    def meta_names(self) -> list[str]:
        """The parameters that have no memory yet."""
        found = []
        for param in self.params:
            value = param.slots[0].get()
            if value is not None and value.is_meta:
                found.append(param.fqn)
        return found

    def rename(self, name: str) -> None:
        """Take the full name that the module has under its root; parameters follow."""
        prefix = "" if name == "(root)" else f"{name}."
        self.name = self._transfers.unit = name
        self._memory.rename(name)
        for param, below in zip(self.params, self._names_below, strict=True):
            param.fqn = prefix + below

    def trained(self) -> list[Tensor]:
        """The whole parameters that need gradients; for hooks."""
        return [
            param.unsharded
            for param in self.params
            if param.unsharded is not None and param.unsharded.requires_grad
        ]

    def use_pool(self, pool: BufferPool) -> None:
        """Take communication buffers from `pool`."""
        self.comm.use_pool(pool)
        self._reducer.comm.use_pool(pool)

    def exchange_comm(
        self, gather: AllGather | None = None, reduce: ReduceScatter | None = None
    ) -> None:
        """Communicate with collectives of the user's."""
        apart = self._reducer.comm is not self.comm
        self.comm = CustomComm(self.comm, gather, reduce)
        inner = self._reducer.comm if apart else self.comm
        self._reducer.comm = CustomComm(inner, gather, reduce) if apart else self.comm

    def reduce_apart(self, made: dict[dist.ProcessGroup, dist.ProcessGroup] | None) -> None:
        """Reduce in a process group of its own, or (None) in that of the gathers.

        Args:
            made: groups made so far; see `Comm.separate`.
        """
        self._reducer.comm = self.comm if made is None else self.comm.separate(made)

    # --- gathering --------------------------------------------------------------------

    @without_grad
    def unshard(self) -> None:
        """Start to gather the parameters."""
        if self._holds is not _Storage.EMPTY:
            # Backward computes with what forward did.
            if self._holds is _Storage.LENT:
                raise RuntimeError(
                    f"{self.name} cannot compute, neither forward nor backward, inside "
                    "summon_full_params, where it shows copies of its whole parameters. Leave "
                    "the context first."
                )
            whole_enough = self._holds is _Storage.FILLING or backward_running() != -1
            if whole_enough or self._gathered_at == self._now():
                return
            self.reshard()
        moved = self._flat is None or self._moved()
        # Backward computes with what forward did, so the stamp of forward's gather stays. What
        # was exchanged in between waits in its slot for the next forward.
        recalled = self._flat is not None and backward_running() != -1
        if not recalled:
            self._refresh(moved)
        elif moved:
            slots = [slot for param in self.params for slot in param.slots]
            self._sharded_faces = faces_of((slot, slot.get()) for slot in slots)
        flat = self._flat
        assert flat is not None
        if self._again is not None and self._again.holds_piece:
            if self._gathered_at == self._now():
                self._gather = self._gather_again(self._again, recalled)
                self._holds = _Storage.FILLING
                self._tell_memory()
                return
            self._again.drop()
        if not recalled:
            self._gathered_at = self._now()
        host = self._host
        sends_as_is = host is None and flat.dtype is self._gather_dtype
        own = None
        if sends_as_is and not self._scattered and self.comm.gathers_others_only(flat):
            own = flat
        rows = self.comm.world_size - (own is not None)
        out = self.comm.gather_buffer(
            (rows, flat.numel()), self._gather_dtype, self.params[0].device
        )
        shard = flat if sends_as_is else out[self.comm.rank]

        sent = flat.numel() * out.element_size() * (self.comm.world_size - 1)
        transfer = Transfer("all_gather", self._gather_dtype, sent)

        def gather() -> Pending:
            return self._transfers.start(transfer, out, lambda: self.comm.all_gather(out, shard))

        if host is not None:
            pending, self._fetched = host.fetch(flat, shard, gather)
        else:
            if shard is not flat:
                shard.copy_(flat)
            pending = gather()
        self._gather = _Gather(transfer, pending, out, own, recalled)
        self._holds = _Storage.FILLING
        self._tell_memory(grads=not recalled)  # for the optimizer may have dropped them

    def _gather_again(self, again: SubgroupGather, recalled: bool) -> _Gather:
        whole = self._whole_flat
        self._whole.resize_(self._whole_nbytes)
        transfer = Transfer("all_gather", self._gather_dtype, again.nbytes(whole))
        pending = self._transfers.start(
            transfer, whole, lambda: again.fill(whole), again.comm.ledger
        )
        return _Gather(transfer, pending, None, None, recalled)

    def _now(self) -> tuple[int, int]:
        """Changes when an optimizer or the user changes the shards, on all ranks alike.

        Fused and foreach optimizers write past the counters of the tensors, so steps are
        counted too. What is written to the plain tensor inside of a parameter does not count,
        since a program may leave it out where a rank holds no rows.
        """
        return self._steps.count, versions_of(self._watched)

    @without_grad
    def wait_for_unshard(self) -> None:
        """Have the whole parameters in the modules' slots; gathers if nobody has started to."""
        if self._holds is _Storage.WHOLE:
            return
        if self._holds is _Storage.EMPTY:
            self.unshard()
        gather = self._gather
        assert gather is not None
        if self._host is not None and self._fetched is not None:
            self._host.await_fetched(self._fetched)
        self._transfers.wait(gather.transfer, gather.pending)
        self._gather = None
        if gather.out is not None:
            with tracing.span("copy_out", "mem", self.name):
                self._whole.resize_(self._whole_nbytes)
                self._tell_memory()
                if gather.own is None:
                    self._copy_out(gather.out)
                else:
                    self._copy_out_around(gather.out, gather.own)
            self.comm.release(gather.out)
        if not gather.recalled:
            self._follow_sharded()
        put_parameters(self._whole_faces)
        self._holds = _Storage.WHOLE
        self._tell_memory()

    def _copy_out(self, gathered: Tensor) -> None:
        """Lay the rows of all ranks (one of `gathered` for each) into the whole parameters."""
        numels = self.layout.chunk_numels
        if self._scattered:
            # These come last in the group.
            numels = numels[: len(self._padded)]
            for param, offset, into in self._scattered:
                end = offset + param.layout.chunk_numel
                param.gather_from(gathered[:, offset:end], into)
            gathered = gathered[:, : sum(numels)]
        if numels:
            torch.split_with_sizes_copy(gathered, numels, dim=1, out=self._padded)

    def _copy_out_around(self, others: Tensor, own: Tensor) -> None:
        """The same for parameters cut along dim 0, from the rows of others and this rank's."""
        rank = self.comm.rank
        first = 0
        for rows in (others[:rank], own[None], others[rank:]):
            end = first + rows.shape[0]
            if end > first:
                into = [padded[first:end] for padded in self._padded]
                torch.split_with_sizes_copy(rows, self.layout.chunk_numels, dim=1, out=into)
            first = end

    def reshard(self) -> None:
        """Free the whole parameters and put the sharded ones into the slots."""
        self._drop_piece()
        if self._holds is _Storage.EMPTY or self._holds is _Storage.LENT:
            return
        if self._holds is _Storage.FILLING:
            self.wait_for_unshard()  # a prefetch that nobody used: its buffer must return
        self._show_shards()

    @without_grad
    def reshard_until_backward(self) -> None:
        """Like `reshard`, but keep what the next gather needs to be among few ranks."""
        if self._again is None or self._holds is not _Storage.WHOLE:
            self.reshard()
            return
        self._again.keep(self._whole_flat)
        self._show_shards()

    def _show_shards(self) -> None:
        # In backward its gradients are there, beside what is to be freed.
        self._tell_memory(grads=backward_running() != -1)
        if self._fetched is not None:
            self._fetched.synchronize()  # from here on anybody may write to them
            self._fetched = None
        self._follow_unsharded()
        put_parameters(self._sharded_faces)
        self._whole.resize_(0)
        self._holds = _Storage.EMPTY
        self._tell_memory()

    def _tell_memory(self, *, grads: bool = False) -> None:
        if tracing.enabled and self._flat is not None:
            piece = 0 if self._again is None else self._again.piece_nbytes
            whole = self._whole.nbytes() + piece
            self._memory.tell(self.comm.pool, self._flat.nbytes, whole, grads=grads)

    @property
    def is_whole(self) -> bool:
        """Whether the whole parameters are in the slots."""
        return self._holds is _Storage.WHOLE

    @property
    def is_lent(self) -> bool:
        """Whether the slots are somebody else's; see `lend`."""
        return self._holds is _Storage.LENT

    @without_grad
    def lend(self) -> None:
        """Leave the slots to the caller until `take_back`, with the newest shards behind them.

        Nothing is gathered until then. Whole gradients that wait on this rank go on waiting.
        """
        self.reshard()
        self._refresh(self._flat is None or self._moved())
        self._holds = _Storage.LENT

    def take_back(self) -> None:
        """Show the sharded parameters again, whatever is in the slots."""
        put_parameters(self._sharded_faces)
        self._holds = _Storage.EMPTY

    def gather_again_among_all(self) -> None:
        """From now on gather for backward like for forward."""
        self._again = None

    def _drop_piece(self) -> None:
        if self._again is not None:
            self._again.drop()

    # --- reducing ---------------------------------------------------------------------

    @without_grad
    def keep_grads(self) -> None:
        """Leave the gradients of this backward on this rank, for a later one to reduce."""
        if self._flat is None:
            return
        self._follow_shown()
        for param in self.params:
            param.keep_grad(self._reduce_dtype)
        self._tell_memory(grads=True)

    def _follow_shown(self) -> None:
        """Know which parameters are trained, also if a user chose it while they were whole."""
        if self._holds is _Storage.WHOLE:
            self._follow_unsharded()

    def _follow_unsharded(self) -> None:
        if trainable(self._wholes) != self._shown:
            for param in self.params:
                param.follow_unsharded()
            self._shown = trainable(self._wholes)

    def _follow_sharded(self) -> None:
        now = trainable(self._watched)
        if now != self._shown or trainable(self._wholes) != now:
            for param in self.params:
                param.follow_sharded()
            self._shown = now

    @without_grad
    def take_up_grads(self) -> bool:
        """Make ready to reduce what earlier backwards left, though this one used nothing here.

        Returns:
            False if nothing waits that `reduce_grads` would hand out.
        """
        if not self._reducer.owes:
            return False
        if self._holds is _Storage.EMPTY and self._moved():
            self._refresh(moved=True)  # no forward has: the old ones would get the gradients
        return True

    def reduce_grads(self) -> None:
        """Start to reduce the gradients over ranks.

        Every rank must call it for the same groups in the same order, whether or not it
        has gradients: one that is absent here counts as zero, and a parameter that no rank
        has used gets none.
        """
        if self._flat is not None:
            self._follow_shown()
            self._tell_memory(grads=True)
            self._reducer.start(self._reduce_dtype)
            self._tell_memory(grads=True)

    def finish_reduce(self) -> bool:
        """Wait for the reduction's collective; hand out the gradients if it was the last.

        Returns:
            False if another collective follows, which has been started.
        """
        finished = self._reducer.advance()
        self._tell_memory(grads=True)
        return finished

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the sharded gradients, or fill them with zeros, whichever face is shown.

        What was kept on this rank for a later reduction, or is being reduced, is dropped too.
        """
        self._reducer.drop()
        for param in self.params:
            param.drop_grad()
            if set_to_none:
                param.sharded.grad = None
            elif param.sharded.grad is not None:
                param.sharded.grad.zero_()
        self._tell_memory(grads=True)

    def reset(self) -> None:
        """Forget an iteration that broke off: drop its gradients, free what was gathered."""
        self._reducer.drop()
        for param in self.params:
            param.drop_grad()
        self.reshard()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def refuse_meta(names: Sequence[str], device_type: str) -> None:
    """Refuse parameters on the meta device, if there are any.

    Raises:
        RuntimeError: naming them and the way out.
    """
    if not names:
        return
    raise RuntimeError(
        f"Parameters on the meta device hold no values: {_listed(names)}. Give them memory with "
        f"model.to_empty(device='{device_type}') and values by initializing or loading, "
        "then run forward."
    )


def _view(storage_of: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    """A tensor of its own (no autograd view) over elements of another's storage."""
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    empty = torch.empty(0, dtype=storage_of.dtype, device=storage_of.device)
    return empty.set_(storage_of.untyped_storage(), start, tuple(shape), tuple(reversed(stride)))
