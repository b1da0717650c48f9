"""Meetings: ranks tell each other what they are about to do, and go on if it is the same.

They meet over the key-value store of the world, not over a process group: ranks that
disagree about groups, shapes or order would wait for each other in a collective for ever.
A meeting costs a rank four requests to the store, whatever their number; this module never
sends tensors and never waits without a limit.

Note [What a meeting keeps in the store]
    Meetings of the same ranks are numbered. Under the key of each stand

    * `first`: what the first rank to arrive is about to do; all others compare with it;
    * `came`: how many have arrived; the last of them ends the meeting;
    * `verdict`: how it ended, which everybody waits for. The first value stays;
    * after a bad end: `says/<rank>`, what each is about to do, at length; `reporter`, the
      one rank that reads these and writes the `report`; and `read`, who has seen it, for
      the rank that ends first may take the store with it.

    Beside them stands, for each rank, where it was last (`at/<rank>`). A rank that waits at
    another meeting for one that waits at this one can so be found out before the time is up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from trine.distributed._fsdp.errors import CommError, RanksDisagree, rank_list
from trine.distributed._fsdp.torch_internals import store_of
from trine.distributed.watch import current_watch

__all__ = ["Meetings", "meetings"]

_AGREED, _DIFFER, _APART, _ABSENT = "agreed", "differ", "apart", "absent"

_log = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # before a warning
_LOOK_AROUND_S = 1.0  # between looks at where the missing ranks are
_LATE_S = 10.0  # for late ranks to add to a report
_WAKE_S = 1.0  # for those that have come, where others will not
_REPORT_S = 60.0  # for the report to be written
_LEAVE_S = 5.0  # for all to read it
_LONGEST_PAUSE_S = 0.05  # between questions to the store

Compare = Callable[[Mapping[int, str]], str]
"""From what each rank brought, at length, to the words that say how they differ."""


class Store(Protocol):
    """What is asked of the store of a world. torch's type is not public."""

    def set(self, key: str, value: str, /) -> object:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read one; waits for it."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a number that begins with 0; the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them have been written."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write a value if it was `expected` ("": nothing) before; what is there now."""

    def delete_key(self, key: str, /) -> bool:
        """Forget a value."""


@dataclass(frozen=True)
class _Statement:
    """Where a rank is, or was last."""

    ranks: tuple[int, ...]
    number: int
    what: str

    def to_json(self) -> str:
        return json.dumps([self.ranks, self.number, self.what])

    @classmethod
    def from_json(cls, text: str | bytes) -> _Statement:
        ranks, number, what = json.loads(text)
        return cls(tuple(ranks), number, what)

    @property
    def key(self) -> str:
        return _key(self.ranks, self.number)


class Meetings:
    """The meetings of one rank in one world.

    Args:
        store: that all ranks of the world share.
        rank: this one, in the world.
        limit_s: how long to wait for others if a meeting does not say.
    """

    def __init__(self, store: Store, rank: int, limit_s: float) -> None:
        self._store = store
        self._rank = rank
        self._limit_s = limit_s
        self._held: Counter[tuple[int, ...]] = Counter()

    def meet(
        self,
        ranks: Sequence[int],
        what: str,
        *,
        detail: str = "",
        compare: Compare | None = None,
        limit_s: float | None = None,
        mend: str,
    ) -> None:
        """Return when all `ranks` are here with the same `what` and `detail`.

        Args:
            ranks: this one and others, numbered in the world, in any order.
            what: they are about to do, in a line.
            detail: more of it, of any length; only sent if it differs.
            compare: finds words for the difference of details.
            limit_s: how long to wait for ranks that do not come.
            mend: the end of the message if they differ or do not come.

        Raises:
            RanksDisagree: on every one of them, if one brings something else.
            CommError: if some do not come in time, or the store is gone.
        """
        together = tuple(sorted(ranks))
        here = _Statement(together, self._held[together], what)
        self._held[together] += 1
        try:
            verdict = self._confer(here, detail, self._limit_s if limit_s is None else limit_s)
            if verdict != _AGREED:
                raise self._reported(here, detail, verdict, compare, mend)
        except dist.DistError as error:
            raise CommError(
                f"{what}: rank {self._rank} cannot reach the store over which ranks meet; "
                f"{_raised() or 'the rank that holds it (mostly rank 0) has ended or was killed'}. "
                f"Look at the first rank that reported an error. torch said: {error}"
            ) from error

    def _confer(self, here: _Statement, detail: str, limit_s: float) -> str:
        """Arrive, and wait for the verdict."""
        store, key = self._store, here.key
        store.set(f"trine/at/{self._rank}", here.to_json())
        token = f"{here.what}\n{_digest(detail)}"
        if store.compare_set(f"{key}/first", "", token).decode() != token:
            return self._settle(key, _DIFFER)
        came = store.add(f"{key}/came", 1)
        if came == len(here.ranks):
            if here.number:
                # All have come here, so all have left the meeting before.
                for name in ("first", "came", "verdict"):
                    store.delete_key(f"{_key(here.ranks, here.number - 1)}/{name}")
            return self._settle(key, _AGREED)
        return self._wait(here, limit_s, looks=came == 1)

    def _settle(self, key: str, verdict: str) -> str:
        """End a meeting, if it has not ended; how it did."""
        return self._store.compare_set(f"{key}/verdict", "", verdict).decode()

    def _wait(self, here: _Statement, limit_s: float, *, looks: bool) -> str:
        begun = time.monotonic()
        look_at_s, warn_at_s = _LOOK_AROUND_S, _PATIENCE_S
        pause_s = 1e-4
        while not self._store.check([f"{here.key}/verdict"]):
            waited_s = time.monotonic() - begun
            raised = _raised()
            if raised is not None:
                raise CommError(
                    f"{here.what} (number {here.number} among {rank_list(here.ranks)}): rank "
                    f"{self._rank} waited for others, but {raised}."
                )
            if waited_s >= limit_s:
                return self._settle(here.key, f"{_ABSENT} {limit_s:g}")
            # One of those that wait is enough: it asks the store for every rank.
            if looks and waited_s >= look_at_s:
                look_at_s = waited_s + _LOOK_AROUND_S
                elsewhere = self._waiting_elsewhere(here)
                if elsewhere is not None:
                    verdict = self._settle(here.key, _APART)
                    if verdict != _AGREED:
                        self._settle(elsewhere.key, _APART)
                    return verdict
            if looks and waited_s >= warn_at_s:
                warn_at_s = math.inf
                self._warn(here, limit_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._store.get(f"{here.key}/verdict").decode()

    def _waiting_elsewhere(self, here: _Statement) -> _Statement | None:
        """A meeting at which one of these ranks waits for this one, which waits for it here."""
        for rank in here.ranks:
            at = self._where_is(rank)
            if at is None or at.ranks == here.ranks or self._rank not in at.ranks:
                continue
            if self._held[at.ranks] <= at.number:
                return at
        return None

    def _warn(self, here: _Statement, limit_s: float) -> None:
        missing = {rank: self._whereabouts(here, rank) for rank in here.ranks}
        _log.warning(
            "Rank %d has waited %g s, of %g, for others to come to %s:%s",
            self._rank,
            _PATIENCE_S,
            limit_s,
            here.what,
            "".join(f"\n  rank {rank}: {where}" for rank, where in missing.items() if where),
        )

    def _whereabouts(self, here: _Statement, rank: int) -> str:
        """Words for where a rank is that has not come; none if it has."""
        at = self._where_is(rank)
        if at is None:
            return "has not met any other rank yet"
        if at.ranks != here.ranks:
            return f"was last at: {at.what}, among {rank_list(at.ranks)}"
        ago = here.number - at.number
        return f"was last at: {at.what}, {ago} meeting{'s' * (ago != 1)} before" if ago > 0 else ""

    def _where_is(self, rank: int) -> _Statement | None:
        key = f"trine/at/{rank}"
        if not self._store.check([key]):
            return None
        return _Statement.from_json(self._store.get(key))

    # --- after a bad end ----------------------------------------------------------------

    def _reported(
        self, here: _Statement, detail: str, verdict: str, compare: Compare | None, mend: str
    ) -> Exception:
        """The error, the same on every rank that came."""
        store, key = self._store, here.key
        store.set(f"{key}/says/{self._rank}", json.dumps([here.what, detail]))
        me = str(self._rank)
        if store.compare_set(f"{key}/reporter", "", me).decode() == me:
            says = self._gather_statements(here, _LATE_S if verdict == _DIFFER else _WAKE_S)
            text = self._words(here, verdict, says, compare)
            store.set(f"{key}/readers", str(len(says)))
            store.set(f"{key}/report", f"{text}\n{mend}")
        if not self._comes(f"{key}/report", _REPORT_S):
            return RanksDisagree(
                f"{here.what}: ranks are about to do different things, and the rank that was to "
                f"say which has ended. This is rank {self._rank}. {mend}"
            )
        text = store.get(f"{key}/report").decode()
        if store.add(f"{key}/read", 1) >= int(store.get(f"{key}/readers")):
            store.set(f"{key}/all_read", "")
        self._comes(f"{key}/all_read", _LEAVE_S)
        return CommError(text) if verdict.startswith(_ABSENT) else RanksDisagree(text)

    def _gather_statements(self, here: _Statement, limit_s: float) -> dict[int, tuple[str, str]]:
        """What the ranks that came are about to do; those that come late are waited for."""
        keys = {rank: f"{here.key}/says/{rank}" for rank in here.ranks}
        begun = time.monotonic()
        while not self._store.check(list(keys.values())):
            if time.monotonic() - begun >= limit_s:
                break
            time.sleep(_LONGEST_PAUSE_S)
        came = [rank for rank, key in keys.items() if self._store.check([key])]
        return {rank: tuple(json.loads(self._store.get(keys[rank]))) for rank in came}

    def _words(
        self,
        here: _Statement,
        verdict: str,
        says: Mapping[int, tuple[str, str]],
        compare: Compare | None,
    ) -> str:
        if len({what for what, _ in says.values()}) == 1 and verdict == _DIFFER:
            details = {rank: detail for rank, (_, detail) in says.items()}
            if len(set(details.values())) > 1 and compare is not None:
                return compare(details)
        doing: dict[str, list[int]] = {}
        for rank, (what, _) in says.items():
            doing.setdefault(what, []).append(rank)
        for rank in here.ranks:
            if rank in says:
                continue
            where = self._whereabouts(here, rank) or "came, and has ended"
            doing.setdefault(where, []).append(rank)
        lines = "".join(f"\n  {rank_list(who)}: {what}" for what, who in doing.items())
        among = f"(number {here.number} among {rank_list(here.ranks)})"
        if verdict.startswith(_ABSENT):
            seconds = verdict.split()[1]
            missing = [rank for rank in here.ranks if rank not in says]
            return (
                f"{rank_list(missing).capitalize()} did not come within {seconds} s to "
                f"{here.what} {among}:{lines}"
            )
        return f"Ranks are about to do different things {among}:{lines}"

    def _comes(self, key: str, limit_s: float) -> bool:
        begun = time.monotonic()
        while not self._store.check([key]):
            if time.monotonic() - begun >= limit_s:
                return False
            time.sleep(_LONGEST_PAUSE_S)
        return True


def _raised() -> str | None:
    """Which rank of the world has ended by an exception, in words, if one has."""
    watch = current_watch()
    return None if watch is None else watch.notice()


def _key(ranks: tuple[int, ...], number: int) -> str:
    return f"trine/{_digest(str(ranks))}/{number}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_of_worlds: WeakKeyDictionary[dist.ProcessGroup, Meetings] = WeakKeyDictionary()


def meetings() -> Meetings | None:
    """The meetings of the running world; None if its ranks have no store to meet over.

    That is so where the other ranks are pretended (the backend "fake").
    """
    world = dist.group.WORLD
    if world is None or dist.get_backend() == "fake":
        return None
    made = _of_worlds.get(world)
    if made is None:
        found = store_of(world)
        if found is None:
            return None
        store, timeout = found
        made = _of_worlds[world] = Meetings(store, dist.get_rank(), timeout.total_seconds())
    return made
