"""A program written for torch's FSDP runs on ours by changing one import."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_api as torch_comm  # public in no module
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler
from torch.torch_version import TorchVersion

from trine.distributed import fsdp
from trine.distributed.fsdp import comm

RunOnRanks = Callable[..., list[Any]]

has_all_of_it = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason=f"ours is the API of torch 2.13; torch {torch.__version__} has less of it",
)

METHODS = sorted(name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_"))

# Defaults that differ on purpose: ours, and torch's. None means the policy's defaults, so that
# a caller can hand on "nothing chosen"; torch's own defaults are those policies.
OTHER_DEFAULTS = {
    ("fully_shard", "mp_policy"): (None, torch_fsdp.MixedPrecisionPolicy()),
    ("fully_shard", "offload_policy"): (None, torch_fsdp.OffloadPolicy()),
}
# What we add, and why.
ADDED_NAMES = {
    "ShardPlacement": "what shard_placement_fn returns for another mesh: private in torch",
    "clip_grad_norm_": "the true norm as a plain tensor, where torch's gives a DTensor",
    "CommError": "to catch: a collective failed, usually because another rank has gone",
    "NonFiniteGradient": "to catch: what set_check_finite_gradients raises",
    "RanksDisagree": "to catch: ranks have sharded differently, or make other collectives",
}
ADDED_METHODS = {
    "set_check_finite_gradients": "names the first gradient that is not finite, and its rank",
    "zero_grad": "reaches parameters that are whole at the moment; torch's keeps their gradients",
}

Wrapper, TorchsWrapper = fsdp.FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel
WRAPPER_METHODS = sorted(
    name
    for name in vars(TorchsWrapper)
    if not name.startswith("_") and callable(getattr(TorchsWrapper, name))
)
# What torch's wrapper takes as *args and **kwargs, to hand it on to nn.Module.
SPELLED_OUT = {"named_buffers", "named_parameters"}
# What ours takes so; also positional arguments of state_dict, which nn.Module warns of.
HANDED_ON = {"forward", "state_dict"}
ADDED_TO_WRAPPER = {
    "process_group": "an attribute of each of torch's wrappers, made in its constructor",
    "rank": "the same",
    "world_size": "the same",
    "compute_device": "the same",
}
# What torch's constructor leaves on a wrapper beside that, and ours does not, and why.
MISSING_ON_WRAPPER = {
    "params": "its flat parameters, and we have none",
    "training_state": "its own bookkeeping; ours is the schedule's",
}
ADDED_TO_SCALER = {"agrees": "a method of the scalers of trine.core, which this one is too"}
SUBMODULES = ["wrap", "api", "fully_sharded_data_parallel", "sharded_grad_scaler"]
POLICIES = [
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


def parameters_of(function: Callable[..., Any], name: str) -> list[tuple[str, str, object]]:
    """Names, kinds and defaults, with torch's default where ours differs on purpose."""
    found = []
    for each in inspect.signature(function).parameters.values():
        ours, theirs = OTHER_DEFAULTS.get((name, each.name), (each.default, each.default))
        default = theirs if each.default == ours else each.default
        if isinstance(default, Enum):  # its members are those of torch's, by another test
            default = str(default)
        found.append((each.name, each.kind.name, default))
    return found


@has_all_of_it
def test_every_name_is_there_and_no_other_without_a_reason() -> None:
    assert set(fsdp.__all__) == {*torch_fsdp.__all__, *ADDED_NAMES}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fully_shard", marks=has_all_of_it),
        "register_fsdp_forward_method",
        "share_comm_ctx",
    ],
)
def test_functions_take_what_torchs_take(name: str) -> None:
    ours, theirs = getattr(fsdp, name), getattr(torch_fsdp, name)

    assert parameters_of(ours, name) == parameters_of(theirs, name)


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_sharded_module_take_what_torchs_take(name: str) -> None:
    ours, theirs = getattr(fsdp.FSDPModule, name), getattr(torch_fsdp.FSDPModule, name)

    assert parameters_of(ours, name) == parameters_of(theirs, name)


@has_all_of_it
def test_a_sharded_module_has_no_other_public_methods_without_a_reason() -> None:
    ours = {name for name in vars(fsdp.FSDPModule) if not name.startswith("_")}

    assert ours == {*METHODS, *ADDED_METHODS}


@pytest.mark.parametrize(
    "name",
    [
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "CPUOffloadPolicy",
        pytest.param("DataParallelMeshDims", marks=has_all_of_it),
    ],
)
def test_policies_have_the_fields_the_defaults_and_the_order_of_torchs(name: str) -> None:
    ours, theirs = getattr(fsdp, name), getattr(torch_fsdp, name)

    assert fields_of(ours) == fields_of(theirs)
    assert parameters_of(ours, name) == parameters_of(theirs, name)
    assert public_names(ours) == public_names(theirs)


