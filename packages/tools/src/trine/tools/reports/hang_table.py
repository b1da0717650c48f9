"""Say where a job hangs: sentences, since a table would hide what is the cause."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from trine.tools.analysis.hang import Call, Hang, Stuck
from trine.tools.analysis.last_seen import LastCall, LastSeen
from trine.tools.text import format_ns, format_ranks, printable

__all__ = ["print_hang"]

_FILES = {
    "cut off": "its file is cut off: it was killed, or still runs; its last moments may be missing",
    "signal": "a signal ended it",
    "exit": "its program ended",
    "closed": "its recording was closed",
}


def print_hang(hang: Hang, file: TextIO | None = None) -> None:
    """Print which collective does not go on, who is missing and what those did last.

    Args:
        hang: what to show.
        file: where; standard output if None.
    """
    print("\n".join(_lines(hang)), file=file or sys.stdout)


def _lines(hang: Hang) -> list[str]:
    lines = [*_heading(hang), ""]
    if hang.cycle:
        names = [*hang.cycle, hang.cycle[0]]
        ring = ", which waits for ".join(_group(name) for name in names)
        lines += [f"Groups wait for each other: {ring}.", ""]
    for number, stuck in enumerate(hang.stuck):
        if number:
            lines.append("")
        lines += _stuck(stuck, hang)
    if not hang.stuck:
        lines += _nothing(hang)
    elif len(hang.cut_off) == len(hang.ranks):
        lines += ["", "If the job still runs, ask again: the same answer means that it hangs."]
    return lines


def _heading(hang: Hang) -> list[str]:
    lines = [f"{hang.world_size} rank{'s' if hang.world_size > 1 else ''}"]
    if hang.no_file:
        lines[0] = f"{len(hang.ranks)} of {hang.world_size} ranks, no file of "
        lines[0] += format_ranks(hang.no_file)
    if hang.cut_off:
        lines.append(f"no end in the file{'s' * (len(hang.cut_off) > 1)} of ")
        lines[-1] += f"{format_ranks(hang.cut_off)}: killed, or still running"
    lines += [printable(f"left out: {reason}") for reason in hang.unreadable.values()]
    return lines


def _nothing(hang: Hang) -> list[str]:
    if not hang.groups:
        return ["No collective was recorded, so none can hang."]
    what = "Every collective that was begun is through, and all ranks agree on each."
    lines = [f"Nothing hangs. {what}"]
    if hang.under_way:
        lines = ["Nothing shows a hang. Under way as the recordings ended:"]
    for stuck in hang.under_way:
        lines.append(f"  {_what(stuck)}, for {format_ns(stuck.waited_ns)}")
    return lines


def _stuck(stuck: Stuck, hang: Hang) -> list[str]:
    came = format_ranks(call.rank for call in stuck.calls)
    missing = [*(seen.rank for seen in stuck.absent), *stuck.no_file]
    if stuck.kind == "disagree":
        lines = [f"Ranks disagree at {_number(stuck)}, in {_and(stuck.differs)}:"]
        lines += _asked(stuck.calls)
    elif stuck.kind == "unfinished":
        lines = [f"{_capital(came)} came to {_what(stuck)}, and it did not end:"]
        lines.append("  look for the network between them, or for a process that was killed")
    elif stuck.kind == "killed":
        rank = format_ranks(seen.rank for seen in stuck.absent)
        lines = [f"{_capital(rank)} ended in {_what(stuck)}:"]
    else:
        unsure = "may have not come" if stuck.no_file and not stuck.absent else "did not come"
        lines = [f"{_capital(format_ranks(missing))} {unsure} to {_what(stuck)}:"]
    if stuck.calls and stuck.kind != "unfinished":
        first = "" if len(stuck.calls) == 1 else ", the first of them"
        end = f"{format_ns(stuck.waited_ns)} before the recordings end"
        gave_up = "; waiting failed" if stuck.failed else ""
        lines.append(f"  {came} came{first} {end}{gave_up}")
    for seen in stuck.absent:
        lines += _last_seen(seen, stuck)
    if stuck.no_file:
        lines.append(f"  {format_ranks(stuck.no_file)}: no file, so look at what was printed there")
    lines += _reasons(stuck, hang)
    return lines


def _reasons(stuck: Stuck, hang: Hang) -> list[str]:
    lines = []
    absent = {seen.rank for seen in stuck.absent}
    for other in (*hang.stuck, *hang.under_way):
        if other.group in stuck.because_of:
            held = absent & {call.rank for call in other.calls if not call.through}
            lines.append(f"  because {format_ranks(held)} waits in {_what(other)}")
    return lines


def _last_seen(seen: LastSeen, stuck: Stuck) -> list[str]:
    parts = []
    if seen.span:
        unit = f" of {printable(seen.span.unit)}" if seen.span.unit else ""
        when = ""
        if stuck.calls:
            between = seen.span.ended_ns - stuck.calls[0].begun_ns
            side = "after" if between >= 0 else "before"
            when = f", {format_ns(abs(between))} {side} the first rank came"
        parts.append(f"last finished {printable(seen.span.name)!r}{unit}{when}")
    parts.append(f"last began {_last_call(seen.call)}" if seen.call else "began no collective")
    parts.append(_FILES[seen.file])
    step = f" in step {seen.step}" if seen.step >= 0 else ""
    host = f" on {printable(seen.host)}" if seen.host else ""
    return [f"  rank {seen.rank}{host}{step}", *(f"    {part}" for part in parts)]


def _last_call(call: LastCall) -> str:
    through = "which is through" if call.through else "which is not through"
    what = f"#{call.number} of {_group(call.group)}, {printable(call.operation)}"
    return f"{what}{_of(call.unit)}, {through}"


def _asked(calls: Iterable[Call]) -> list[str]:
    """What was asked for, and by whom."""
    ranks: dict[str, list[int]] = {}
    for call in calls:
        ranks.setdefault(_call(call), []).append(call.rank)
    return [f"  {format_ranks(own)}: {what}" for what, own in ranks.items()]


def _call(call: Call) -> str:
    size = call.dtype and printable(call.dtype)
    if call.elements >= 0:
        size = f"{call.elements} elements" + (f" of {size}" if size else "")
    operation = printable(call.operation) or "a collective"
    return f"{operation}{_of(call.unit)}" + (f" ({size})" if size else "")


def _what(stuck: Stuck) -> str:
    return f"{_number(stuck)}" + (f", {_call(stuck.calls[0])}" if stuck.calls else "")


def _number(stuck: Stuck) -> str:
    return f"#{stuck.number} of {_group(stuck.group)}"


def _group(name: str) -> str:
    return f"group {printable(name)}" if name else "the group without a name"


def _of(unit: str) -> str:
    return f" of {printable(unit)}" if unit else ""


def _and(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
