"""Find gradients that are not finite on the rank where they arise, and tell all ranks.

After the reduction a NaN is everywhere and nobody knows whose it was; so each rank looks at
its own whole gradients before. The reduction goes on, for other ranks wait for it, and when
backward has ended all ranks raise the same error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trine.core import tracing
from trine.distributed._fsdp.errors import NonFiniteGradient, rank_list
from trine.distributed._fsdp.labels import all_reduce
from trine.distributed._fsdp.param import ShardedParam
from trine.distributed.mesh import MeshAxes

__all__ = ["FiniteCheck", "raise_if_not_finite"]

_order = itertools.count()


class FiniteCheck:
    """Remembers which gradients of one module were finite on this rank, until backward ends."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, list[ShardedParam], Tensor]] = []

    def note(self, params: Sequence[ShardedParam], grads: Sequence[Tensor]) -> None:
        """Look at the gradients of a group; the device is not waited for."""
        # Backward reaches what computes last first. The greatest magnitude is NaN or infinite
        # where any element is, and needs no mask of the gradient's size.
        finite = [
            torch.linalg.vector_norm(grad, math.inf).isfinite()
            if grad.numel()
            else torch.ones((), dtype=torch.bool, device=grad.device)
            for grad in reversed(grads)
        ]
        self._noted.append((next(_order), list(reversed(params)), torch.stack(finite)))

    def take(self) -> list[tuple[int, list[ShardedParam], Tensor]]:
        """What was noted since the last call: an order, parameters, and whose are finite."""
        noted, self._noted = self._noted, []
        return noted


@torch.no_grad()
def raise_if_not_finite(checks: Iterable[FiniteCheck], axes: MeshAxes, steps: int) -> None:
    """Tell all ranks which gradients of this backward were not finite, if any.

    Args:
        checks: of all modules under one root.
        axes: the ranks of the root, all of which must call this, as must tensor-parallel ones.
        steps: optimizer steps so far, for the message if the tracing seam knows no step.

    Raises:
        NonFiniteGradient: on every rank, naming the first such parameter and whose it was.
        CommError: if another rank has gone.
    """
    noted = sorted((each for check in checks for each in check.take()), key=lambda each: each[0])
    if not noted:
        return
    params = [param for _, group, _ in noted for param in group]
    device = noted[0][2].device
    finite = torch.cat([flags.to(device) for _, _, flags in noted])
    none = len(params)
    places = torch.arange(none, device=device)
    firsts = torch.full((dist.get_world_size(),), none, device=device)
    firsts[dist.get_rank()] = torch.where(finite, none, places).min()
    for group in _groups(axes, params):
        all_reduce("what is not finite", firsts, dist.ReduceOp.MIN, group)
    by_rank = dict(enumerate(firsts.tolist()))
    first = min(by_rank.values())
    if first == none:
        return
    ranks = [rank for rank, place in by_rank.items() if place == first]
    others = [
        f"first {params[place].fqn} on rank {rank}"
        for rank, place in by_rank.items()
        if first < place < none
    ]
    step = tracing.current_step()
    when = f"in step {step}" if step >= 0 else f"after {steps} optimizer steps"
    raise NonFiniteGradient(
        f"The gradient of {params[first].fqn} is not finite on {rank_list(ranks)}, {when}"
        f"{' (' + ', '.join(others) + ')' if others else ''}. It is the first that backward "
        "reached. All ranks have its reduced gradient, so call zero_grad() before going on. Look "
        "for NaN or infinity in that rank's batch and loss, or lower the learning rate; under a "
        "gradient scaler overflow is normal, so turn the check off.",
        params[first].fqn,
        ranks,
        step if step >= 0 else steps,
    )


def _groups(axes: MeshAxes, params: Sequence[ShardedParam]) -> list[dist.ProcessGroup]:
    """The axes of the root's mesh and of the parameters', along which news reaches every rank."""
    own = (axes.shard_group, axes.replicate_group)
    found = {id(group): group for group in own if group is not None}
    for mesh in dict.fromkeys(param.mesh for param in params):
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            found.setdefault(id(group), group)
    return [group for group in found.values() if group.size() > 1]
