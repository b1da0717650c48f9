"""Our checkpoints: on any number of ranks, whatever kills a save, and damaged ones."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.lr_scheduler import StepLR

from trine.core.tracing import TraceEvent, add_sink, remove_sink
from trine.distributed import init_mesh
from trine.distributed.checkpoint import (
    CheckpointError,
    consolidate,
    load_checkpoint,
    save_checkpoint,
)
from trine.distributed.checkpoint import load as checkpoint_load
from trine.distributed.checkpoint.cli import main
from trine.distributed.fsdp import fully_shard

RunOnRanks = Callable[..., list[Any]]
StateDict = dict[str, Any]


class Net(nn.Module):
    """Uneven shapes, one row, no dims, a half type, a buffer, an extra state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 5))
        self.one = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(1.0 + seed))
        self.gain = nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("table", torch.arange(3) + seed)
        self.notes: list[int] = [seed]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(self.body(x) * self.scale * self.gain.float())
        return out

    def get_extra_state(self) -> list[int]:
        return self.notes

    def set_extra_state(self, state: list[int]) -> None:
        self.notes = state


def sharded(seed: int = 0) -> tuple[Net, torch.optim.AdamW]:
    """On all ranks; four hold two copies."""
    model, world = Net(seed), dist.get_world_size()
    mesh = init_mesh({"ddp": 2, "fsdp": 2} if world == 4 else {"fsdp": world})
    fully_shard(model.body[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(seed: int = 0) -> tuple[Net, torch.optim.AdamW]:
    model = Net(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """The same batch on every rank: sharded and whole models see the same gradients."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0).view(4, 3).sin() + step).square().mean().backward()
        optimizer.step()


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything that a checkpoint should bring back, whole."""
    found = list(model.state_dict().values())
    for state in optimizer.state_dict()["state"].values():
        found += state.values()
    tensors = [each for each in found if isinstance(each, Tensor)]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).clone() for t in tensors]


def assert_same(ours: list[Tensor], expected: list[Tensor], tolerance: float = 0.0) -> None:
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


# --- what is loaded is what was saved ------------------------------------------------------


def save(path: str, asynchronous: bool) -> None:
    model, optimizer = sharded()
    scheduler = StepLR(optimizer, 2)
    train(model, optimizer)
    scheduler.step()
    model.notes = [1, 2]
    extra = {"step": 2, "scheduler": scheduler, "seen": torch.arange(3)}
    if asynchronous:
        pending = save_checkpoint(path, model, optimizer, extra=extra, async_save=True)
        train(model, optimizer, 3)  # goes on meanwhile: what is saved is the state before
        pending.result()
    else:
        save_checkpoint(path, model, optimizer, extra=extra)


def load_and_save(before: str, after: str) -> None:
    model, optimizer = sharded(seed=1)
    scheduler = StepLR(optimizer, 5)

    extra = load_checkpoint(before, model, optimizer, extra={"scheduler": scheduler})

    assert extra["step"] == 2
    assert torch.equal(extra["seen"], torch.arange(3))
    assert scheduler.step_size == 2
    assert scheduler.last_epoch == 1
    assert model.notes == [1, 2]
    reference, reference_optimizer = plain()
    train(reference, reference_optimizer)
    # The saved run added up its gradients over ranks, in fp32 but in another order; AdamW
    # and the bf16 parameter (2**-8) make more of that.
    tolerance = 1e-2
    assert_same(values_of(model, optimizer), values_of(reference, reference_optimizer), tolerance)
    extra["scheduler"] = scheduler
    save_checkpoint(after, model, optimizer, extra=extra)
    again, again_optimizer = sharded(seed=2)
    load_checkpoint(after, again, again_optimizer)
    assert_same(values_of(again, again_optimizer), values_of(model, optimizer))
    assert all(isinstance(param, DTensor) for param in again.parameters())
    train(again, again_optimizer)
    train(model, optimizer)
    assert_same(values_of(again, again_optimizer), values_of(model, optimizer))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_moves_from_4_ranks_to_2_to_3_to_1(
    run_on_ranks: RunOnRanks, tmp_path: Path, asynchronous: bool
) -> None:
    run_on_ranks(save, 4, str(tmp_path / "4"), asynchronous)

    for before, ranks in ((4, 2), (2, 3), (3, 1)):
        run_on_ranks(load_and_save, ranks, str(tmp_path / str(before)), str(tmp_path / str(ranks)))
    # And into a whole model, in a process without a group.
    model, optimizer = plain(seed=3)
    load_checkpoint(tmp_path / "1", model, optimizer)
    reference, reference_optimizer = plain()
    train(reference, reference_optimizer)
    assert_same(values_of(model, optimizer), values_of(reference, reference_optimizer), 1e-2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["1", "2", "3", "4"]


class Block(nn.Module):
    """Cut by tensor parallelism first: 6 rows over 2 ranks, each part unevenly over 2 more."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


def in_two_dimensions(seed: int) -> tuple[Block, torch.optim.AdamW]:
    mesh = init_mesh({"dp": dist.get_world_size() // 2, "tp": 2})
    model = Block(seed)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save_in_two_dimensions(path: str) -> None:
    model, optimizer = in_two_dimensions(seed=0)
    model.load_state_dict(Block(seed=7).state_dict())  # whole tensors load here, too
    train(model, optimizer)
    save_checkpoint(path, model, optimizer)


def load_in_two_dimensions(path: str) -> None:
    model, optimizer = in_two_dimensions(seed=1)
    load_checkpoint(path, model, optimizer)
    reference = Block(seed=7)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for steps in (2, 1):
        train(reference, reference_optimizer, steps)
        # fp32 sums in another order, over a few AdamW steps.
        assert_same(values_of(model, optimizer), values_of(reference, reference_optimizer), 1e-4)
        train(model, optimizer, 1)


def test_a_tensor_parallel_model_is_saved_on_4_ranks_and_loaded_on_2(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    run_on_ranks(save_in_two_dimensions, 4, str(tmp_path / "c"))

    run_on_ranks(load_in_two_dimensions, 4, str(tmp_path / "c"))
    run_on_ranks(load_in_two_dimensions, 2, str(tmp_path / "c"))


def load_with_torch(path: str) -> None:
    model, optimizer = sharded(seed=1)
    both: Any = get_state_dict(model, optimizer)
    state = {"model": both[0], "optimizer": both[1]}
    del state["model"]["_extra_state"]  # packed by us
    load(state, checkpoint_id=path)
    options = StateDictOptions(strict=False)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    ours, our_optimizer = sharded(seed=2)
    load_checkpoint(path, ours, our_optimizer)
    assert_same(values_of(model, optimizer), values_of(ours, our_optimizer))


def test_torchs_own_functions_read_our_folder(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    run_on_ranks(save, 3, str(tmp_path / "c"), False)

    run_on_ranks(load_with_torch, 2, str(tmp_path / "c"))


def test_a_checkpoint_without_ranks_brings_everything_back(tmp_path: Path) -> None:
    model, optimizer = plain()
    train(model, optimizer)
    expected = values_of(model, optimizer)
    save_checkpoint(tmp_path / "a" / "b", model, optimizer, extra=[1, {"x": (2, None)}])
    other, other_optimizer = plain(seed=1)

    extra = load_checkpoint(tmp_path / "a" / "b", other, other_optimizer)

    assert extra == [1, {"x": (2, None)}]
    assert_same(values_of(other, other_optimizer), expected)


def test_the_model_alone_is_loaded_where_no_optimizer_is_given(tmp_path: Path) -> None:
    model, optimizer = plain()
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer)
    other, _ = plain(seed=1)

    assert load_checkpoint(tmp_path / "c", other) is None

    assert_same(list(other.parameters()), list(model.parameters()))


# --- kills and full disks ------------------------------------------------------------------

# What a save does to the file system, all of it in these functions.
STEPS = ("mkdir", "fsync", "rename", "unlink", "rmdir")


@contextmanager
def planted(number: int, strike: Callable[[], None]) -> Iterator[list[str]]:
    """Let `strike` happen before the step of that number; gives the steps that were made."""
    made: list[str] = []

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if len(made) == number:
                made.append(f"struck at {name}")
                strike()
            made.append(name)
            return original(*args, **kwargs)

        return step

    originals = {name: getattr(os, name) for name in STEPS}
    try:
        for name, original in originals.items():
            setattr(os, name, counting(name, original))
        yield made
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_up() -> None:
    raise OSError(28, "No space left on device")


def survive_every_step(how: str, tmp: str) -> None:
    """Replace a checkpoint again and again, stopped at each step in turn."""
    path = Path(tmp) / "last"
    old, old_optimizer = plain(seed=1)
    new, new_optimizer = plain(seed=2)
    train(old, old_optimizer)
    train(new, new_optimizer)
    expected = {
        "old": values_of(old, old_optimizer),
        "new": values_of(new, new_optimizer),
    }
    survivors, absent = [], 0
    for number in range(1000):
        save_checkpoint(path, old, old_optimizer, extra="old")
        assert sorted(each.name for each in Path(tmp).iterdir()) == ["last"]  # cleaned up
        if how == "killed":
            child = os.fork()
            if child == 0:
                with planted(number, die):
                    save_checkpoint(path, new, new_optimizer, extra="new")
                os._exit(0)
            finished = os.waitpid(child, 0)[1] == 0
        else:
            with (
                planted(number, fill_up) as made,
                suppress(CheckpointError),
            ):
                save_checkpoint(path, new, new_optimizer, extra="new")
            finished = len(made) <= number
            # A disk that is full is not filled with what cannot be finished.
            assert not [each for each in Path(tmp).iterdir() if ".tmp-" in each.name]
        absent += not path.exists()
        model, optimizer = plain(seed=3)
        survivor = load_checkpoint(path, model, optimizer)
        assert_same(values_of(model, optimizer), expected[survivor])
        survivors.append(survivor)
        if finished:
            break
    assert survivors[-1] == "new"
    assert survivors.count("old") > 4  # the folder and each file in it come first
    if how == "killed":
        assert set(survivors[survivors.index("new") :]) == {"new"}
        assert absent == 2  # between the renames: before the folder is synced, and after
    print("survived", len(survivors))


@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_save_that_is_stopped_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, how: str
) -> None:
    # In a process of its own, which may fork: it has no threads.
    code = f"from {__name__} import *; survive_every_step({how!r}, {str(tmp_path)!r})"

    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )

    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) > 10


def save_and_die(path: str, victim: int, where: str) -> None:
    model, optimizer = sharded(seed=1)
    save_checkpoint(path, model, optimizer, extra="old")
    train(model, optimizer)
    mine = dist.get_rank() == victim
    if mine and where == "write":
        original = FileSystemWriter.write_data

        def write_data(*args: Any) -> Any:
            original(*args)
            die()

        with mock.patch.object(FileSystemWriter, "write_data", write_data):
            save_checkpoint(path, model, optimizer, extra="new")
    renames = 0

    def rename(*args: Any) -> None:
        nonlocal renames
        renames += 1
        if renames == int(where):
            die()
        plain_rename(*args)

    plain_rename = os.rename
    with mock.patch.object(os, "rename", rename) if mine else nullcontext():
        save_checkpoint(path, model, optimizer, extra="new")


@pytest.mark.parametrize(
    ("victim", "where", "survivor"),
    [
        (1, "write", "old"),
        (0, "write", "old"),
        (0, "2", "old"),  # renames: of torch's index, of the manifest, of the old, of the new
        (0, "3", "old"),
        (0, "4", "new"),  # between the two
    ],
)
def test_ranks_that_are_killed_leave_a_whole_checkpoint(
    run_on_ranks: RunOnRanks, tmp_path: Path, victim: int, where: str, survivor: str
) -> None:
    path = tmp_path / "last"

    with pytest.raises(Exception, match=f"Rank {victim} of 2"):
        run_on_ranks(save_and_die, 2, str(path), victim, where)

    model, optimizer = plain()
    assert load_checkpoint(path, model, optimizer) == survivor
    save_checkpoint(path, model, optimizer)
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def save_over_the_limit(path: str) -> str:
    import resource

    model, optimizer = sharded(seed=1)
    train(model, optimizer)
    save_checkpoint(path, model, optimizer, extra="old")
    before = values_of(model, optimizer)
    train(model, optimizer)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    with pytest.raises(CheckpointError) as refused:
        save_checkpoint(path, model, optimizer, extra="new")
    pending = save_checkpoint(path, model, optimizer, extra="new", async_save=True)
    with pytest.raises(CheckpointError, match="File too large"):
        pending.result()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert load_checkpoint(path, model, optimizer) == "old"
    assert_same(values_of(model, optimizer), before)
    return str(refused.value)


def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_all(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    messages = run_on_ranks(save_over_the_limit, 2, str(tmp_path / "last"))

    for message in messages:
        assert f"While writing {tmp_path / 'last'}: rank 1: " in message
        assert "File too large" in message
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


SAVES_UNTIL_KILLED = """
import sys, torch
from trine.distributed.checkpoint import folders, save_checkpoint
sync = folders.sync
def stop_in_the_middle(folder):
    print("writing", flush=True)
    sys.stdin.readline()
    sync(folder)
save_checkpoint.__globals__["sync"] = stop_in_the_middle
save_checkpoint(sys.argv[1], torch.nn.Linear(2, 2), extra="another")
"""


def test_a_second_program_is_refused_while_the_first_saves(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = tmp_path / "last"
    save_checkpoint(path, model, extra="old")
    with subprocess.Popen(
        [sys.executable, "-c", SAVES_UNTIL_KILLED, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "writing\n"

        with pytest.raises(CheckpointError, match=rf"Another program is saving to {path}\. Give"):
            save_checkpoint(path, model, extra="second")

        assert load_checkpoint(path, model) == "old"
        first.stdin.write("\n")
        first.stdin.close()
        assert first.wait() == 0
    assert load_checkpoint(path, model) == "another"
    save_checkpoint(path, model, extra="second")
    assert load_checkpoint(path, model) == "second"
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def test_file_systems_without_locks_are_saved_to_all_the_same(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    with mock.patch("fcntl.flock", side_effect=OSError(9, "Bad file descriptor")):
        save_checkpoint(tmp_path / "c", model, extra=1)
        save_checkpoint(tmp_path / "c", model, extra=2)

    assert load_checkpoint(tmp_path / "c", model) == 2


def test_a_folder_that_cannot_be_written_to_keeps_what_is_there(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = tmp_path / "last"
    save_checkpoint(path, model, extra="old")
    refused = OSError(30, "Read-only file system", str(path))

    with (
        mock.patch("os.mkdir", side_effect=refused),
        pytest.raises(CheckpointError, match=rf"preparing to save {path}: rank 0: .*Read-only"),
    ):
        save_checkpoint(path, model, extra="new")

    assert load_checkpoint(path, model) == "old"


# --- checkpoints that are damaged or do not fit --------------------------------------------


def load_damaged(path: str, name: str, damage: str) -> str:
    model, optimizer = sharded(seed=1)
    train(model, optimizer)
    before = values_of(model, optimizer)
    file = Path(path) / name
    good = file.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        if damage == "missing":
            file.unlink()
        else:
            middle = len(good) // 2
            flipped = bytes([good[middle] ^ 1])
            rest = b"" if damage == "cut" else flipped + good[middle + 1 :]
            file.write_bytes(good[:middle] + rest)
    dist.barrier()

    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(path, model, optimizer)

    assert_same(values_of(model, optimizer), before)
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(good)
    dist.barrier()
    return str(refused.value)


def load_all_damaged(path: str) -> list[tuple[str, str]]:
    messages = []
    for name in sorted(each.name for each in Path(path).iterdir()):
        for damage in ("missing", "cut", "flipped"):
            if (name, damage) != ("trine-checkpoint.json", "flipped"):  # may be in a blank
                messages.append((name, load_damaged(path, name, damage)))
    model, optimizer = sharded()
    load_checkpoint(path, model, optimizer)  # whole again
    return messages


def test_damage_to_any_file_is_named_on_every_rank_and_changes_nothing(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    run_on_ranks(save, 2, str(tmp_path / "c"), False)

    results = run_on_ranks(load_all_damaged, 2, str(tmp_path / "c"))

    assert results[0] == results[1]
    files = {name for name, _ in results[0]}
    assert files == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "extra.pt",
        "trine-checkpoint.json",
    }
    for name, message in results[0]:
        assert "nothing was changed" in message
        assert "rank" in message
        assert name in message


def fail_on_rank_1(path: str) -> str:
    model, optimizer = sharded(seed=1)
    train(model, optimizer)
    before = values_of(model, optimizer)
    failure = OSError(5, "Input/output error", "/a/file")
    patch = mock.patch("torch.load", side_effect=failure)
    with (
        patch if dist.get_rank() == 1 else nullcontext(),
        pytest.raises(CheckpointError) as refused,
    ):
        load_checkpoint(path, model, optimizer)
    assert_same(values_of(model, optimizer), before)
    return str(refused.value)


def test_what_fails_on_one_rank_fails_on_all_and_names_it(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    run_on_ranks(save, 2, str(tmp_path / "c"), False)

    for message in run_on_ranks(fail_on_rank_1, 2, str(tmp_path / "c")):
        assert "rank 1: [Errno 5] Input/output error: '/a/file'" in message
        assert "rank 0" not in message


def refuse_to_load(path: Path, model: nn.Module, optimizer: Any = None) -> str:
    before = [each.clone() for each in model.state_dict().values() if isinstance(each, Tensor)]
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(path, model, optimizer)
    after = [each for each in model.state_dict().values() if isinstance(each, Tensor)]
    assert_same(after, before)
    return str(refused.value)


def test_a_checkpoint_of_another_model_is_refused_by_full_names(tmp_path: Path) -> None:
    model, optimizer = plain()
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer)
    save_checkpoint(tmp_path / "model", model)
    other, _ = plain()
    other.body[2] = nn.Linear(7, 4, bias=False)
    other.more = nn.Linear(1, 1)

    message = refuse_to_load(tmp_path / "c", other)

    assert "missing in the checkpoint: more.bias, more.weight" in message
    assert "unexpected, as the model lacks them: body.2.bias" in message
    assert "body.2.weight has shape (5, 7) in the checkpoint, shape (4, 7) in the model" in message
    assert "holds no optimizer" in refuse_to_load(tmp_path / "model", model, optimizer)
    few = torch.optim.AdamW(list(model.parameters())[:2])
    message = refuse_to_load(tmp_path / "c", model, few)
    assert "no group has exactly the parameters gain, scale" in message
    assert "has body.0.bias" in message
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(CheckpointError, match=r"meta device.*to_empty"):
        load_checkpoint(tmp_path / "c", empty)


class Counter:
    """What a user may hand over as extra; takes only what `accepts` says."""

    def __init__(self, count: int, accepts: Callable[[Any], bool] = lambda state: True) -> None:
        self.counts = [count]
        self.accepts = accepts

    def state_dict(self) -> StateDict:
        return {"counts": self.counts}

    def load_state_dict(self, state: StateDict) -> None:
        self.counts.clear()  # too early, as code of users does
        if not self.accepts(state):
            raise RuntimeError("a count of another kind")
        self.counts += state["counts"]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (
            {"scheduler": Counter(0)},
            r"extra\['scheduler'\] .* a dict with the keys 'list', 'sched'",
        ),
        ({"sched": {"a": Counter(0)}}, r"extra\['sched'\]\['a'\] .* with the keys 'counts'"),
        ([Counter(0)], r"extra\[0\] .*in the checkpoint extra, a list of 1 here, is a dict"),
        ({"list": [Counter(0)]}, r"extra\['list'\]\[0\] .*a list of 1 here, is a list of 2"),
        ({"sched": Counter(0), "x": ({"y": Counter(1)},)}, r"extra\['x'\]\[0\]\['y'\] was"),
    ],
)
def test_an_extra_that_was_not_saved_is_refused_with_what_was(
    tmp_path: Path, extra: Any, told: str
) -> None:
    model, optimizer = plain()
    train(model, optimizer)
    saved = {"sched": Counter(3), "list": [Counter(4), Counter(5)]}
    save_checkpoint(tmp_path / "c", model, optimizer, extra=saved)
    other, other_optimizer = plain(seed=1)
    before = values_of(other, other_optimizer)

    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(tmp_path / "c", other, other_optimizer, extra=extra)

    assert_same(values_of(other, other_optimizer), before)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path) -> None:
    old, new, live = Net(1), Net(2), Net(3)
    save_checkpoint(tmp_path / "c", old, extra="old")
    before = [each.clone() for each in live.parameters()]
    read_values = checkpoint_load.read_values

    def read_and_replace(*args: Any) -> None:
        read_values(*args)
        save_checkpoint(tmp_path / "c", new, extra="new")

    with (
        mock.patch.object(checkpoint_load, "read_values", read_and_replace),
        pytest.raises(CheckpointError, match=r"c was replaced or removed while it was read\. Load"),
    ):
        load_checkpoint(tmp_path / "c", live)

    assert_same(list(live.parameters()), before)
    assert load_checkpoint(tmp_path / "c", live) == "new"


def load_one_each(path: str) -> str:
    """Rank 1 reads what has taken the place of what rank 0 has read."""
    model, optimizer = sharded()
    train(model, optimizer)
    save_checkpoint(path, model, optimizer)
    train(model, optimizer)
    save_checkpoint(f"{path}-new", model, optimizer)
    other, other_optimizer = sharded(seed=1)
    before = values_of(other, other_optimizer)
    found = mock.patch.object(checkpoint_load, "find", return_value=Path(f"{path}-new"))
    with (
        found if dist.get_rank() == 1 else nullcontext(),
        pytest.raises(CheckpointError) as refused,
    ):
        load_checkpoint(path, other, other_optimizer)
    assert_same(values_of(other, other_optimizer), before)
    return str(refused.value)


def test_ranks_that_read_different_checkpoints_are_refused(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    for message in run_on_ranks(load_one_each, 2, str(tmp_path / "c")):
        assert f"{tmp_path / 'c'} was replaced or removed while it was read" in message


def test_a_part_of_extra_may_be_left_out_and_plain_data_is_passed_over(tmp_path: Path) -> None:
    model, _ = plain()
    save_checkpoint(tmp_path / "c", model, extra={"step": 3, "count": Counter(3), "n": Counter(4)})
    count = Counter(0)

    loaded = load_checkpoint(tmp_path / "c", model, extra={"new": [1, "x"], "count": count})

    assert count.counts == [3]
    assert loaded == {"step": 3, "count": {"counts": [3]}, "n": {"counts": [4]}}


def load_what_one_rank_refuses(path: str) -> str:
    model, optimizer = sharded()
    train(model, optimizer)
    save_checkpoint(path, model, optimizer, extra={"a": Counter(3), "b": Counter(4)})
    other, other_optimizer = sharded(seed=1)
    other_optimizer.param_groups[0]["lr"] = 0.5
    before = values_of(other, other_optimizer)
    refuses = dist.get_rank() == 1
    first, second = Counter(7), Counter(8, lambda state: not refuses or state["counts"] != [4])

    with pytest.raises(CheckpointError, match="nothing was changed") as refused:
        load_checkpoint(path, other, other_optimizer, extra={"a": first, "b": second})

    assert_same(values_of(other, other_optimizer), before)
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    assert (first.counts, second.counts) == ([7], [8])
    return str(refused.value)


def test_an_extra_that_refuses_its_state_on_one_rank_leaves_all_as_it_was(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    messages = run_on_ranks(load_what_one_rank_refuses, 2, str(tmp_path / "c"))

    assert messages[0] == messages[1]
    assert "rank 1: extra['b'] (Counter) does not take the state that was saved" in messages[0]
    assert "RuntimeError: a count of another kind" in messages[0]
    assert "rank 0" not in messages[0]


def test_a_state_that_cannot_be_put_back_is_logged_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = plain()
    save_checkpoint(tmp_path / "c", model, extra=Counter(3))

    with pytest.raises(CheckpointError, match=r"extra \(Counter\) does not take the state"):
        load_checkpoint(tmp_path / "c", model, extra=Counter(7, lambda state: False))

    assert "extra (Counter) does not take back its own state either" in caplog.text


class Stubborn(Net):
    def set_extra_state(self, state: list[int]) -> None:
        raise RuntimeError("not these notes")


def load_into_stubborn(path: str) -> str:
    model, optimizer = sharded()
    train(model, optimizer)
    save_checkpoint(path, model, optimizer, extra=Counter(3))
    other: Net = Stubborn(1) if dist.get_rank() == 1 else Net(1)
    fully_shard(other, mesh=init_mesh())
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    extra = Counter(7)
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(path, other, other_optimizer, extra=extra)
    assert extra.counts == [7]
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    assert not other_optimizer.state
    return str(refused.value)


def test_a_module_that_refuses_its_extra_state_is_told_on_every_rank(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    messages = run_on_ranks(load_into_stubborn, 2, str(tmp_path / "c"))

    assert messages[0] == messages[1]
    assert "(values of the model may have changed): rank 1: " in messages[0]
    assert "not these notes" in messages[0]


def test_what_is_no_checkpoint_is_neither_loaded_nor_replaced(tmp_path: Path) -> None:
    model, _ = plain()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("more")

    assert "There is no checkpoint at" in refuse_to_load(tmp_path / "nothing", model)
    assert "has no trine-checkpoint.json" in refuse_to_load(tmp_path / "mine", model)
    with pytest.raises(CheckpointError, match="holds something else than a checkpoint"):
        save_checkpoint(tmp_path / "mine", model)
    with pytest.raises(CheckpointError, match="is a file or a link"):
        save_checkpoint(tmp_path / "file", model)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", model)
    load_checkpoint(tmp_path / "empty", model)


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    model, _ = plain()

    with pytest.raises(CheckpointError, match=r"extra cannot be saved.*objects with a state_dict"):
        save_checkpoint(tmp_path / "c", model, extra={"path": tmp_path})
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    with pytest.raises(CheckpointError, match=r"optimizer: parameter 0 of its group 0, .*\(3,\)"):
        save_checkpoint(tmp_path / "c", model, stranger)

    assert not (tmp_path / "c").exists()


# --- one file ------------------------------------------------------------------------------


def test_a_checkpoint_of_four_ranks_becomes_one_safetensors_file(
    run_on_ranks: RunOnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(save, 4, str(tmp_path / "c"), False)
    model, _ = plain(seed=1)
    load_checkpoint(tmp_path / "c", model)
    out = tmp_path / "model.safetensors"
    out.write_text("an older one")

    status = main(["consolidate", str(tmp_path / "c"), str(out)])

    assert status == 0
    assert f"Wrote {out}" in capsys.readouterr().out
    expected = model.state_dict()
    del expected["_extra_state"]  # no tensor
    loaded = load_file(out)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert loaded[name].dtype is value.dtype
        assert torch.equal(loaded[name], value), name
    assert loaded["gain"].dtype is torch.bfloat16
    with safe_open(out, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # transformers asks for it
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_checkpoint_that_is_replaced_while_it_is_consolidated_makes_no_file(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path / "c", Net(1))
    calls = 0

    def read_and_replace(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            save_checkpoint(tmp_path / "c", Net(2))
        checkpoint_load.read_values(*args)

    with (
        mock.patch("trine.distributed.checkpoint.consolidate.read_values", read_and_replace),
        pytest.raises(CheckpointError, match="was replaced or removed while it was read"),
    ):
        consolidate(tmp_path / "c", tmp_path / "out")

    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_tensors_are_consolidated_one_at_a_time(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    save_checkpoint(tmp_path / "c", model)
    living, most = 0, 0
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal living, most
        made: Tensor = empty(*args, **kwargs)
        living += 1
        most = max(most, living)

        def gone() -> None:
            nonlocal living
            living -= 1

        weakref.finalize(made, gone)
        return made

    with mock.patch("trine.distributed.checkpoint.consolidate.torch.empty", counted):
        consolidate(tmp_path / "c", tmp_path / "out")

    assert most == 2  # the one that is written, until the next has taken its name
    assert len(load_file(tmp_path / "out")) == 16


def test_the_command_says_in_a_sentence_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["consolidate", str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"error: There is no checkpoint at {tmp_path / 'none'}.\n"
    assert main(["consolidate"]) == 2
    assert "the following arguments are required" in capsys.readouterr().err
    model, _ = plain()
    model.odd = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    save_checkpoint(tmp_path / "c", model)
    assert main(["consolidate", str(tmp_path / "c"), str(tmp_path / "out")]) == 1
    assert "odd in" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- what one sees of it -------------------------------------------------------------------


def test_progress_is_logged_and_traced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trine.distributed.checkpoint")
    spans: list[tuple[str, str]] = []

    class Spans:
        def record(self, event: TraceEvent) -> None:
            spans.append((event.category, event.name.removeprefix("checkpoint_")))

    sink = Spans()
    add_sink(sink)
    model, _ = plain()

    save_checkpoint(tmp_path / "c", model, async_save=True).result()
    load_checkpoint(tmp_path / "c", model)

    remove_sink(sink)
    expected = "collect stage write checksum replace verify read apply"
    assert spans == [("io", name) for name in expected.split()]
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "Saving",
        "Saved",
        "Loaded",
    ]
