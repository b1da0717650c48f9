"""What only the program knows of its memory, against the sizes of small models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trine.core import tracing
from trine.core.tracing import TraceEvent, add_sink, remove_sink
from trine.tools import profile
from trine.tools.analysis.memory import memory_use
from trine.tools.recording.memory import MemorySampler
from trine.tools.recording.units import Tracker
from trine.tools.tracing import read_traces

BATCH, WIDTH = 8, 16
ROWS = 4 * BATCH * WIDTH  # bytes of one activation


class Layer(nn.Module):
    """Saves its input for the weight's gradient, and its output for that of the sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x))


class Model(nn.Module):
    def __init__(self, depth: int = 3, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.register_buffer("table", torch.zeros(100))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x


class Keep:
    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def record(self, event: TraceEvent) -> None:
        self.events.append(event)

    def values(self, kind: str, unit: str = "") -> list[float]:
        return [e.value for e in self.events if (e.name, e.unit) == (f"memory.{kind}", unit)]


@pytest.fixture
def keep() -> Iterator[Keep]:
    made = Keep()
    add_sink(made)
    yield made
    remove_sink(made)


@pytest.fixture
def sampler() -> Iterator[MemorySampler]:
    made = MemorySampler()
    made.install()
    yield made
    made.remove()


def test_activations_are_counted_once_by_the_unit_that_saved_them_first(
    keep: Keep, sampler: MemorySampler
) -> None:
    model = Model()

    out = model(torch.ones(BATCH, WIDTH))

    # The first layer saves the batch and its output, which is the input of the second.
    assert keep.values("activations", "layers.0") == [2 * ROWS]
    assert keep.values("activations", "layers.1") == [ROWS]
    assert keep.values("activations", "layers.2") == [ROWS]
    del out


def test_activations_end_with_backward(keep: Keep, sampler: MemorySampler) -> None:
    model = Model()

    model(torch.ones(BATCH, WIDTH)).sum().backward()

    for unit in ("layers.0", "layers.1", "layers.2"):
        assert keep.values("activations", unit)[-1] == 0


def test_activations_end_when_a_graph_is_dropped(keep: Keep, sampler: MemorySampler) -> None:
    out = Model()(torch.ones(BATCH, WIDTH))
    del out

    assert keep.values("activations", "layers.0")[-1] == 0


def test_gradients_are_what_they_are_without_a_sampler(keep: Keep) -> None:
    model, sampler = Model(), MemorySampler()
    weight = model.layers[0].get_parameter("linear.weight")

    def grad() -> Tensor:
        (found,) = torch.autograd.grad(model(torch.ones(BATCH, WIDTH)).sum(), weight)
        return found

    sampler.install()
    watched = grad()
    sampler.remove()

    assert torch.equal(watched, grad())


def test_without_gradients_nothing_is_saved(keep: Keep, sampler: MemorySampler) -> None:
    with torch.no_grad():
        Model()(torch.ones(BATCH, WIDTH))

    assert keep.values("activations", "layers.0") == [0]


def test_what_is_not_sharded_is_told_without_a_unit(keep: Keep, sampler: MemorySampler) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    numel = 3 * WIDTH * WIDTH

    model(torch.ones(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(BATCH, WIDTH))

    assert keep.values("replicated") == [400, 400]
    assert keep.values("unsharded") == [4 * numel, 4 * numel]
    assert keep.values("gradients") == [0, 4 * numel, 0]
    # Two moments, and a count of steps for each of three weights.
    assert keep.values("optimizer") == [4 * (2 * numel + 3)]


def test_a_layer_that_runs_again_in_backward_is_no_model_of_its_own(
    keep: Keep, sampler: MemorySampler
) -> None:
    model = Model(checkpoints=True)

    model(torch.ones(BATCH, WIDTH, requires_grad=True)).sum().backward()

    assert keep.values("replicated") == [400]
    assert {e.unit for e in keep.events if e.name == "memory.activations"} == {
        "layers.0",
        "layers.1",
        "layers.2",
        "(root)",
    }


def test_a_forward_that_raises_leaves_nothing_running(keep: Keep, sampler: MemorySampler) -> None:
    model = Model()
    with pytest.raises(RuntimeError):
        model(torch.ones(BATCH, WIDTH + 1))

    model(torch.ones(BATCH, WIDTH)).sum().backward()

    assert keep.values("activations", "layers.0")[-1] == 0
    assert len(keep.values("replicated")) == 2


def test_with_nobody_listening_nothing_is_counted(sampler: MemorySampler) -> None:
    assert not tracing.enabled

    out = Model()(torch.ones(BATCH, WIDTH))

    assert sampler._saved == {}
    del out


def test_a_sampler_is_installed_once_and_removed_as_often_as_one_likes() -> None:
    sampler = MemorySampler()
    sampler.install()
    with pytest.raises(RuntimeError, match="installed already"):
        sampler.install()
    sampler.remove()
    sampler.remove()

    sampler.install()
    sampler.remove()


class Sharded(nn.Linear):
    """Looks like what FSDP makes of a linear layer."""

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...


def test_units_are_sharded_modules_where_there_are_any() -> None:
    inner = Sharded(2, 2)
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Sequential(inner))
    tracker = Tracker()

    tracker.begin(model)
    tracker.begin(model[1])
    running = tracker.begin(inner)

    assert (running.unit, running.begins) == ("1.0", True)
    assert tracker.end(inner) is running
    assert tracker.unit == "(root)"


def test_a_profile_with_memory_finds_a_hog_and_names_it(tmp_path: Path) -> None:
    class Hog(Layer):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x.repeat(1000, 1))
            return out[: len(x)]

    model = Model()
    model.layers[1] = Hog()

    with profile(tmp_path, memory=True) as running:
        for _ in range(2):
            model(torch.ones(BATCH, WIDTH)).sum().backward()
            running.step()

    use = memory_use(read_traces(tmp_path))
    assert (use.largest[0].kind, use.largest[0].unit) == ("activations", "layers.1")
    assert use.largest[0].nbytes == 2 * 1000 * ROWS
    assert "the activations of layers.1" in use.explained
