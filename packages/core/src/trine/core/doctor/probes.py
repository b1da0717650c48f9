"""The programs that the doctor runs in processes of their own.

Each ends by itself when its time is up, wherever it hangs, and when the doctor is gone.
They import nothing of ours, so that what they find is about torch and the machine, and
print JSON, one object a line, as soon as they know something.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter


def all_reduce(backend: str, rank_: str, ranks_: str, port: str, limit_s: str) -> None:
    """Be one rank of a world that adds up a tensor, twice; the second time is measured."""
    rank, ranks = int(rank_), int(ranks_)
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=float(limit_s))
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch's stubs miss it
        "127.0.0.1", int(port), is_master=False, timeout=timeout
    )
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    expected = ranks * (ranks + 1) / 2
    seconds = 0.0
    for _ in range(2):
        tensor = torch.full((1024,), rank + 1.0, device=device)
        begin = perf_counter()
        dist.all_reduce(tensor)
        found = tensor.cpu()
        seconds = perf_counter() - begin
        if not bool((found == expected).all()):
            raise ValueError(f"the sum was {found[0].item():g}, expected {expected:g}")
    dist.destroy_process_group()
    say(seconds=seconds)


def accelerators() -> None:
    """Multiply two matrices on each accelerator, and say what it is."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return
    kind = accelerator.type
    module = torch.get_device_module(kind)
    if not torch.accelerator.is_available():
        reason = f"torch finds no {kind} device"
        if hasattr(module, "init"):
            try:
                module.init()
            except Exception as error:
                reason = first_line(error)
        say(kind=kind, unavailable=reason)
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(kind, index)
        facts: dict[str, object] = {"name": str(device)}
        try:
            if hasattr(module, "get_device_name"):
                facts["model"] = module.get_device_name(index)
            if hasattr(module, "mem_get_info"):
                facts["free_bytes"], facts["memory_bytes"] = module.mem_get_info(index)
            ones = torch.ones(64, 64, device=device)
            if (ones @ ones).sum().item() != 64**3:
                facts["error"] = "a product of matrices came out wrong"
        except Exception as error:
            facts["error"] = first_line(error)
        say(**facts)


def mpi_library() -> None:
    """Say which MPI mpi4py is linked to, without starting it."""
    mpi4py = importlib.import_module("mpi4py")
    mpi4py.rc.initialize = False
    MPI = importlib.import_module("mpi4py.MPI")
    vendor, version = MPI.get_vendor()
    say(vendor=vendor, version=".".join(map(str, version)), mpi4py=mpi4py.__version__)


def mpi_rank() -> None:
    """Be one rank under mpiexec: add up the ranks."""
    MPI = importlib.import_module("mpi4py.MPI")
    world = MPI.COMM_WORLD
    total = world.allreduce(world.Get_rank() + 1)
    if world.Get_rank() == 0:
        say(ranks=world.Get_size(), total=total)


def say(**facts: object) -> None:
    """Print one line of JSON, now."""
    print(json.dumps(facts), flush=True)


def first_line(error: Exception) -> str:
    """What the exception says, without the frames of C++ that torch puts below."""
    return str(error).partition("\n")[0]


def end_with_the_doctor() -> None:
    """Wait for the end of stdin, which is the doctor's end, and end."""
    # Not through sys.stdin, whose lock would be held at our own end.
    os.read(0, 1)
    os._exit(1)


PROBES: dict[str, Callable[..., None]] = {
    "accelerators": accelerators,
    "all_reduce": all_reduce,
    "mpi_library": mpi_library,
    "mpi_rank": mpi_rank,
}


def main(what: str, limit: str, *args: str) -> None:
    """Run the probe that is named `what`."""
    # Works in any state, even if a C function holds the interpreter's lock.
    faulthandler.dump_traceback_later(float(limit), exit=True)
    if what != "mpi_rank":  # mpiexec decides what its ranks get as stdin
        threading.Thread(target=end_with_the_doctor, daemon=True).start()
    try:
        PROBES[what](*args)
    except Exception as error:
        say(error=f"{type(error).__name__}: {first_line(error)}")
        # Without the clean-up of an interpreter, which could wait for the other ranks.
        os._exit(1)


if __name__ == "__main__":  # pragma: no cover  # run by its path, not by a name that is measured
    main(*sys.argv[1:])
