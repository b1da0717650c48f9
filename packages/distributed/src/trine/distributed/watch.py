"""Watch the other ranks of a job: who is where when one fails, and end with it.

One thread for each process. While all is well it asks the store of the world one question a
second, on a connection of its own. When a collective fails, the ranks call the roll through the
store: each says where it is, also one whose program is busy, for its thread answers. When a
program ends by an exception, the ranks that have not noticed are ended too: MPI does that, and
without a launcher nobody else would. Nothing here waits without a limit, since the store may be
gone with the rank that held it.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from trine.distributed.ledger import Ledger, ledgers
from trine.distributed.uncaught import uncaught

__all__ = ["RollCall", "Statement", "Watch", "current_watch", "stop_watch", "watch_world"]

_LOOK_S = 1.0  # between questions while all is well
_BUSY_LOOK_S = 0.02  # during a roll call of up to eight ranks
_ROLL_CALL_S = 2.0  # for ranks to answer: their threads look once a second
_ANSWER_S = 0.5  # for this process's own thread beyond that
_GRACE_S = 3.0  # for a program to notice by itself that another one has raised
_SILENT_S = 5.0  # after which one whose thread should look once a second counts as gone
_LONGEST_ERROR = 300  # characters of it, for the other ranks
_LEAVE_S = 1.0  # for the thread to end
_MOST_RANKS = 256  # two connections from each to one process, which may have a thousand files


@dataclass(frozen=True)
class Statement:
    """What a rank says of itself.

    Attributes:
        state: "failed" in a collective, "raised" an exception that nobody caught, or "runs".
        error: what was raised; empty if nothing was.
        recent: the collectives that it started last, in words, by the name of the group and
            their numbers.
    """

    state: str
    error: str = ""
    recent: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @classmethod
    def here(cls, state: str, error: str = "") -> Statement:
        """What this rank has to say now."""
        return cls(state, error, {name: each.recent() for name, each in ledgers().items()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Statement:
        """From the store."""
        state, error, recent = json.loads(text)
        by_group = {
            name: {int(number): words for number, words in each.items()}
            for name, each in recent.items()
        }
        return cls(state, error, by_group)

    def to_json(self) -> str:
        """For the store."""
        return json.dumps([self.state, self.error, self.recent])


@dataclass
class _Question:
    """What other ranks do as a certain collective of a group."""

    group: str
    number: int
    ranks: Sequence[int]
    words: str
    asked: bool = False
    answers: dict[int, str] = field(default_factory=dict)
    signs: dict[int, tuple[int, float]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def key(self, rank: int) -> str:
        """Where a rank's answer stands in the store."""
        return _answer_key(self.group, self.number, rank)

    def note_sign(self, rank: int, count: int) -> None:
        """A rank that has not come there has given so many signs of life, once a second."""
        now = time.monotonic()
        last, at = self.signs.setdefault(rank, (count, now))
        if count != last:
            self.signs[rank] = (count, now)
        elif now - at > _SILENT_S:
            self.over.set()


@dataclass(frozen=True)
class RollCall:
    """Who answered.

    Attributes:
        heard: what each rank said that answered.
        silent: those that did not.
        holder_gone: who held the store, if it is gone and not all could be asked: "rank 0" or
            "the launcher".
    """

    heard: Mapping[int, Statement]
    silent: tuple[int, ...]
    holder_gone: str | None


