"""Gradient scaling: where it is needed, and that all ranks skip the same steps."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from trine.core import CPUDevice, Precision
from trine.core.devices.grad_scaler import GradScaler


def a_scaler(precision: str = "amp_fp16", **options: Any) -> GradScaler:
    scaler = CPUDevice().grad_scaler(precision, init_scale=8.0, **options)
    assert scaler is not None
    return scaler


def backward(scaler: GradScaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's


@pytest.mark.parametrize("precision", ["amp_fp16", "fp16", "amp", Precision.FP16])
def test_fp16_needs_a_scaler(precision: Precision | str) -> None:
    scaler = CPUDevice().grad_scaler(precision)

    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "bf16"])
def test_a_precision_with_the_range_of_fp32_needs_none(precision: str) -> None:
    assert CPUDevice().grad_scaler(precision) is None


def test_a_precision_that_the_device_cannot_do_has_no_scaler_either() -> None:
    with pytest.raises(ValueError, match="cannot compute in amp_fp8"):
        CPUDevice().grad_scaler("amp_fp8")


def test_a_step_is_taken_with_gradients_freed_of_the_scale() -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), a_scaler()

    backward(scaler, (param * 3).sum())
    assert param.grad is not None
    assert param.grad.item() == 24.0
    scaler.step(optimizer)
    scaler.update()

    assert param.item() == 1.0 - 0.5 * 3.0
    assert scaler.get_scale() == 8.0


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), a_scaler()

    backward(scaler, (param * float("inf")).sum())
    scaler.step(optimizer)
    scaler.update()

    assert param.item() == 1.0
    assert scaler.get_scale() == 4.0


def test_gradients_in_fp16_are_freed_of_the_scale_where_parameters_are_in_fp16() -> None:
    param = nn.Parameter(torch.tensor([1.0], dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), a_scaler("fp16")

    backward(scaler, (param * 3).sum())
    scaler.unscale_(optimizer)

    assert param.grad is not None
    assert param.grad.dtype is torch.float16
    assert param.grad.item() == 3.0


def test_gradients_in_fp16_are_refused_where_parameters_should_be_in_fp32() -> None:
    param = nn.Parameter(torch.tensor([1.0], dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), a_scaler("amp_fp16")

    backward(scaler, (param * 3).sum())

    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.unscale_(optimizer)


def test_the_state_of_a_scaler_can_be_saved_and_loaded() -> None:
    scaler, again = a_scaler(), a_scaler()
    scaler.scale(torch.ones(()))  # the scale is made when it is first used
    scaler.update(2.0)

    again.load_state_dict(scaler.state_dict())

    assert again.get_scale() == 2.0


@pytest.fixture
def _a_world_of_one() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but torch's stubs miss it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_a_world_of_one")
def test_ranks_are_asked_only_where_parameters_are_sharded_or_a_group_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    plain = nn.Parameter(torch.ones(2))
    sharded = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    groups: list[object] = []
    all_reduce = dist.all_reduce

    def note(tensor: Tensor, op: Any, group: Any = None) -> Any:
        groups.append(group)
        return all_reduce(tensor, op, group)

    monkeypatch.setattr(dist, "all_reduce", note)
    everyone = dist.group.WORLD

    for param, group in ((plain, None), (plain, everyone), (sharded, None), (sharded, everyone)):
        scaler = a_scaler(process_group=group)
        backward(scaler, param.sum())
        scaler.step(torch.optim.SGD([param], lr=0.1))

    assert groups == [everyone, None, everyone]


def test_parameters_are_not_taken_for_sharded_where_dtensor_was_never_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    param = nn.Parameter(torch.tensor([1.0]))
    scaler = a_scaler()

    backward(scaler, param.sum())
    scaler.step(torch.optim.SGD([param], lr=0.25))

    assert param.item() == 0.75


# Two ranks. Each body runs in a process of its own and compares what all ranks did.


def gather(value: float) -> list[float]:
    out = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.tensor(value))
    return [one.item() for one in out]


def overflow_on_one_rank_of_a_group(rank: int) -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler = a_scaler(process_group=dist.group.WORLD)

    for factor in (float("inf") if rank == 1 else 3.0, 3.0):
        optimizer.zero_grad()
        backward(scaler, (param * factor).sum())
        scaler.step(optimizer)
        scaler.update()

    # The first step was skipped everywhere, the second taken everywhere.
    assert gather(param.item()) == [-0.5, -0.5]
    assert gather(scaler.get_scale()) == [4.0, 4.0]


def overflow_under_a_fused_optimizer(rank: int) -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([param], lr=0.5, fused=True)
    scaler = a_scaler(process_group=dist.group.WORLD)

    backward(scaler, (param * (float("nan") if rank == 0 else 3.0)).sum())
    scaler.step(optimizer)
    scaler.update()

    assert gather(param.item()) == [1.0, 1.0]
    assert gather(scaler.get_scale()) == [4.0, 4.0]


def a_rank_without_gradients(rank: int) -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler = a_scaler(process_group=dist.group.WORLD)

    for factor in (float("inf"), 3.0):
        optimizer.zero_grad()
        loss = (param * factor).sum()
        if rank == 0:
            backward(scaler, loss)
        else:
            scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    assert gather(param.item()) == [-0.5, 1.0]
    assert gather(scaler.get_scale()) == [4.0, 4.0]


def overflow_in_one_shard(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))  # rows 2 and 1
    other = nn.Parameter(distribute_tensor(torch.ones(1), mesh, [Shard(0)]))  # rank 1 has none
    optimizer = torch.optim.SGD([param, other], lr=0.5)
    scaler = a_scaler()
    for last in (float("inf"), 3.0):
        scaler.scale(torch.ones(()))
        for each, row in ((param, [3.0, 3.0, last]), (other, [3.0])):
            whole = torch.tensor(row) * scaler.get_scale()
            each.grad = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        scaler.step(optimizer)
        scaler.update()

    assert isinstance(param.data, DTensor)
    assert param.data.full_tensor().tolist() == [-0.5, -0.5, -0.5]
    assert gather(scaler.get_scale()) == [4.0, 4.0]


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts collectives, also those that DTensor makes inside an operation.

    torch's CommDebugMode does so too, but needs NumPy, which core does not bring.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor takes it apart, and this mode sees the parts
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


def a_rank_without_gradients_of_its_shards(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))

    def shards(value: float) -> DTensor:
        return DTensor.from_local(torch.full((2,), value), mesh, [Shard(0)], run_check=False)

    param = nn.Parameter(shards(1.0))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler = a_scaler()
    collectives = []
    for factor in (float("inf"), 3.0):
        scaler.scale(torch.ones(()))
        param.grad = shards(factor * scaler.get_scale()) if rank == 0 else None
        with Collectives() as seen:
            scaler.step(optimizer)
        collectives.append(seen.count)
        scaler.update()

    assert isinstance(param.data, DTensor)
    assert gather(param.data.to_local()[0].item()) == [-0.5, 1.0]
    assert gather(scaler.get_scale()) == [4.0, 4.0]
    assert collectives == [1, 1]


def a_rank_without_gradients_under_a_fused_optimizer(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    optimizer = torch.optim.Adam([param], lr=0.5, fused=True)
    scaler = a_scaler()
    scaler.scale(torch.ones(()))
    if rank == 0:
        inf = torch.full((1,), float("inf"))
        param.grad = DTensor.from_local(inf, mesh, [Shard(0)], run_check=False)
    scaler.step(optimizer)
    scaler.update()

    assert isinstance(param.data, DTensor)
    assert gather(param.data.to_local().item()) == [1.0, 1.0]
    assert gather(scaler.get_scale()) == [4.0, 4.0]


BODIES = [
    overflow_on_one_rank_of_a_group,
    overflow_under_a_fused_optimizer,
    a_rank_without_gradients,
    overflow_in_one_shard,
    a_rank_without_gradients_of_its_shards,
    a_rank_without_gradients_under_a_fused_optimizer,
]


def _rank(rank: int, folder: str) -> None:
    """Run every body, and leave a file for each: empty, or what went wrong."""
    torch.set_num_threads(1)
    meet, timeout = f"file://{folder}/meet", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=timeout)
    for body in BODIES:
        try:
            body(rank)
        except BaseException:
            Path(folder, f"{body.__name__}-{rank}").write_text(traceback.format_exc())
            os._exit(1)
        Path(folder, f"{body.__name__}-{rank}").write_text("")
        dist.barrier()
    # Without the interpreter's farewell: gloo's threads may still be about.
    os._exit(0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of files that two ranks left. They are started once, since that takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    with suppress(ProcessExitedException):  # the files say why
        start_processes(_rank, (str(folder),), nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]  # torch's
    return folder


@pytest.mark.parametrize("body", BODIES)
def test_ranks_agree_on_which_steps_to_skip(body: Callable[[int], None], outcomes: Path) -> None:
    for rank in range(2):
        outcome = outcomes / f"{body.__name__}-{rank}"
        assert outcome.exists(), f"rank {rank} did not get so far"
        assert not (error := outcome.read_text()), error
