"""FSDPState: what the engine knows of one sharded module, and how to find it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trine.distributed._fsdp.param_group import ParamGroup
from trine.distributed._fsdp.policies import MixedPrecisionPolicy
from trine.distributed._fsdp.reducer import ReduceSettings
from trine.distributed._fsdp.schedule import Schedule, UnitSettings
from trine.distributed.ledger import Ledger
from trine.distributed.mesh import MeshAxes

__all__ = ["WRAPPED", "FSDPState", "plain_name", "saved_name", "set_state", "state_of"]

WRAPPED = "_fsdp_wrapped_module"
"""Under which name a `FullyShardedDataParallel` has the module that it wraps."""

_INFIX = f"{WRAPPED}."
_CHECKPOINTED = "_checkpoint_wrapped_module."

_ATTRIBUTE = "_trine_fsdp_state"


@dataclass(eq=False)
class FSDPState:
    """The record of one call of `fully_shard`.

    Attributes:
        modules: the modules of the call, usually one.
        axes: the ranks it is sharded over, and those that hold copies.
        policy: its dtypes.
        groups: its parameters; none if sub-modules own them all.
        settings: what the user set for the order of these groups.
        reduce_settings: what the user set for their reductions.
        name: full name under the root; "(root)" for the root, and until a root is known.
        schedule: who orders its groups; None until the first forward.
        ledgers: of a root, those of all groups below it.
    """

    modules: tuple[nn.Module, ...]
    axes: MeshAxes
    policy: MixedPrecisionPolicy
    groups: list[ParamGroup]
    settings: UnitSettings
    reduce_settings: ReduceSettings
    name: str = "(root)"
    schedule: Schedule | None = None
    ledgers: tuple[Ledger, ...] = ()


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a sharded module, None for any other."""
    return vars(module).get(_ATTRIBUTE)


def set_state(module: nn.Module, state: FSDPState) -> None:
    """Make `module` a sharded one."""
    object.__setattr__(module, _ATTRIBUTE, state)


def plain_name(name: str) -> str:
    """The name that a module or parameter has without the wrappers around it."""
    return name.replace(_INFIX, "").removesuffix(WRAPPED).removesuffix(".")


def saved_name(name: str) -> str:
    """The name in state dicts, in which torch's checkpoint wrapper leaves no trace either."""
    return plain_name(name).replace(_CHECKPOINTED, "")
