"""The tensors of one sharded parameter, and the slots on modules that show one of them.

A parameter has three faces:

* `sharded`, a DTensor parameter over this rank's rows. The optimizer, state dicts and
  the user see this one. It is made once and keeps its identity.
* `local`, this rank's rows as a view of the group's flat shard buffer: the plain tensor
  inside `sharded`, where torch lets us put it there.
* `unsharded`, a plain parameter over the gathered storage, made once too, in the module's
  slot while the module computes. Autograd saves it; its storage is emptied and refilled.

This module moves faces in and out of slots and takes gradients off; it does not
communicate and owns no buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from trine.distributed._fsdp.distribution import Distribution
from trine.distributed._fsdp.layout import ShardLayout
from trine.distributed._fsdp.optimizer_steps import StepCount
from trine.distributed._fsdp.successors import note_owner, note_successor
from trine.distributed._fsdp.torch_internals import (
    Faces,
    copy_grad_hooks,
    dtensor_over,
    local_tensor,
    module_parameters,
    nbytes_here,
    put_parameters,
    set_local_tensor,
    stands_in,
)
from trine.distributed.mesh import MeshAxes

__all__ = ["ShardedParam", "Slot", "attributes_of", "faces_of", "rows_in", "trainable"]

_requires_grad = attrgetter("requires_grad")

_OF_DTENSOR = ("_local_tensor", "_spec", "_is_param")


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A place in which a module keeps a parameter."""

    module: nn.Module
    name: str

    def get(self) -> nn.Parameter | None:
        """What is there now."""
        return module_parameters(self.module).get(self.name)


def trainable(params: Sequence[nn.Parameter]) -> list[bool]:
    """Which of `params` are not frozen."""
    return list(map(_requires_grad, params))


def faces_of(found: Iterable[tuple[Slot, nn.Parameter | None]]) -> Faces:
    """What to put where, so that each slot has its parameter; each module once, to be quick."""
    by_module: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
    for slot, face in found:
        by_module.setdefault(slot.module, {})[slot.name] = face
    return list(by_module.items())


