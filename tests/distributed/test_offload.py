"""Shards on the host, computation on another device: values are those without offloading.

The device is made up (`recording_device`): its tensors are CPU tensors, so a model on a mesh
of CPUs computes the same numbers. What it counts is what a real device would be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.distributed.recording_device import KIND, RecordingDevice, pose_as_torch_module
from trine.core import register_device
from trine.distributed import init_mesh
from trine.distributed._fsdp.offload import HostMemory
from trine.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
)

RunOnRanks = Callable[..., list[Any]]


class Net(nn.Module):
    """Uneven rows, and a layer that only even ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        out: Tensor = self.sometimes(x) if dist.get_rank() % 2 == 0 else x
        return out


def made_up_device() -> RecordingDevice:
    device = RecordingDevice()
    register_device(KIND, lambda index: device)
    pose_as_torch_module(pytest.MonkeyPatch())  # this process ends with the test
    return device


def sharded(mesh: DeviceMesh, *, build_on: str = "cpu", **options: Any) -> Net:
    torch.manual_seed(0)
    with torch.device(build_on):
        net = Net()
    for layer in (net.first, net.second):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def batch(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(net: Net, steps: int = 3) -> list[Tensor]:
    """Accumulates two backwards a step, and clips; returns the norms and the parameters."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        for micro_batch in range(2):
            net(batch(2 * step + micro_batch)).square().sum().backward()
        seen.append(clip_grad_norm_(net.parameters(), 1.0))
        theirs = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        seen.append(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
        optimizer.step()
        optimizer.zero_grad()
    return seen + [shard(param) for param in net.parameters()]


def shard(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def offloaded_training(axes: dict[str, int] | None, policy: MixedPrecisionPolicy) -> None:
    device = made_up_device()
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": CPUOffloadPolicy()}
    net = sharded(init_mesh(axes, device=KIND), **options)

    trained = train(net)

    # On a mesh of CPUs the policy changes nothing. The operations are the same, so is their order.
    expected = train(sharded(init_mesh(axes, device="cpu"), **options))
    for mine, reference in zip(trained, expected, strict=True):
        assert torch.equal(mine, reference)
    assert net.never.weight.grad is None
    labels = [work.label for work in device.model.journal]
    units, backwards = 3, 2 * 3
    assert labels.count("copy to host") == units * backwards
    # Each unit before forward and before backward, but the root, which stays whole.
    assert labels.count("copy to device") == (2 * units - 1) * backwards


@pytest.mark.parametrize(
    ("world_size", "axes"), [(1, None), (3, None), (4, {"replicate": 2, "shard": 2})]
)
def test_training_with_shards_on_the_host_is_training_without(
    run_on_ranks: RunOnRanks, world_size: int, axes: dict[str, int] | None
) -> None:
    run_on_ranks(offloaded_training, world_size, axes, MixedPrecisionPolicy())


def test_shards_on_the_host_are_cast_on_their_way(run_on_ranks: RunOnRanks) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    run_on_ranks(offloaded_training, 2, None, policy)


@pytest.mark.parametrize("pin", [True, False])
def test_parameters_and_gradients_live_in_memory_of_the_host(
    recording_device: RecordingDevice, pin: bool
) -> None:
    net = sharded(init_device_mesh(KIND, (4,)), offload_policy=CPUOffloadPolicy(pin_memory=pin))

    with recording_device.watching():
        net(batch(0)).sum().backward()

    for name, param in net.named_parameters():
        for tensor in (shard(param), param.grad if param.grad is None else shard(param.grad)):
            if tensor is not None and tensor.numel():
                assert recording_device.memory.on_host(tensor), name
    # For each of three units the shards, and the gradients with one number for each parameter.
    assert len(recording_device.pinned) == (6 if pin else 0)


def test_the_hook_before_the_hand_over_sees_gradients_on_the_device(
    recording_device: RecordingDevice,
) -> None:
    net = sharded(init_device_mesh(KIND, (2, 2)), offload_policy=CPUOffloadPolicy())
    seen: list[bool] = []

    def zero(flat: Tensor) -> None:
        seen.append(recording_device.memory.on_host(flat))
        flat.zero_()

    assert isinstance(net.first, FSDPModule)
    net.first.set_all_reduce_hook(zero)
    with recording_device.watching():
        net(batch(0)).sum().backward()

    assert seen == [False]
    assert net.first.weight.grad is not None
    assert shard(net.first.weight.grad).count_nonzero() == 0


def materialized_on_the_host() -> None:
    made_up_device()
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
    net = sharded(init_mesh(device=KIND), build_on="meta", **options)
    with pytest.raises(RuntimeError, match=r"first\.weight.*to_empty\(device='cpu'\)"):
        net(batch(0))

    net.to_empty(device="cpu")
    with torch.no_grad():
        for param, values in zip(
            net.parameters(), sharded(init_mesh(device="cpu")).parameters(), strict=True
        ):
            shard(param).copy_(shard(values))

    expected = train(sharded(init_mesh(device="cpu")))
    for mine, reference in zip(train(net), expected, strict=True):
        assert torch.equal(mine, reference)


def test_a_model_made_on_meta_gets_its_memory_on_the_host(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(materialized_on_the_host, 2)


def saved_and_loaded(folder: str) -> None:
    made_up_device()
    net = sharded(init_mesh(device=KIND), offload_policy=CPUOffloadPolicy())
    net.never.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(number: int) -> None:
        net(batch(number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    step(1)
    expected = [shard(param).clone() for param in net.parameters()]
    step(2)

    load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    step(1)

    for param, values in zip(net.parameters(), expected, strict=True):
        assert torch.equal(shard(param), values)


def test_shards_and_optimizer_on_the_host_are_saved_and_loaded(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    run_on_ranks(saved_and_loaded, 2, str(tmp_path))


def train_on_a_gpu(pin: bool) -> None:
    mesh = init_mesh(device="cuda")
    nets = [
        sharded(mesh, offload_policy=policy)
        for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=pin))
    ]
    x = torch.randn(64, 5, device="cuda")
    for net in nets:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            for _ in range(2):
                net(x).square().mean().backward()
            clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    for on_device, on_host in zip(*(net.parameters() for net in nets), strict=True):
        assert (shard(on_device).device.type, shard(on_host).device.type) == ("cuda", "cpu")
        # fp32, five steps: the optimizer rounds otherwise on the host than on the GPU.
        torch.testing.assert_close(shard(on_host), shard(on_device).cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [True, False])
def test_a_gpu_trains_from_shards_on_the_host(run_on_ranks: RunOnRanks, pin: bool) -> None:
    run_on_ranks(train_on_a_gpu, 1, pin, backend="nccl")


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (CPUOffloadPolicy(), "CPUOffloadPolicy"),
        (None, "mesh"),
    ],
)
def test_parameters_elsewhere_are_refused_by_their_full_names(
    recording_device: RecordingDevice,
    monkeypatch: pytest.MonkeyPatch,
    policy: CPUOffloadPolicy | None,
    cause: str,
) -> None:
    net = sharded(init_device_mesh(KIND, (4,)), offload_policy=policy)
    net(batch(0))
    # All memory is of one kind here: it is not the parameters that move.
    monkeypatch.setattr(HostMemory, "home", torch.device("xpu"))
    monkeypatch.setattr(recording_device, "torch_device", torch.device("xpu"))
    net.double()  # moves as to(device) does

    message = rf"not on xpu, where their {cause} .*: first\.weight \(on cpu\), .*model\.to\('xpu'\)"
    with pytest.raises(RuntimeError, match=message):
        net(batch(0))