def fields_of(policy: Any) -> list[tuple[str, object, bool]]:
    return [(field.name, field.default, field.init) for field in dataclasses.fields(policy)]


def public_names(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_a_cpu_offload_policy_is_an_offload_policy_as_in_torch() -> None:
    assert issubclass(torch_fsdp.CPUOffloadPolicy, torch_fsdp.OffloadPolicy)
    assert issubclass(fsdp.CPUOffloadPolicy, fsdp.OffloadPolicy)


def test_a_handle_can_be_waited_on_as_torchs() -> None:
    assert public_names(fsdp.UnshardHandle) == public_names(torch_fsdp.UnshardHandle) == {"wait"}
    assert parameters_of(fsdp.UnshardHandle.wait, "wait") == parameters_of(
        torch_fsdp.UnshardHandle.wait, "wait"
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (comm.CommPrimitive, torch_comm.Comm),
        (comm.AllGather, torch_comm.AllGather),
        (comm.ReduceScatter, torch_comm.ReduceScatter),
    ],
)
def test_collectives_of_ones_own_are_written_as_for_torch(ours: Any, theirs: Any) -> None:
    assert ours.__abstractmethods__ == theirs.__abstractmethods__
    for name in ours.__abstractmethods__:
        assert parameters_of(getattr(ours, name), name) == parameters_of(
            getattr(theirs, name), name
        )


def test_the_wrapper_takes_what_torchs_takes() -> None:
    assert parameters_of(Wrapper, "wrapper") == parameters_of(TorchsWrapper, "wrapper")


@pytest.mark.parametrize("name", WRAPPER_METHODS)
def test_methods_of_the_wrapper_take_what_torchs_take(name: str) -> None:
    handed_on_to = nn.Module if name in SPELLED_OUT else TorchsWrapper
    ours, theirs = getattr(Wrapper, name), getattr(handed_on_to, name)

    assert parameters_of(ours, name) == parameters_of(theirs, name)
    assert is_static(Wrapper, name) == is_static(TorchsWrapper, name)


def test_the_wrapper_has_the_properties_of_torchs() -> None:
    theirs = {name for name, found in vars(TorchsWrapper).items() if isinstance(found, property)}

    assert {"module", "_has_params"} < theirs
    assert [name for name in theirs - {"_flat_param"} if not isinstance_property(name)] == []


def isinstance_property(name: str) -> bool:
    return isinstance(inspect.getattr_static(Wrapper, name), property)


def is_static(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name), staticmethod)


def test_what_the_wrapper_does_instead_of_a_module_takes_what_modules_take() -> None:
    instead = sorted({n for n in vars(Wrapper) if callable(getattr(nn.Module, n, None))})

    for name in instead:
        if name.startswith("__") or name in HANDED_ON:
            continue
        ours, modules = getattr(Wrapper, name), getattr(nn.Module, name)
        assert parameters_of(ours, name) == parameters_of(modules, name), name


def test_the_wrapper_has_no_other_public_names_without_a_reason() -> None:
    ours = {name for name in vars(Wrapper) if not name.startswith("_")}

    assert ours - public_names(TorchsWrapper) == set(ADDED_TO_WRAPPER)


