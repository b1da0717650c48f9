"""What needs the shards is refused while a unit computes with whole parameters, and only then."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trine.distributed._fsdp import torch_internals
from trine.distributed.fsdp import FullyShardedDataParallel, fully_shard

RunOnRanks = Callable[..., list[Any]]
Call = Callable[[nn.Module], object]

# fp32: the mean over ranks instead of over one batch.
FP32 = 1e-5

CALLS: dict[str, Call] = {
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}, strict=False),
    "reshard": lambda model: model.reshard(),  # type: ignore[operator]
    "to": lambda model: model.to(torch.float64),
    "clip_grad_norm_": lambda model: model.clip_grad_norm_(1.0),  # type: ignore[operator]
    "summon_full_params": lambda model: FullyShardedDataParallel.summon_full_params(
        model
    ).__enter__(),
}
NAMES = [
    (True, [name for name in CALLS if name != "reshard"]),
    (False, ["state_dict", "load_state_dict", "reshard"]),
]


class Net(nn.Module):
    """Calls `inside` in its forward, while its own parameters are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)
        self.inside: Callable[[Tensor], object] = lambda hidden: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.inside(hidden)
        out: Tensor = self.last(hidden)
        return out


def sharded(net: Net, wrapped: bool) -> nn.Module:
    if wrapped:
        return FullyShardedDataParallel(net, device_id="cpu")
    return fully_shard(net)


def batches() -> list[Tensor]:
    ranks = range(dist.get_world_size())
    return [torch.randn(2, 4, generator=torch.Generator().manual_seed(rank)) for rank in ranks]


def assert_trains_like(model: nn.Module, reference: nn.Module) -> None:
    """One more iteration, compared with that of the unsharded model on all batches."""
    model.zero_grad()
    reference.zero_grad()
    xs = batches()
    model(xs[dist.get_rank()]).square().mean().backward()
    torch.stack([reference(x).square().mean() for x in xs]).mean().backward()  # type: ignore[no-untyped-call]
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        grad: Any = ours.grad
        torch.testing.assert_close(grad.full_tensor(), theirs.grad, rtol=FP32, atol=FP32)


def refusal(call: Call, model: nn.Module) -> str:
    with pytest.raises(RuntimeError) as refused:
        call(model)
    return str(refused.value)


def on_grad(tensor: Tensor, hook: Callable[[Tensor], None]) -> object:
    return tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own


def call_inside(wrapped: bool, name: str, where: str) -> None:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    model = sharded(net, wrapped)
    x = batches()[dist.get_rank()]
    messages: list[str] = []

    def ask(*_: object) -> None:
        messages.append(refusal(CALLS[name], model))

    if where == "forward":
        net.inside = ask
        model(x)
    elif where == "backward":
        net.inside = lambda hidden: on_grad(hidden, ask)
        model(x).square().mean().backward()
    else:  # a forward that is recomputed in backward
        calls = iter([lambda hidden: None, ask])
        net.inside = lambda hidden: next(calls)(hidden)
        x = x.requires_grad_()
        checkpoint(model, x, use_reentrant=where == "reentrant").square().mean().backward()
    net.inside = lambda hidden: None

    (message,) = messages
    assert name in message
    assert re.search(r"inside (the )?(forward|backward)", message)
    assert "(root)" in message
    assert_trains_like(model, reference)


@pytest.mark.parametrize("where", ["forward", "backward", "reentrant", "recomputed"])
@pytest.mark.parametrize(("wrapped", "names"), NAMES)
def test_what_needs_the_shards_is_refused_while_a_unit_computes(
    run_on_ranks: RunOnRanks, wrapped: bool, names: list[str], where: str
) -> None:
    run_on_ranks(call_all_inside, 2, wrapped, names, where)


def call_all_inside(wrapped: bool, names: list[str], where: str) -> None:
    for name in names:
        call_inside(wrapped, name, where)


def call_around(wrapped: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    model = sharded(net, wrapped)
    keys = set(reference.state_dict())
    taken: list[dict[str, Any]] = []

    def look(*_: object) -> None:
        taken.append(model.state_dict())

    before = model.register_forward_pre_hook(look, prepend=True)
    handles = [before, model.register_forward_hook(look)]
    out = model(batches()[dist.get_rank()])
    look()  # the root stays whole until backward
    out.square().mean().backward()
    for handle in handles:
        handle.remove()

    assert [set(each) for each in taken] == [keys] * 3
    assert_trains_like(model, reference)


@pytest.mark.parametrize("wrapped", [True, False])
def test_before_and_after_forward_state_dicts_are_taken(
    run_on_ranks: RunOnRanks, wrapped: bool
) -> None:
    run_on_ranks(call_around, 2, wrapped)


def call_after(wrapped: bool, names: list[str], error: type[BaseException], where: str) -> None:
    for name in names:
        torch.manual_seed(0)
        net = Net()
        reference = copy.deepcopy(net)
        model = sharded(net, wrapped)

        def interrupt(*_: object, error: type[BaseException] = error) -> None:
            raise error

        inside = {"forward": interrupt, "backward": lambda hidden: on_grad(hidden, interrupt)}
        net.inside = inside[where]
        try:
            model(batches()[dist.get_rank()]).square().mean().backward()
        except error:  # as a program saves what it has when it is interrupted
            CALLS[name](model) if name != "to" else model.to(torch.float32)
        net.inside = lambda hidden: None

        if name == "summon_full_params":
            continue  # left open; that it could be entered is what counts
        assert_trains_like(model, reference)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("wrapped", "names"), NAMES)
def test_a_pass_that_was_broken_off_refuses_nothing(
    run_on_ranks: RunOnRanks,
    wrapped: bool,
    names: list[str],
    error: type[BaseException],
    where: str,
) -> None:
    run_on_ranks(call_after, 2, wrapped, names, error, where)


def test_a_module_is_found_while_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[bool]] = []

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)
            self.other = nn.Linear(1, 1)
            self.inner.register_forward_hook(self.look)

        def look(self, *_: object) -> None:
            modules = (self, self.inner, self.other)
            found.append([torch_internals.in_forward([each]) for each in modules])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    outer = Outer()
    outer(torch.ones(1))
    outer.look()

    monkeypatch.setattr(torch_internals, "_CALL_IMPL", None)  # as if torch had renamed it
    outer(torch.ones(1))

    assert found == [[True, True, False], [False] * 3, [False] * 3]
