"""What takes most of a step beside computing, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from trine.tools.text import format_ns, printable

__all__ = ["StepParts", "Waits", "dominant"]

_WORTH_SAYING: Final = 0.02  # of a step; less is noise
_UNKNOWN: Final = 0.2  # of a step; less that no span covers is usual
_ONE_RANK: Final = 0.5  # of the waiting; less is nobody's doing in particular
_SPREAD_OUT: Final = 0.1  # of the exposed time; less is no reason to look at one unit

_NAMES: Final = {
    "exposed_ns": "exposed communication",
    "wait_ns": "waiting for other ranks",
    "data_ns": "loading data",
    "optimizer_ns": "the optimizer",
    "checkpoint_ns": "checkpoints",
}


class StepParts(Protocol):
    """Where the time of a step went."""

    @property
    def total_ns(self) -> float:
        """How long it took."""

    @property
    def compute_ns(self) -> float:
        """Forward and backward."""

    @property
    def other_ns(self) -> float:
        """What no span accounts for."""

    @property
    def wait_ns(self) -> float:
        """Blocked until another rank came."""


@dataclass(frozen=True)
class Waits:
    """How long others stood waiting for a rank.

    Attributes:
        rank: the rank.
        ns: per step; mean over the others.
    """

    rank: int
    ns: float


def dominant(
    parts: StepParts, exposed_ns: Mapping[tuple[str, str], float], waits: Sequence[Waits]
) -> str:
    """The sentence, with names from files in it made printable; "" if nothing is known.

    Args:
        parts: of a step.
        exposed_ns: by unit and operation.
        waits: by rank.
    """
    total = parts.total_ns
    if not total:
        return ""
    shares = {name: getattr(parts, name) / total for name in _NAMES}
    most = max(shares, key=lambda name: shares[name])
    computing = f"{parts.compute_ns / total:.0%} of the step is computing"
    if parts.other_ns / total > max(_UNKNOWN, shares[most]):
        said = f"{parts.other_ns / total:.0%} of the step is not covered by any span"
    elif shares[most] < _WORTH_SAYING:
        said = f"{computing}, and nothing else takes {_WORTH_SAYING:.0%} of it"
    else:
        said = f"{shares[most]:.0%} of the step is {_NAMES[most]}"
        if most == "exposed_ns":
            said += _most_of_it(exposed_ns)
    if parts.wait_ns / total >= _WORTH_SAYING and waits:
        worst = max(waits, key=lambda each: each.ns)
        if worst.ns >= _ONE_RANK * sum(each.ns for each in waits) and worst.ns > 0:
            said += f"; rank {worst.rank} makes the others wait {format_ns(worst.ns)} a step"
        elif most != "wait_ns":
            said += f"; ranks wait for each other {format_ns(parts.wait_ns)} a step"
    return said + "."


def _most_of_it(exposed_ns: Mapping[tuple[str, str], float]) -> str:
    if not exposed_ns:
        return ""
    (unit, operation), ns = max(exposed_ns.items(), key=lambda item: item[1])
    share = ns / max(1.0, sum(exposed_ns.values()))
    name = printable(operation) + (f" of {printable(unit)}" if unit else "")
    if share < _SPREAD_OUT:
        return ""
    return f", most of it {name}" if share > 0.5 else f", {share:.0%} of that {name}"
