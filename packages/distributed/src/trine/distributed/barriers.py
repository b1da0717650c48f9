"""A barrier that says who has not come, on every backend."""

from __future__ import annotations

import time
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from trine.distributed.process_groups import MPI4PY

__all__ = ["monitored_barrier"]

_LONGEST_PAUSE_S = 0.05  # between questions to the store

_held: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until every rank of a group is here, and say which ones are not if that takes too long.

    As `torch.distributed.monitored_barrier`, which knows gloo only before torch 2.14. There it
    is called. Over MPI, every rank that has come names all that have not, and the group refuses
    further work. On other backends the ranks meet in the store of the group, and the group is
    left as it is.

    Args:
        group: the ranks; None for all.
        timeout: how long to wait; None for the limit of the group, or of its store.
        wait_all_ranks: on gloo, wait for each missing rank in turn, so that rank 0 can name
            them all. On other backends all are named anyway.

    Raises:
        RuntimeError: on the ranks that have come, if others have not in time.
    """
    found = group or dist.group.WORLD
    if found is None:
        raise ValueError("There is no process group: call init_process_group() first.")
    if dist.get_rank(found) < 0:
        return
    backend = dist.get_backend(found)
    if backend == dist.Backend.GLOO:
        dist.monitored_barrier(found, timeout, wait_all_ranks)
    elif backend == MPI4PY:
        found.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]  # torch's stubs
    else:
        _meet(found, timeout)


def _meet(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Over the store: every rank leaves a mark, and waits for the others'."""
    store, rank = group.get_group_store(), group.rank()
    limit: timedelta = timeout or store.timeout  # type: ignore[attr-defined]  # torch's stubs
    number = _held[group] = _held.get(group, -1) + 1
    marks = {other: f"trine/barrier/{number}/{other}" for other in range(group.size())}
    store.set(marks[rank], "")
    deadline = time.monotonic() + limit.total_seconds()
    pause_s = 1e-4
    while marks:
        marks = {other: mark for other, mark in marks.items() if not store.check([mark])}
        if marks and time.monotonic() > deadline:
            who = ", ".join(str(dist.get_global_rank(group, other)) for other in marks)
            raise dist.DistBackendError(
                f"monitored_barrier #{number} of {group.size()} ranks on rank {rank} was not "
                f"complete after {limit.total_seconds():g} s. These ranks have not come: {who}."
            )
        if marks:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    if number:
        # All are here, so all have seen the marks of the barrier before.
        store.delete_key(f"trine/barrier/{number - 1}/{rank}")
