"""Parameters that are DTensors before they are sharded: split over tensor-parallel ranks.

Such a parameter is sharded once more: the tensor it holds on each tensor-parallel rank is
cut over the data-parallel ranks. While the module computes it is a DTensor again, as it was
before the call.

Note [The order of the axes]
    The sharded parameter is a DTensor over all these axes. DTensor cuts along the axes of a
    mesh in their order, and here the data-parallel cut comes last, so its axis does too:
    (replicate, tensor parallel ..., shard). Then plain `Shard` placements say exactly who
    holds what, also where both cuts are along one dim and the rows are uneven.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trine.distributed.mesh import MeshAxes

__all__ = ["Distribution"]


class Distribution:
    """How one parameter was distributed when `fully_shard` found it.

    Args:
        param: a DTensor; not kept.
        axes: the ranks it is going to be cut over.
        fqn: its name for messages.

    Attributes:
        mesh: of the parameter once it is sharded; see Note [The order of the axes].

    Raises:
        ValueError: if it is distributed already over ranks that it is to be cut over.
    """

    def __init__(self, param: DTensor, axes: MeshAxes, fqn: str) -> None:
        self._mesh = param.device_mesh
        self._placements = tuple(param.placements)
        self._shape, self._stride = param.shape, param.stride()
        self._data_axes = axes.data_axes_of(self._mesh)
        self._model_axes = [axis for axis in range(self._mesh.ndim) if axis not in self._data_axes]
        self._refuse_overlap(axes, fqn)
        self.mesh = axes.joined(self._mesh, self._model_axes)
        self._leading = 0 if axes.replicate_group is None else 1
        self._is_cut = axes.shard_group is not None

    def _refuse_overlap(self, axes: MeshAxes, fqn: str) -> None:
        taken = [i for i in self._data_axes if not self._placements[i].is_replicate()]
        data_ranks = axes.ranks
        for axis in self._model_axes:
            group = dist.get_process_group_ranks(self._mesh.get_group(axis))
            if len(data_ranks.intersection(group)) > 1:
                taken.append(axis)
        if taken:
            names = self._mesh.mesh_dim_names or tuple(map(str, range(self._mesh.ndim)))
            raise ValueError(
                f"{fqn} is a DTensor with placements {self._placements} over the axes {names}, and "
                f"fully_shard would cut it over the ranks of {', '.join(names[i] for i in taken)} "
                "once more. Give fully_shard a mesh of other ranks, such as mesh['dp'] beside "
                "mesh['tp'], or a parameter that is Replicate() there."
            )

    def placements(self, dim: int | None) -> list[Placement]:
        """How DTensor calls the sharded parameter, cut along `dim`; None: not cut."""
        found: list[Placement] = [Replicate()] * self._leading
        found += [self._placements[axis] for axis in self._model_axes]
        if self._is_cut:
            found.append(Replicate() if dim is None else Shard(dim))
        return found

    def as_before(self, local: Tensor) -> DTensor:
        """The parameter as the module knows it, over `local`; memory is shared."""
        return DTensor.from_local(
            local,
            self._mesh,
            self._placements,
            run_check=False,
            shape=self._shape,
            stride=self._stride,
        )

    def local_grad(self, grad: Tensor) -> Tensor:
        """The gradient of what this rank holds of the parameter, to be reduced.

        Sums that are spread over tensor-parallel ranks, as those of a normalization between
        sequence-parallel layers are, are added up: every rank of a mesh must call it. Over
        data-parallel axes they stay as they are, since the engine is about to reduce there.
        """
        assert isinstance(grad, DTensor)
        wanted = list(self._placements)
        for axis in self._data_axes:
            wanted[axis] = grad.placements[axis]
        if tuple(wanted) != tuple(grad.placements):
            grad = grad.redistribute(placements=wanted)
        local = grad.to_local()
        # A collective of torch's may still be under way.
        wait = getattr(local, "wait", None)
        return wait() if callable(wait) else local
