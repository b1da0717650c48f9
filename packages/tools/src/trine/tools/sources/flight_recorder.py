"""Dumps of torch's flight recorder as JSON: the collectives that a rank began last.

torch writes its own dumps as pickles, which nobody should read who does not trust whoever
wrote them, so these are refused. A dump does not say of which rank it is: the name of its
file must end in it. Times are those of the wall clock, in ns since 1970.

gloo says when a collective was asked for and whether it is over, but not when that was. What
`pg_config` says of groups may lack the group of an entry, which is then only known by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from trine.core.tracing import Kind, TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.sources.collectives import (
    NBYTES_OF_DTYPE,
    dtype_name,
    operation_name,
    sent_nbytes,
)
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.schema import Header

__all__ = ["Entry", "entries_of", "flight_recorder_trace", "is_flight_recorder"]

_MAX_NS: Final = 1 << 62
_MAX_RANKS: Final = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One entry: a collective that was begun."""

    operation: str
    backend: str
    group: str
    number: int  # 0 for messages between two ranks
    dtype: str
    elements: int
    created_ns: int
    started_ns: int
    ended_ns: int  # 0 while it is not over


def is_flight_recorder(about: Mapping[str, object]) -> bool:
    """Whether what stands beside the entries is what torch's flight recorder writes."""
    return not about.keys().isdisjoint(("pg_config", "pg_status"))


def entries_of(items: Iterable[object], name: str) -> list[Entry]:
    """The entries of a dump.

    Args:
        items: as JSON has them.
        name: of the file, for messages.

    Raises:
        TraceFileError: if one is no entry.
    """
    return [_entry(item, name) for item in items]


def flight_recorder_trace(
    entries: Sequence[Entry], about: Mapping[str, object], rank: int
) -> RankTrace:
    """The recording that a dump is; it has no end, since nobody closed it.

    Args:
        entries: of `entries_of`.
        about: what else stands in the file.
        rank: whose dump it is.
    """
    members = _members(about, {entry.group for entry in entries})
    events: list[TraceEvent] = []
    told: set[str] = set()
    for entry in sorted(entries, key=lambda each: each.created_ns):
        ranks = members.get(entry.group, [])
        args: dict[str, object] = {"op": entry.operation, "backend": entry.backend}
        args["group"] = entry.group
        if entry.number:
            args["seq"] = entry.number
        if entry.dtype:
            args["dtype"] = entry.dtype
        begin = {**args, "elements": entry.elements}
        if ranks and entry.group not in told:
            begin["ranks"] = ranks
            told.add(entry.group)
        at_ns = entry.created_ns
        events.append(_event("instant", f"start {entry.operation}", at_ns, at_ns, begin))
        if entry.ended_ns:
            over = _event("async", entry.operation, entry.started_ns, entry.ended_ns, args)
            over.args = {**args, "enqueue_ns": at_ns}
            brought = entry.elements * NBYTES_OF_DTYPE.get(entry.dtype, 0)
            over.nbytes = sent_nbytes(entry.operation, brought, len(ranks))
            events.append(over)
    events.sort(key=lambda event: event.end_ns)
    unix_ns = events[0].start_ns if events else 0
    last = max((rank, *(each for ranks in members.values() for each in ranks)))
    return RankTrace(
        Header(
            rank=rank,
            world_size=last + 1,
            host="",
            clock=f"wall clock of rank {rank}",
            pid=0,
            python="",
            torch="",
            perf_counter_ns=unix_ns,
            unix_ns=unix_ns,
            environment={"source": "flight recorder"},
        ),
        Events.of(events),
    )


def _event(
    kind: Kind, name: str, start_ns: int, end_ns: int, args: dict[str, object]
) -> TraceEvent:
    event = TraceEvent(kind, name, "comm", "", 0, args, start_ns, end_ns)
    event.step, event.thread = -1, 0
    return event


def _entry(item: object, name: str) -> Entry:
    if not isinstance(item, dict):
        raise TraceFileError(f"{name} has an entry that is not an object: {item!r:.40}.")
    backend, _, operation = str(item.get("profiling_name") or "").rpartition(":")
    if operation.startswith("send ") or operation.startswith("recv "):
        operation = operation.partition(" ")[0]
    group = item.get("process_group")
    number = _integer(item.get("collective_seq_id"), _MAX_NS)
    created_ns = _integer(item.get("time_created_ns"), _MAX_NS)
    started_ns = _integer(item.get("time_discovered_started_ns"), _MAX_NS) or created_ns
    ended_ns = _integer(item.get("time_discovered_completed_ns"), _MAX_NS)
    # What gloo is through with is retired, and nobody looked when it was.
    if not ended_ns and (item.get("retired") is True or item.get("state") == "completed"):
        ended_ns = started_ns
    dtypes = item.get("input_dtypes")
    return Entry(
        operation=operation_name(operation),
        backend=backend,
        group=str(group[0]) if isinstance(group, list) and group else "",
        number=0 if item.get("is_p2p") is True else number,
        dtype=dtype_name(str(dtypes[0])) if isinstance(dtypes, list) and dtypes else "",
        elements=_elements(item.get("input_sizes")),
        created_ns=created_ns,
        started_ns=max(started_ns, created_ns),
        ended_ns=ended_ns and max(ended_ns, started_ns, created_ns),
    )


def _elements(shapes: object) -> int:
    """How many elements tensors of these shapes have together; 0 for what are no shapes."""
    if not isinstance(shapes, list):
        return 0
    total = 0
    for shape in shapes:
        sizes = shape if isinstance(shape, list) else []
        if len(sizes) > 64 or any(type(size) is not int or size < 0 for size in sizes):
            return 0
        total += prod(sizes)
    return total if total < 1 << 48 else 0


def _members(about: Mapping[str, object], used: set[str]) -> dict[str, list[int]]:
    """The ranks of the groups that are used, as far as the dump says it."""
    config = about.get("pg_config")
    if not isinstance(config, dict):
        return {}
    if used.isdisjoint(config) and len(used) == len(config) == 1:
        # gloo files the only group that there is under no name.
        config = dict(zip(used, config.values(), strict=True))
    return {
        group: ranks
        for group in used
        if isinstance(said := config.get(group), dict) and (ranks := _ranks(said.get("ranks")))
    }


def _ranks(said: object) -> list[int]:
    """A list of ranks, or the text of one."""
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except (ValueError, RecursionError):
            return []
    if not isinstance(said, list) or len(said) > _MAX_RANKS:
        return []
    ranks = [rank for rank in said if type(rank) is int and 0 <= rank < _MAX_RANKS]
    return ranks if len(ranks) == len(said) else []


def _integer(value: object, end: int) -> int:
    """A number from 0 on and below `end`; 0 for everything else."""
    return value if type(value) is int and 0 <= value < end else 0
