"""What each rank of the demo does, from joining the world to the saved checkpoint."""

from __future__ import annotations

import copy
import math
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from trine.core import TrineError, tracing
from trine.core.recording import find_recorder
from trine.distributed.demo.check import Reference
from trine.distributed.demo.model import GPT, generate, next_byte_loss
from trine.distributed.demo.progress import Progress
from trine.distributed.demo.settings import Outcome, Settings
from trine.distributed.demo.text import Windows, read_text
from trine.distributed.fsdp import fully_shard
from trine.distributed.launchers import read_launch
from trine.distributed.mesh import init_mesh
from trine.distributed.process_groups import init_process_group

__all__ = ["train"]

_PROMPT = b"def "
_WARM_UP = 40


class SentBytes:
    """A trace sink that adds up what this rank sends."""

    def __init__(self) -> None:
        self.nbytes = 0

    def record(self, event: tracing.TraceEvent) -> None:
        """Count the event's bytes if it is communication."""
        if event.category == "comm":
            self.nbytes += event.nbytes


def train(settings: Settings) -> Outcome:
    """Train, save and sample as one rank of the world that this process was launched into."""
    device = init_process_group(settings.backend)
    _share_cores()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = read_text(settings.text, at_least=settings.window)
    windows = Windows(
        text,
        batch=settings.batch,
        length=settings.window,
        seed=settings.seed * 1_000_003 + rank,
    )

    torch.manual_seed(settings.seed)  # every rank starts from the same parameters
    model = GPT(settings.model)
    parameters = sum(p.numel() for p in model.parameters())
    reference = None
    if settings.check and rank == 0:
        twin = device.module_to_device(copy.deepcopy(model))
        reference = Reference(twin, _optimizer(twin), settings.precision.compute_dtype)
    device.module_to_device(model)
    mesh = init_mesh(device=device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=settings.policy)
    fully_shard(model, mesh=mesh, mp_policy=settings.policy)
    optimizer = _optimizer(model)

    losses: list[float] = []
    reference_losses: list[float] = []
    train_ns = 0
    progress = Progress(settings.steps, sys.stdout if rank == 0 else None)
    with _traced(settings.timeline_folder, rank, world_size) as sent:
        for step in range(settings.steps):
            rate = settings.learning_rate * _rate_factor(step, settings.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            tracing.set_step(step)
            start_ns = perf_counter_ns()
            with tracing.span("step", category="step"):
                with tracing.span("load batch", category="io"):
                    batch = device.tensor_to_device(windows.draw())
                with tracing.span("forward", category="compute"):
                    loss = next_byte_loss(model(batch[:, :-1]), batch)
                with tracing.span("backward", category="compute"):
                    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                with tracing.span("optimizer", category="compute"):
                    optimizer.step()
                    optimizer.zero_grad()
            train_ns += perf_counter_ns() - start_ns
            losses.append(_mean_over_ranks(loss))
            if settings.check:
                batches = _batches_of_ranks(batch)
                if reference is not None:
                    reference_losses.append(reference.step(batches, rate))
            tokens_per_s = world_size * (step + 1) * batch[:, 1:].numel() / (train_ns / 1e9)
            progress.show(step + 1, losses[-1], tokens_per_s)
    progress.close()

    _save(settings, model, optimizer)
    return Outcome(
        losses=losses,
        reference_losses=reference_losses,
        parameters=parameters,
        train_s=train_ns / 1e9,
        tokens=settings.steps * settings.batch * settings.model.context,
        sent_nbytes=sent.nbytes,
        peak_nbytes=_peak_nbytes(),
        sample=_PROMPT
        + generate(model, _PROMPT, settings.sample, settings.model.context, settings.seed),
    )


def _share_cores() -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        launch = read_launch()
        ranks_here = 1 if launch is None else launch.local_world_size
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (ranks_here or 1)))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


def _rate_factor(step: int, steps: int) -> float:
    """Rise over the first 40 steps, then fall to a tenth along a cosine."""
    # A shorter rise trains as well, but so roughly that rounding errors grow tenfold every
    # other step, and two trainings that differ in nothing else could not be compared.
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - _WARM_UP) / max(1, steps - _WARM_UP)))


def _mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _batches_of_ranks(batch: Tensor) -> list[Tensor]:
    batches = [torch.empty_like(batch) for _ in range(dist.get_world_size())]
    dist.all_gather(batches, batch)
    return batches


@contextmanager
def _traced(folder: Path, rank: int, world_size: int) -> Iterator[SentBytes]:
    """Count what is sent; record everything too if a recorder is installed."""
    sent = SentBytes()
    recorder = find_recorder()
    recording = None
    if recorder is not None:
        recording = recorder.open(folder, rank=rank, world_size=world_size)
    sinks: list[tracing.TraceSink] = [sent] if recording is None else [sent, recording]
    for sink in sinks:
        tracing.add_sink(sink)
    try:
        yield sent
    finally:
        for sink in sinks:
            tracing.remove_sink(sink)
        if recording is not None:
            recording.close()


def _save(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write each rank's shards beside the folder, then put them in its place at once."""
    folder = settings.checkpoint_folder
    state = {
        "model": model.state_dict(),
        "optimizer": {name: optimizer.state[p] for name, p in model.named_parameters()},
        "step": settings.steps,
    }
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        save(state, checkpoint_id=unfinished)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
    except (CheckpointException, OSError) as error:
        free = shutil.disk_usage(settings.out).free
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise TrineError(
            f"The checkpoint cannot be written to {folder}: {_why(error)}. It takes "
            f"{settings.checkpoint_nbytes / 2**20:.1f} MiB, and {free / 2**20:.1f} MiB were left. "
            "Make room there, or choose another folder."
        ) from error


def _why(error: BaseException) -> str:
    """The system's words for an error, which torch passes on wrapped in its own."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        inner: BaseException | None = cause
        while inner is not None:
            if isinstance(inner, OSError) and inner.strerror:
                return inner.strerror
            inner = inner.__cause__ or inner.__context__
    return f"torch said {str(causes[0]).splitlines()[0]!r}"


def _peak_nbytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
