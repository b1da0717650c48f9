"""What is said when a collective fails: which one it was, who is missing, and where the rest is.

The first failure of a group closes it: its ranks are out of step, and every later collective
is refused. Other ranks are asked for a bounded time, and what they say is added to the error;
nothing that goes wrong with the asking takes its place.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from torch import Tensor

from trine.core import tracing
from trine.distributed._fsdp.errors import CommError, RanksDisagree, rank_list
from trine.distributed._fsdp.reports import report_begin
from trine.distributed.ledger import Ledger
from trine.distributed.watch import RollCall, current_watch

__all__ = ["confirm", "failed", "guarded", "refused"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MEND = (
    "Look at the first rank that reported an error. If none did, run again with TRINE_DEBUG=1: "
    "ranks then say before each collective what they are about to do."
)


def guarded(
    what: str, unit: str, buffer: Tensor, ledger: Ledger, backend: str, call: Callable[[], T]
) -> T:
    """Make a collective that belongs to no transfer, and wait for it.

    Args:
        what: the operation.
        unit: what it is for.
        buffer: what it moves.
        ledger: of its group.
        backend: who carries the bytes, for reports.
        call: makes it.

    Raises:
        CommError: naming the operation and who is missing; also if an earlier collective of
            the group has failed.
    """
    if ledger.broken is not None:
        raise refused(what, unit, ledger)
    ledger.note(what, unit, buffer)
    number = ledger.number
    report = None
    if tracing.enabled:
        ranks = len(ledger.ranks)
        nbytes = 2 * buffer.nbytes * (ranks - 1) // ranks
        report = report_begin(what, "", buffer, nbytes, backend, ledger)
    try:
        with nullcontext() if report is None else report.waiting():
            made = call()
    except RuntimeError as error:
        raise failed(what, unit, ledger, number, error) from error
    if report is not None:
        report.end()
    return made


def refused(what: str, unit: str, ledger: Ledger) -> CommError:
    """The error for a collective in a group of which one has failed before."""
    return CommError(
        f"{what} of {unit} was refused on rank {ledger.rank}, because {ledger.broken}. The ranks "
        f"of group {ledger.name} ({rank_list(ledger.ranks)}) may be out of step: end the job, and "
        "start again from a checkpoint."
    )


def failed(what: str, unit: str, ledger: Ledger, number: int, error: RuntimeError) -> CommError:
    """The error for a collective that has failed; closes its group.

    Args:
        what: the operation.
        unit: whose it was.
        ledger: of its group.
        number: which of the group's it was.
        error: what torch raised.
    """
    this = f"{what} of {unit} failed on rank {ledger.rank} of {ledger.world_size}"
    this += f" (#{number} of group {ledger.name}, {rank_list(ledger.ranks)})"
    before, ledger.broken = ledger.broken, ledger.broken or f"{what} of {unit} (#{number}) failed"
    # What torch advises after its first sentence is said better by those who were asked.
    said = f"torch said: {str(error).split(' This is typically')[0]}"
    watch = None if before else current_watch()
    if watch is None:
        return CommError(f"{this}. {said}\n{_MEND}")
    with _told_to_end_later() as told:
        roll = watch.roll_call(this)
        causes, places = _words(roll, ledger, number)
        if causes:
            ledger.broken += f": {causes}"
        message = f"{this}: {causes or 'all ranks answer'}.{places}\n{said}\n{_MEND}"
        if told:
            _log.error("%s", message)  # the exception would come too late
    return CommError(message)


@contextmanager
def _told_to_end_later() -> Iterator[list[int]]:
    """Let SIGTERM wait: launchers send it to all ranks as soon as the first one has failed.

    The list is filled when it comes. Only the main thread can do that.
    """
    told: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield told
        return
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
        if told:
            os.kill(os.getpid(), signal.SIGTERM)


def _words(roll: RollCall, ledger: Ledger, number: int) -> tuple[str, str]:
    """Who is missing, and a line for where each of the others of a group is."""
    causes: list[str] = []
    recent = {ledger.rank: ledger.recent()}
    states = {ledger.rank: "failed here"}
    for rank, said in roll.heard.items():
        if said.state == "raised":
            causes.append(f"rank {rank} has ended, it raised {said.error}")
        elif rank in ledger.ranks:
            recent[rank] = dict(said.recent.get(ledger.name, {}))
            states[rank] = "failed as well" if said.state == "failed" else "runs"
            if states[rank] == "runs" and max(recent[rank], default=0) < number:
                causes.append(f"rank {rank} runs, but has not come")
    causes += _different(recent)
    silent = list(roll.silent)
    if roll.holder_gone == "rank 0" and 0 in silent:
        causes.append("rank 0 has ended or was killed, and the store that it held is gone")
        silent.remove(0)
    if silent:
        unasked = f"could not be asked, since {roll.holder_gone} held the store and is gone"
        gone = "did not answer: ended, killed, or out of reach"
        causes.append(f"{rank_list(silent)} {unasked if roll.holder_gone else gone}")
    lines = ""
    for rank in sorted(recent):
        last = max(recent[rank], default=0)
        words = f"#{last} {recent[rank][last]}" if last else "nothing yet"
        lines += f"\n  rank {rank}: {states[rank]}; last started {words}"
    return "; ".join(causes), lines


def _different(recent: Mapping[int, Mapping[int, str]]) -> list[str]:
    """Words for the first collective that is another one on some rank, if there is one."""
    numbers = sorted(set().union(*recent.values()))
    for number in numbers:
        doing: dict[str, list[int]] = {}
        for rank, each in recent.items():
            if number in each:
                doing.setdefault(each[number], []).append(rank)
        if len(doing) > 1:
            found = ", ".join(f"{words} on {rank_list(who)}" for words, who in doing.items())
            return [f"ranks do different things, #{number} is {found}"]
    return []


def confirm(ledger: Ledger, doubt: str) -> None:
    """Make sure that all ranks of a group do the same as the collective noted last.

    Where they do not agree about a size gloo ends the process, in C++, and MPICH says nothing
    and leaves wrong numbers.

    Args:
        ledger: of the group.
        doubt: why this rank asks, and what to do if they disagree.

    Raises:
        RanksDisagree: if one does something else.
        CommError: if one has raised, or does not come in time.
    """
    watch = current_watch()
    if watch is None:
        return
    number = ledger.number
    doing = watch.compare(ledger, number)
    this = f"#{number} of group {ledger.name}, {rank_list(ledger.ranks)}"
    if doing is None:
        why = watch.notice() or "another rank has not come in time"
        ledger.broken = f"{ledger.recent()[number]} (#{number}) could not start: {why}"
        raise CommError(f"{ledger.recent()[number]} ({this}) cannot start: {why}.\n{_MEND}")
    if len(set(doing.values())) == 1:
        ledger.trust()
        return
    lines = "".join(f"\n  rank {rank}: {words}" for rank, words in sorted(doing.items()))
    ledger.broken = f"ranks were about to do different things (#{number}):{lines}\n"
    raise RanksDisagree(f"Ranks are about to do different things ({this}):{lines}\n{doubt}")
