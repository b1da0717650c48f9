"""FSDPState: what the engine knows of one sharded module, and how to find it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trine.distributed._fsdp.param_group import ParamGroup
from trine.distributed._fsdp.policies import MixedPrecisionPolicy
from trine.distributed._fsdp.schedule import Schedule, UnitSettings

__all__ = ["FSDPState", "set_state", "state_of"]

_ATTRIBUTE = "_trine_fsdp_state"


@dataclass(eq=False)
class FSDPState:
    """The record of one call of `fully_shard`.

    Attributes:
        module: the module of the call.
        mesh: the ranks it is sharded over.
        policy: its dtypes.
        groups: its parameters; none if sub-modules own them all.
        settings: what the user set for these groups.
        name: full name under the root; "(root)" for the root, and until a root is known.
        schedule: who orders its groups; None until the first forward.
    """

    module: nn.Module
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    groups: list[ParamGroup]
    settings: UnitSettings
    name: str = "(root)"
    schedule: Schedule | None = field(default=None)


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a sharded module, None for any other."""
    return vars(module).get(_ATTRIBUTE)


def set_state(module: nn.Module, state: FSDPState) -> None:
    """Make `module` a sharded one."""
    object.__setattr__(module, _ATTRIBUTE, state)