def rows_in(flat: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """Elements of a flat buffer as a tensor with a storage of its own, over the same memory.

    A view would do, but for two things that follow from its storage being the whole buffer:
    DTensor loses track of an offset in it, and `torch.save` writes all of it.
    """
    numel = prod(shape)
    if not numel:
        return flat.new_empty(tuple(shape))
    part = flat.detach()[offset : offset + numel]
    # A dtype that DLPack does not know stays a view.
    with contextlib.suppress(BufferError, RuntimeError, TypeError):
        part = from_dlpack(part)
    return part.view(tuple(shape))


def attributes_of(param: nn.Parameter) -> dict[str, object]:
    """What users have attached to a parameter."""
    return {name: value for name, value in vars(param).items() if name not in _OF_DTENSOR}


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


class ShardedParam:
    """One parameter, cut over ranks.

    Buffers hold rows: slices along the dim that is cut, whichever it is, one behind the
    other. A 0-dim parameter cannot be cut; it is held by every rank, and in buffers it is one
    row for each, so that it travels with the others and its gradient is reduced for all.

    Args:
        param: the whole parameter, equal on every rank, or a DTensor over other ranks; not
            changed.
        slots: where it stands; several if it is tied.
        axes: the ranks it is cut over.
        fqn: its name for messages.
        dim: along which it is cut.
        home: where its rows live.

    Attributes:
        shape: of what the ranks of `axes` share: the whole, unless tensor parallelism has
            dealt the parameter out before.
        layout: how its rows are dealt.
        sharded: what the user sees. Put into the slots by `show_sharded`.
        local: this rank's rows, once bound in the group's buffer.
        unsharded: what the module computes with; None until `bind`.
        steps: how often it may have been optimized.
        awaits_reduction: whether it was trained in a backward whose gradients no reduction has
            handed out yet. The same on all ranks, also on one that has no gradient.
    """

    def __init__(
        self,
        param: nn.Parameter,
        slots: Sequence[Slot],
        axes: MeshAxes,
        fqn: str,
        dim: int = 0,
        *,
        home: torch.device,
    ) -> None:
        self.slots = tuple(slots)
        self.fqn = fqn
        self.axes = axes
        self._before: Distribution | None = None
        self._global_shape = tuple(param.shape)
        whole = param.detach()
        if isinstance(whole, DTensor):
            self._before = Distribution(whole, axes, fqn)
            whole = whole.to_local()
        self.shape = tuple(whole.shape)
        self.dim = dim if self.shape else None
        with torch.no_grad():
            laid = self.lay(whole)
            self.layout = ShardLayout(tuple(laid.shape), axes.shard_size)
            first, end = self.layout.rows_of(axes.shard_rank)
            rows = laid[first:end]
            if not rows.is_meta:
                # A copy even where the slice is the whole: the original must be freeable.
                rows = rows.to(home, copy=True).contiguous()
        self._set_sharded(nn.Parameter(self.as_dtensor(rows), requires_grad=param.requires_grad))
        for name, value in vars(param).items():
            setattr(self.sharded, name, value)
        copy_grad_hooks(param, self.sharded)
        self.unsharded: nn.Parameter | None = None
        self._shown_trainable = param.requires_grad
        self.steps = StepCount()
        self._linked = True
        self._kept_grad: Tensor | None = None
        self.awaits_reduction = False

    def lay(self, whole: Tensor) -> Tensor:
        """A tensor of the parameter's shape as rows; a view."""
        if self.dim is None:
            return whole.expand(self.axes.shard_size)
        return whole.movedim(self.dim, 0) if self.dim else whole

    def own(self, rows: Tensor) -> Tensor:
        """This rank's rows as its part of a tensor of the parameter's shape; a view."""
        if self.dim is None:
            return rows.view(())
        return rows.movedim(0, self.dim) if self.dim else rows

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks that hold a part of the parameter or of a copy, tensor-parallel ones too."""
        return self.axes.mesh if self._before is None else self._before.mesh

    def as_dtensor(self, rows: Tensor) -> DTensor:
        """This rank's rows as a DTensor of the parameter's shape; memory is shared."""
        before = self._before
        with torch.no_grad():
            return dtensor_over(
                self.own(rows),
                self.mesh,
                (self.axes if before is None else before).placements(self.dim),
                self._global_shape,
                _contiguous_stride(self._global_shape),
            )

    def gather_from(self, parts: Tensor, into: Tensor) -> None:
        """Put the rows of all ranks into place, for a parameter cut along another dim than 0.

        Args:
            parts: shape (ranks, elements of a chunk), any stride.
            into: of the parameter's shape; overwritten.
        """
        assert self.dim is not None
        rows, step = self.layout.shape[0], self.layout.chunk_rows
        if not parts.numel():
            return
        dealt = parts.view(parts.shape[0], step, *self.layout.shape[1:])
        laid = into.movedim(self.dim, 0)
        full = rows // step
        if full:
            laid[: full * step].view(full, step, *laid.shape[1:]).copy_(dealt[:full])
        if rows > full * step:
            laid[full * step :].copy_(dealt[full, : rows - full * step])

    def _set_sharded(self, sharded: nn.Parameter) -> None:
        self.sharded = sharded
        note_owner(self)
        self.local = local_tensor(self._dtensor)

    @property
    def _dtensor(self) -> DTensor:
        # `sharded` is a Parameter and a DTensor; no type says both.
        return cast(DTensor, self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the parameter is stored and optimized."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Where the whole parameter is, which need not be where its rows live."""
        assert self.unsharded is not None
        return self.unsharded.device

    @property
    def moved(self) -> bool:
        """Whether someone exchanged the parameter or its memory since `bind`."""
        slot = self.slots[0]
        sharded = self.sharded
        if not stands_in(slot.module, slot.name, sharded):
            return True
        if self._linked:
            return local_tensor(sharded) is not self.local
        return self.sharded.dtype is not self.dtype or self.sharded.device != self.local.device

    def refresh(self) -> None:
        """Accept what stands in the slot now, after `moved`.

        Raises:
            ValueError: if that is not this parameter sharded as before.
        """
        found = self.slots[0].get()
        if found is not self.sharded:
            if (
                not isinstance(cast(object, found), DTensor)
                or found is None
                or (found.shape != self.sharded.shape)
            ):
                what = "nothing" if found is None else f"a {type(found).__name__} {found.shape}"
                raise ValueError(
                    f"{self.fqn} was replaced by {what}; expected a DTensor of shape "
                    f"{self._global_shape} sharded like the one before. Replace "
                    "parameters before fully_shard, or load values into them in place."
                )
            # For an optimizer that was made before load_state_dict(assign=True), say.
            note_successor(self.sharded, self)
            self._set_sharded(found)
            self.show_sharded()
        else:
            self.local = local_tensor(self._dtensor)
        expected = self._local_shape()
        if tuple(self.local.shape) != expected:
            raise ValueError(
                f"{self.fqn} holds rows of shape {tuple(self.local.shape)} on rank "
                f"{self.axes.shard_rank}; expected {expected} of {self.shape}."
            )

    def _local_shape(self) -> tuple[int, ...]:
        rows, *rest = self.layout.shape_of(self.axes.shard_rank)
        if self.dim is None:
            return ()
        return (*rest[: self.dim], rows, *rest[self.dim :])

    def bind(self, local: Tensor, unsharded: Tensor) -> None:
        """Move the rows into the group's buffer, and compute with `unsharded` from now on.

        Args:
            local: this rank's part of the parameter, over the shard buffer; overwritten.
            unsharded: a view of the gathered storage with the whole shape.

        A gradient of the whole parameter before, which awaits its reduction, is put aside.
        """
        self._put_aside()
        with torch.no_grad():
            local.copy_(self.local)
        self.local = local
        self._linked = set_local_tensor(self._dtensor, local)
        self._shown_trainable = self.sharded.requires_grad
        self.unsharded = self.as_whole(unsharded)

    def as_whole(self, whole: Tensor) -> nn.Parameter:
        """A parameter over `whole` that stands for the sharded one, as it was before the call.

        Args:
            whole: what this rank and its data-parallel peers share; memory is shared.
        """
        requires_grad = self.sharded.requires_grad
        with torch.no_grad():
            found = nn.Parameter(self.as_before(whole), requires_grad=requires_grad)
        note_successor(found, self)
        for name, value in attributes_of(self.sharded).items():
            setattr(found, name, value)
        return found

    def as_before(self, whole: Tensor) -> Tensor:
        """`whole` as the module knew it: a DTensor, where tensor parallelism had dealt it out."""
        return whole if self._before is None else self._before.as_before(whole)

    def on_this_rank(self, tensor: Tensor) -> Tensor:
        """The reverse, of a value or a gradient: to be reduced, or cut into rows.

        Sums that are spread over tensor-parallel ranks are added up, by a collective.
        """
        return tensor if self._before is None else self._before.local_grad(tensor)

    @property
    def linked(self) -> bool:
        """Whether the group's buffer is the parameter's own memory."""
        return self._linked

    def fill(self) -> None:
        """Bring the group's buffer up to date, if it is not the parameter's own memory."""
        if not self._linked:
            self.local.copy_(local_tensor(self._dtensor))

    def show_sharded(self) -> None:
        """Put the sharded face into the slots."""
        put_parameters(self.faces(self.sharded))

    def faces(self, face: nn.Parameter) -> Faces:
        """What to put where, so that modules have `face`."""
        return faces_of((slot, face) for slot in self.slots)

    def follow_unsharded(self) -> None:
        """Have the sharded face frozen or unfrozen as the user did the whole one, if so."""
        unsharded = self.unsharded
        if unsharded is not None and unsharded.requires_grad is not self._shown_trainable:
            self._shown_trainable = unsharded.requires_grad
            self.sharded.requires_grad_(self._shown_trainable)

    def follow_sharded(self) -> None:
        """Have the whole face frozen or unfrozen as the user did the sharded one, if so."""
        unsharded, requires_grad = self.unsharded, self.sharded.requires_grad
        assert unsharded is not None
        if unsharded.requires_grad is not requires_grad:
            unsharded.requires_grad_(requires_grad)
        self._shown_trainable = requires_grad

    def keep_grad(self, dtype: torch.dtype) -> None:
        """Put the gradient aside in `dtype` until a later backward reduces it."""
        if self.sharded.requires_grad:
            self.awaits_reduction = True
        elif not self.awaits_reduction:
            self.drop_grad()  # frozen since the forward that this backward is of
            return
        unsharded = self.unsharded
        assert unsharded is not None
        grad = unsharded.grad
        if grad is not None and grad.dtype is not dtype:  # else autograd accumulates in place
            self._put_aside(dtype)

    def _put_aside(self, dtype: torch.dtype | None = None) -> None:
        """Add the whole parameter's gradient to what was put aside before.

        Args:
            dtype: to keep it in if it is the first; None for its own.
        """
        unsharded = self.unsharded
        if unsharded is None or unsharded.grad is None:
            return
        grad, kept = self.on_this_rank(unsharded.grad), self._kept_grad
        unsharded.grad = None
        if kept is None:
            self._kept_grad = grad if dtype is None else grad.to(dtype)
        elif torch.promote_types(kept.dtype, grad.dtype) is kept.dtype:
            kept.add_(grad)
        else:
            self._kept_grad = kept + grad  # the parameter was cast in between

    @property
    def grad_nbytes(self) -> int:
        """Bytes of gradients on this rank: whole ones, and rows as buffers hold them, padded."""
        whole = None if self.unsharded is None else self.unsharded.grad
        nbytes = sum(nbytes_here(g) for g in (whole, self._kept_grad) if g is not None)
        rows = self.sharded.grad
        return nbytes if rows is None else nbytes + self.layout.chunk_numel * rows.dtype.itemsize

    def drop_grad(self) -> None:
        """Forget the whole gradient accumulated on this rank."""
        self.awaits_reduction = False
        self._kept_grad = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def take_grad(self) -> Tensor | None:
        """The whole gradient accumulated on this rank, which then is forgotten."""
        self.awaits_reduction = False
        if self._kept_grad is not None:
            self._put_aside()
            kept, self._kept_grad = self._kept_grad, None
            return kept
        unsharded = self.unsharded
        assert unsharded is not None
        grad = unsharded.grad
        unsharded.grad = None
        return None if grad is None else self.on_this_rank(grad)
