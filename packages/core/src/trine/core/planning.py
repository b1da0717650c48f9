"""Ask what training a model would take, before there are ranks, of whoever can calculate it.

`trine-distributed` provides a planner of its engine through an entry point; `trine plan` of
`trine-tools` asks `find_planner` for it. Neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Protocol

import torch
from torch import Tensor, nn

from trine.core.errors import TrineError

__all__ = [
    "ENTRY_POINT_GROUP",
    "Plan",
    "PlanError",
    "PlanRequest",
    "Planner",
    "UnitPlan",
    "Usage",
    "find_planner",
]

ENTRY_POINT_GROUP = "trine.planners"


class PlanError(TrineError):
    """A plan cannot be made of what was asked for; the message says why."""


@dataclass(frozen=True)
class PlanRequest:
    """How a model is to be trained.

    Attributes:
        shard: over how many ranks each copy of the parameters is cut.
        replicate: how many copies there are; the world has `shard * replicate` ranks.
        rank: whose memory is asked for, among those that share one copy. The first holds the
            most: where rows do not go round, the last ones have fewer.
        units: which modules are units besides the model itself: names of classes, or the least
            number of parameters that makes one; None for the members of module lists.
        param_dtype: dtype of computation and of the all-gather; None for the parameters' own.
        reduce_dtype: dtype in which gradients are sent; None for `param_dtype`.
        optimizer: name of a class of `torch.optim`, in any case.
        reshard_after_forward: as `fully_shard` takes it.
        offload: whether shards, gradients and optimizer state live in host memory.
        backend: who carries the bytes: nccl, gloo or mpi. Buffers differ.
        inputs: of the model's forward, on the meta device; without any, activations are not
            counted.
    """

    shard: int
    replicate: int = 1
    rank: int = 0
    units: tuple[str, ...] | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    optimizer: str = "AdamW"
    reshard_after_forward: bool | int | None = None
    offload: bool = False
    backend: str = "nccl"
    inputs: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        for name in ("shard", "replicate"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; a mesh has at least one rank.")
        if not 0 <= self.rank < self.shard:
            raise PlanError(f"rank is {self.rank}, but shard={self.shard} has none of that number.")
        if self.backend not in ("nccl", "gloo", "mpi"):
            raise PlanError(f"backend is {self.backend!r}; known are nccl, gloo and mpi.")


@dataclass(frozen=True)
class Usage:
    """Bytes of one rank at one moment, by what they are for.

    Attributes:
        sharded: this rank's rows of the parameters.
        unsharded: whole parameters, while they are gathered, and pieces kept of them.
        gradients: whole ones during backward, and this rank's rows of those reduced.
        optimizer: its state.
        activations: what autograd has saved for backward.
        communication: buffers of collectives, borrowed and idle.
        replicated: what every rank holds whole: the model's buffers.
    """

    sharded: int = 0
    unsharded: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    communication: int = 0
    replicated: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return (
            self.sharded
            + self.unsharded
            + self.gradients
            + self.optimizer
            + self.activations
            + self.communication
            + self.replicated
        )


@dataclass(frozen=True)
class UnitPlan:
    """What one unit takes.

    Attributes:
        unit: full name of its module.
        parameters: elements of its whole parameters.
        own: of these, the elements of which this rank holds rows, without padding.
        most: the most bytes of each kind that it has at any moment; not all at once.
        sent: bytes that this rank sends in a step, by the name of the collective.
    """

    unit: str
    parameters: int
    own: int
    most: Usage
    sent: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What training takes of one rank, once steps have become alike.

    Attributes:
        request: what was asked for.
        units: in the order of the model.
        peak: on the device, at the moment at which it is the most.
        peak_at: that moment: the phase and the unit, such as "in backward of blocks.3".
        between_steps: on the device, after the optimizer's step and without gradients.
        host: in host memory, with `offload`; at most.
        sent: bytes that this rank sends in a step, by the name of the collective.
        notes: what is not counted, and what to know of it.
    """

    request: PlanRequest
    units: tuple[UnitPlan, ...]
    peak: Usage
    peak_at: str
    between_steps: Usage
    host: Usage
    sent: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Elements of the whole model's parameters."""
        return sum(unit.parameters for unit in self.units)


class Planner(Protocol):
    """What an entry point of the group `trine.planners` must be: an object or module."""

    def plan(self, model: nn.Module, request: PlanRequest) -> Plan:
        """What training `model`, which is on the meta device, takes.

        Raises:
            PlanError: if it cannot be trained as requested.
        """


def find_planner() -> Planner:
    """The installed planner.

    Raises:
        PlanError: if there is none, or it cannot be loaded.
    """
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        try:
            found: Planner = entry.load()
        except Exception as error:
            raise PlanError(
                f"The planner {entry.name!r} ({entry.value}) cannot be loaded. "
                f"{type(error).__name__}: {error}"
            ) from error
        return found
    raise PlanError(
        "No planner is installed. Install trine-distributed, whose engine plans what it will do "
        "(from a clone of Trine: pip install ./packages/distributed)."
    )
