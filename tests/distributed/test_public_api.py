"""A program written for torch's FSDP2 runs on ours by changing one import."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_api as torch_comm  # public in no module
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


def parameters_of(function: Callable[..., Any], name: str) -> list[tuple[str, str, object]]:
    """Names, kinds and defaults, with torch's default where ours differs on purpose."""
    found = []
    for each in inspect.signature(function).parameters.values():
        ours, theirs = OTHER_DEFAULTS.get((name, each.name), (each.default, each.default))
        default = theirs if each.default == ours else each.default
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


def test_importing_ours_never_imports_torchs() -> None:
    code = (
        "import sys, trine.distributed.fsdp, trine.distributed.fsdp.comm\n"
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