def has_the_attributes_of_torchs() -> None:
    ours: Any = Wrapper(nn.Linear(2, 2))
    theirs: Any = TorchsWrapper(nn.Linear(2, 2), device_id=torch.device("cpu"))

    named = {n for n in vars(theirs) if not n.startswith("_")} - vars(nn.Linear(2, 2)).keys()
    assert {name for name in named if not hasattr(ours, name)} == set(MISSING_ON_WRAPPER)
    assert set(ADDED_TO_WRAPPER) < named


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its wrapper
def test_a_wrapper_has_the_attributes_that_torchs_constructor_makes(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(has_the_attributes_of_torchs, 2)


@pytest.mark.parametrize("name", torch_fsdp.api.__all__)
def test_options_have_the_fields_the_members_and_the_defaults_of_torchs(name: str) -> None:
    ours, theirs = getattr(fsdp, name), getattr(torch_fsdp, name)

    if issubclass(theirs, Enum):
        assert [(each.name, each.value) for each in ours] == [(e.name, e.value) for e in theirs]
    else:
        assert fields_of(ours) == fields_of(theirs)
        assert parameters_of(ours, name) == parameters_of(theirs, name)
    assert [cls.__name__ for cls in ours.__mro__] == [cls.__name__ for cls in theirs.__mro__]


def test_state_may_be_filed_under_what_torchs_may() -> None:
    ours, theirs = fsdp.OptimStateKeyType, torch_fsdp.OptimStateKeyType

    assert [(each.name, each.value) for each in ours] == [(e.name, e.value) for e in theirs]


@pytest.mark.parametrize("name", POLICIES)
def test_functions_that_wrap_take_what_torchs_take(name: str) -> None:
    ours, theirs = getattr(fsdp.wrap, name), getattr(torch_fsdp.wrap, name)

    assert parameters_of(ours, name) == parameters_of(theirs, name)


@pytest.mark.parametrize("name", ["ModuleWrapPolicy", "CustomPolicy"])
def test_policies_that_are_classes_take_what_torchs_take(name: str) -> None:
    ours, theirs = getattr(fsdp.wrap, name), getattr(torch_fsdp.wrap, name)

    assert parameters_of(ours, name) == parameters_of(theirs, name)
    # Torch calls a CustomPolicy never, and asks it in a way of its own.
    assert {*POLICIES, "ModuleWrapPolicy", "CustomPolicy"} == set(torch_fsdp.wrap.__all__)


def test_the_policy_by_size_spares_the_classes_that_torchs_spares() -> None:
    ours: Any = fsdp.wrap.size_based_auto_wrap_policy
    theirs: Any = torch_fsdp.wrap.size_based_auto_wrap_policy

    assert ours.EXCLUDE_WRAP_MODULES == theirs.EXCLUDE_WRAP_MODULES
    assert ours.FORCE_LEAF_MODULES == theirs.FORCE_LEAF_MODULES


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_submodules_bear_the_names_of_torchs(submodule: str) -> None:
    ours = importlib.import_module(f"trine.distributed.fsdp.{submodule}")
    theirs = importlib.import_module(f"torch.distributed.fsdp.{submodule}")
    # Programs also import from a submodule what that has from another public one.
    public = {f"torch.distributed.fsdp.{name}" for name in SUBMODULES}
    named = {
        name
        for name, found in vars(theirs).items()
        if not name.startswith("_") and getattr(found, "__module__", "") in public
    }

    assert set(getattr(theirs, "__all__", ())) <= named
    assert [name for name in sorted(named) if not hasattr(ours, name)] == []


def test_a_gradient_scaler_takes_what_torchs_takes() -> None:
    ours: Any = importlib.import_module("trine.distributed.fsdp.sharded_grad_scaler")
    scaler = ours.ShardedGradScaler

    assert parameters_of(scaler, "ShardedGradScaler") == parameters_of(
        TorchsScaler, "ShardedGradScaler"
    )
    assert public_names(scaler) == {*public_names(TorchsScaler), *ADDED_TO_SCALER}
    for name in public_names(TorchsScaler):
        theirs = getattr(TorchsScaler, name)
        assert parameters_of(getattr(scaler, name), name) == parameters_of(theirs, name)


def test_importing_ours_never_imports_torchs() -> None:
    code = (
        "import sys, trine.distributed.fsdp, trine.distributed.fsdp.comm\n"
        "from trine.distributed.fsdp import api, fully_sharded_data_parallel, wrap\n"
        "from trine.distributed.fsdp import sharded_grad_scaler\n"
        "print([n for n in sys.modules if n.startswith('torch.distributed.fsdp')])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )

    assert done.stdout.strip() == "[]"


# As a user writes it: the import is the only line that knows whose engine it is.
PROGRAM = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from {package} import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.hidden(tokens))

    def hidden(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,))
options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
model = Net()
for block in model.blocks:
    fully_shard(block, reshard_after_forward=True, **options)
fully_shard(model, **options)
register_fsdp_forward_method(model, "hidden")
share_comm_ctx([model])
model.set_modules_to_forward_prefetch([model.blocks[0]])
model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
model.set_gradient_divide_factor(4.0)
assert isinstance(model, FSDPModule)
assert isinstance(model, Net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        model.set_is_last_backward(micro == 1)
        tokens = torch.arange(6).view(2, 3) + step + micro
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        result.append(loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
handle = model.unshard(async_op=True)
handle.wait()
result.append(model.head.weight.sum().item())
model.reshard()
with torch.no_grad():
    result.append(model.hidden(torch.arange(3)).sum().item())
saved = model.state_dict()
result += [(name, value.full_tensor().double().sum().item()) for name, value in saved.items()]
"""


def run_the_program() -> None:
    results: list[list[Any]] = []
    for package in ("trine.distributed.fsdp", "torch.distributed.fsdp"):
        results.append([])
        exec(PROGRAM.format(package=package), {"result": results[-1]})

    # Sums over two ranks are the same in any order, and every step that follows is torch's.
    assert results[0] == results[1]
    assert len(results[0]) == 8 + 2 + 9


def test_a_program_moves_over_by_changing_one_import(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(run_the_program, 2)
