"""Train a small sharded model and record where the time goes."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trine.core import tracing
from trine.core.recording import find_recorder
from trine.distributed import destroy_process_group, init_process_group
from trine.distributed.fsdp import fully_shard

init_process_group("gloo")  # a rank under torchrun, a world of one under plain python
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same initial values on every rank
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)))
for block in model:
    fully_shard(block)  # a unit: gathered before it computes, freed after
fully_shard(model)  # the root
optimizer = torch.optim.AdamW(model.parameters())  # made last: it sees the shards

recorder = find_recorder()
assert recorder is not None, "trine-tools is not installed"
recording = recorder.open(Path("trine-run"), rank=rank, world_size=world_size)
tracing.add_sink(recording)

torch.manual_seed(1 + rank)  # other data on every rank
x = torch.randn(64, 512)
for step in range(30):
    tracing.set_step(step)
    with tracing.span("step", category="step"):
        loss = (model(x) - x.relu()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0 and step % 10 == 9:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)

tracing.remove_sink(recording)
recording.close()
dist.barrier()  # every rank has written its file
if rank == 0:
    recorder.finish(Path("trine-run"))
destroy_process_group()