class Watch:
    """Watches one world, from one rank.

    Args:
        store: that all ranks share; a connection that nobody else uses.
        address: where the process that holds the store listens.
        rank: this one.
        size: how many there are.
        holder: with whom the store ends: "rank 0", or "the launcher".
        timeout_s: how long ranks wait for each other.

    Attributes:
        raised: which rank has ended by an exception, in words; None if none is known to.
    """

    def __init__(
        self,
        store: Any,
        address: tuple[str, int],
        rank: int,
        size: int,
        holder: str,
        timeout_s: float,
    ) -> None:
        self.raised: str | None = None
        self._rank, self._size = rank, size
        self._others = tuple(other for other in range(size) if other != rank)
        self._busy_look_s = _BUSY_LOOK_S * max(1, size / 8)
        self._store, self._holder = store, holder
        # Tells when the store's process ends; torch's own connection would complain on stderr.
        self._line = socket.create_connection(address, timeout=_ROLL_CALL_S)
        self._line.setblocking(False)
        self._wake, self._stopping, self._answered = (threading.Event() for _ in range(3))
        self._answered.set()  # nobody asks
        self._told = False  # the program knows that another rank has failed
        self._mine: Statement | None = None
        self._deadline = 0.0
        self._question: _Question | None = None
        self._to_answer: list[tuple[str, int]] = []
        self._answered_questions = 0
        self._timeout_s = timeout_s
        self._alarmed = False
        self._asked: tuple[int, ...] = ()
        self._heard: dict[int, Statement] = {}
        self._store_is_gone = False
        self._raised_at = 0.0
        self._seen = 0
        self._process = os.getpid()  # a fork is no rank
        self._hook = sys.excepthook
        sys.excepthook = self._uncaught
        self._thread = threading.Thread(target=self._run, name="watches the ranks", daemon=True)
        self._thread.start()

    # --- called by the program ----------------------------------------------------------

    def roll_call(self, error: str) -> RollCall:
        """Say that a collective has failed here, and hear where all other ranks are.

        Waits for them for two seconds.

        Args:
            error: what has failed.
        """
        self._told = True
        self._mine = Statement.here("failed", error)
        self._ask(self._others)
        self._answered.wait(_ROLL_CALL_S + _ANSWER_S)
        heard = dict(self._heard)
        silent = tuple(rank for rank in self._others if rank not in heard)
        return RollCall(heard, silent, self._holder if self._store_is_gone else None)

    def compare(self, ledger: Ledger, number: int) -> dict[int, str] | None:
        """What the other ranks of a group do as the collective that this one is about to start.

        Ranks that do not ask are asked: their threads answer once their programs come there.

        Args:
            ledger: of the group.
            number: of the collective, which this rank has noted.

        Returns:
            Words for what each does, as soon as all are known or one differs. None if a rank
            has raised, or does not come within the timeout of the store. Only this rank's, if
            another is silent: gone, or out of reach; the collective itself will tell.
        """
        others = [rank for rank in ledger.ranks if rank != self._rank]
        question = _Question(ledger.name, number, others, ledger.recent()[number])
        self._question = question
        self._wake.set()
        deadline = time.monotonic() + self._timeout_s
        # Without the thread nobody can be asked: the store is gone.
        while not question.over.wait(_BUSY_LOOK_S) and self._thread.is_alive():
            if self.notice() is not None or time.monotonic() > deadline:
                self._question = None
                return None
        self._question = None
        return question.answers | {self._rank: question.words}

    def notice(self) -> str | None:
        """See `raised`; the program goes its own way then, and is not ended."""
        self._told = self._told or self.raised is not None
        return self.raised

    def stop(self) -> None:
        """End the thread and leave the program's hook for uncaught exceptions as it was."""
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        self._stopping.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S)
        self._line.close()

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._hook(kind, error, traceback)
        if not self._stopping.is_set() and os.getpid() == self._process and uncaught(error):
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Let the other ranks know that this one ends by an exception; returns soon.

        Args:
            error: which one.
        """
        first = str(error).partition("\n")[0].rstrip(":.")
        self._told = True
        self._mine = Statement("raised", f"{type(error).__name__}: {first[:_LONGEST_ERROR]}")
        # Whoever holds the store must not take it away before all have heard.
        self._ask(self._others if self._holder == f"rank {self._rank}" else ())
        self._answered.wait(_ROLL_CALL_S + _ANSWER_S)

    def _ask(self, ranks: tuple[int, ...]) -> None:
        self._heard = {}
        self._answered.clear()
        self._asked = ranks
        self._deadline = time.monotonic() + _ROLL_CALL_S
        self._wake.set()
        if not self._thread.is_alive():
            self._answered.set()

    # --- the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _LOOK_S
        try:
            while True:
                self._wake.wait(pause_s)
                self._wake.clear()
                if self._stopping.is_set():
                    return
                if not self._store_is_gone:
                    pause_s = self._look_if_store_lives()
                if self.raised is not None and not self._told:
                    if time.monotonic() - self._raised_at > _GRACE_S:
                        self._end()
                elif self._store_is_gone:
                    return
        finally:
            self._answered.set()

    def _look_if_store_lives(self) -> float:
        try:
            self._store_is_gone = self._host_has_ended()
            if not self._store_is_gone:
                return _LOOK_S if self._look() else self._busy_look_s
        except (dist.DistError, RuntimeError):
            self._store_is_gone = True
        self._answered.set()  # whoever held the store has ended, perhaps well
        return _LOOK_S

    def _host_has_ended(self) -> bool:
        try:
            return not self._line.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _look(self) -> bool:
        """Answer and listen; whether nothing is urgent."""
        store = self._store
        mine = self._mine
        if mine is not None:
            store.set(f"trine/says/{self._rank}", mine.to_json())
            if mine.state == "raised":
                store.compare_set(
                    "trine/raised", "", f"rank {self._rank} has ended, it raised {mine.error}"
                )
            if not self._alarmed:
                self._alarmed = True
                store.set("trine/alarm", "")
                store.add("trine/news", 1)
        elif self._alarmed or self._news():
            store.set(f"trine/says/{self._rank}", Statement.here("runs").to_json())
            if self.raised is None and store.check(["trine/raised"]):
                self.raised = store.get("trine/raised").decode()
                self._raised_at = time.monotonic()
        urgent = self._ask_and_answer()
        if self._answered.is_set():
            return not urgent
        for rank in self._asked:
            if rank not in self._heard and store.check([f"trine/says/{rank}"]):
                self._heard[rank] = Statement.from_json(store.get(f"trine/says/{rank}"))
        if len(self._heard) == len(self._asked) or time.monotonic() > self._deadline:
            self._answered.set()
        return self._answered.is_set()

    def _news(self) -> bool:
        """Look what has been written since the last time; whether a rank has failed."""
        store = self._store
        news = store.add("trine/news", 0)
        if news > self._seen:
            self._seen = news
            self._alarmed = store.check(["trine/alarm"])
            questions = store.add("trine/questions", 0)
            for one in range(self._answered_questions + 1, questions + 1):
                if store.check([f"trine/question/{one}"]):
                    group, number = json.loads(store.get(f"trine/question/{one}"))
                    self._to_answer.append((group, number))
            self._answered_questions = questions
        return self._alarmed

    def _ask_and_answer(self) -> bool:
        """Compare collectives with ranks that want to, or that must; whether one is open."""
        store, question = self._store, self._question
        if question is not None and not question.asked:
            question.asked = True
            store.set(question.key(self._rank), question.words)
            one = store.add("trine/questions", 1)
            store.set(f"trine/question/{one}", json.dumps([question.group, question.number]))
            store.add("trine/news", 1)
        if question is not None:
            for rank in question.ranks:
                if rank in question.answers:
                    continue
                if store.check([question.key(rank)]):
                    question.answers[rank] = store.get(question.key(rank)).decode()
                else:
                    question.note_sign(rank, store.add(f"{question.key(rank)}/here", 0))
            differ = set(question.answers.values()) - {question.words}
            if differ or len(question.answers) == len(question.ranks):
                question.over.set()
        found = ledgers()
        for group, number in list(self._to_answer):
            ledger = found.get(group)
            if ledger is not None and ledger.number < number:
                store.add(f"{_answer_key(group, number, self._rank)}/here", 1)
                continue
            self._to_answer.remove((group, number))
            if ledger is not None and number in (recent := ledger.recent()):
                store.set(_answer_key(group, number, self._rank), recent[number])
        return bool(self._to_answer) or (question is not None and not question.over.is_set())

    def _end(self) -> None:
        """End this process, whose program has not noticed that another one has ended."""
        last = "; ".join(
            f"{words} as #{number} of group {name}"
            for name, each in ledgers().items()
            for number, words in list(each.recent().items())[-1:]
        )
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            print(
                f"trine: {self.raised}\nThe other ranks cannot go on without it. Ending rank "
                f"{self._rank} of {self._size}, which last started {last or 'no collective'}.",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)


def _answer_key(group: str, number: int, rank: int) -> str:
    return f"trine/does/{group}/{number}/{rank}"


_worlds = itertools.count()
_watched: tuple[weakref.ref[dist.ProcessGroup], Watch | None] | None = None


def watch_world() -> None:
    """Watch the other ranks of the running world from now on, if they can be asked.

    One whose store is no process's (a file), whose other ranks are pretended, or which is very
    large is not watched. A job over MPI ends by itself; there the ranks only ask each other.
    """
    global _watched
    world = dist.group.WORLD
    if world is None or (_watched is not None and _watched[0]() is world):
        return
    stop_watch()
    _watched = weakref.ref(world), _watch(world)


def current_watch() -> Watch | None:
    """The watch of the running world, if it has one."""
    return None if _watched is None or _watched[0]() is None else _watched[1]


def stop_watch() -> None:
    """End the watch before the world is left."""
    global _watched
    watched, _watched = _watched, None
    if watched is not None and watched[1] is not None:
        watched[1].stop()


def _watch(world: dist.ProcessGroup) -> Watch | None:
    backend = dist.get_backend()
    if not 1 < world.size() <= _MOST_RANKS or backend == "fake":
        return None
    try:
        inner: Any = world.get_group_store()
        # A later world may meet over the same store, and must not hear of this one's failures.
        own = dist.PrefixStore(f"watch {next(_worlds)}", inner.clone())  # type: ignore[attr-defined]
        while hasattr(inner, "underlying_store"):
            inner = inner.underlying_store
        limit_s = getattr(own, "timeout", dist.default_pg_timeout).total_seconds()
        own.set_timeout(timedelta(seconds=_ROLL_CALL_S))
        launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "the launcher" if launched else "rank 0"
        address = (inner.host, inner.port)
        return Watch(own, address, world.rank(), world.size(), holder, limit_s)
    except (AttributeError, RuntimeError, OSError):
        return None
