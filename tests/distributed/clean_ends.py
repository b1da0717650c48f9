"""How often a job of two ranks ends well, of many: a program that counts the statuses.

    python tests/distributed/clean_ends.py mpi 100     (or gloo)

torch's own process groups aborted in 8 of 94 runs as the interpreter ended. Each run starts
with plain `mpiexec`, does a little, and ends in one of the ways below; what counts is the status
of mpiexec and that nobody has said anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

__all__: list[str] = []

BEGIN = """
import torch, torch.distributed as dist
from trine.distributed import destroy_process_group, init_process_group
init_process_group({backend!r})
works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range({works})]
"""
ENDINGS = {
    "waited, not destroyed": (1, "works[0].wait()"),
    "waited, destroyed": (1, "works[0].wait(); destroy_process_group()"),
    "work still queued": (5, ""),
}


def run(mpiexec: str, backend: str, ending: str) -> str:
    """How one job has ended: its status, and the first line that it printed."""
    works, last = ENDINGS[ending]
    program = BEGIN.format(backend=backend, works=works) + last
    environ = {"OMP_NUM_THREADS": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    ended = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-c", program],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    said = ended.stdout.strip().splitlines()
    return f"status {ended.returncode}{': ' + said[0] if said else ''}"


def main() -> int:
    """Run; the status is 1 if one did not end well."""
    backend, times = sys.argv[1], int(sys.argv[2])
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert mpiexec is not None, "no mpiexec beside this Python or on the PATH"
    found: dict[str, Counter[str]] = {ending: Counter() for ending in ENDINGS}
    for number in range(times):
        ending = list(ENDINGS)[number % len(ENDINGS)]
        found[ending][run(mpiexec, backend, ending)] += 1
    for ending, counts in found.items():
        print(f"{backend}, {ending}: {dict(counts)}", flush=True)
    return int(any(set(counts) - {"status 0"} for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
