"""Which state dicts a wrapped model gives: whole, this rank's, or sharded. Names are torch's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from trine.distributed._fsdp.arguments import same_config
from trine.distributed._wrapper.options import same_member

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "as_settings",
    "default_settings",
]


class StateDictType(Enum):
    """What the values of a state dict are.

    Attributes:
        FULL_STATE_DICT: whole tensors. Every rank must ask for it together.
        LOCAL_STATE_DICT: the rows that this rank holds, as plain tensors; they load on the same
            ranks only.
        SHARDED_STATE_DICT: DTensors, which `torch.distributed.checkpoint` saves in parts and
            loads on another number of ranks.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """What an optimizer's state is filed under.

    Attributes:
        PARAM_NAME: full names of parameters.
        PARAM_ID: their numbers in the optimizer, as `Optimizer.state_dict` has them.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """What all types of state dict have in common.

    Attributes:
        offload_to_cpu: give values in the memory of the host.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For `FULL_STATE_DICT`.

    Attributes:
        rank0_only: only rank 0 gets it; the others get an empty one.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For `LOCAL_STATE_DICT`."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For `SHARDED_STATE_DICT`.

    Attributes:
        _use_dtensor: accepted: values are DTensors either way.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """The same for an optimizer's state.

    Attributes:
        offload_to_cpu: give values in the memory of the host.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For `FULL_STATE_DICT`.

    Attributes:
        rank0_only: only rank 0 gets it; the others get an empty one.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For `LOCAL_STATE_DICT`.

    Attributes:
        offload_to_cpu: give values in the memory of the host.
    """

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For `SHARDED_STATE_DICT`.

    Attributes:
        _use_dtensor: accepted: values are DTensors either way.
    """

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """What `set_state_dict_type` sets.

    Attributes:
        state_dict_type: of the model's and the optimizer's state dicts.
        state_dict_config: of the model's.
        optim_state_dict_config: of the optimizer's.
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


def default_settings() -> StateDictSettings:
    """What a wrapper does until it is told otherwise."""
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def as_settings(
    state_dict_type: object, state_dict_config: object, optim_state_dict_config: object
) -> StateDictSettings:
    """Settings of three arguments, with defaults where None is given; torch's are taken too.

    Raises:
        TypeError: if the type is none.
        ValueError: if a configuration is made for another type.
    """
    kind = same_member(StateDictType, state_dict_type, "state_dict_type")
    of_model, of_optimizer = _CONFIGS[kind]
    model = of_model() if state_dict_config is None else same_config(of_model, state_dict_config)
    optimizer = (
        of_optimizer()
        if optim_state_dict_config is None
        else same_config(of_optimizer, optim_state_dict_config)
    )
    for name, config, made, wanted in (
        ("state_dict_config", state_dict_config, model, of_model),
        ("optim_state_dict_config", optim_state_dict_config, optimizer, of_optimizer),
    ):
        if made is None:
            raise ValueError(f"{name} must be a {wanted.__name__} for {kind.name}, got {config!r}.")
    assert model is not None
    assert optimizer is not None
    return StateDictSettings(kind, model, optimizer)
