"""Schedule: the order in which groups gather, compute, reduce and free. It decides, only.

No torch here. The schedule sees each group as a `Unit` and is told by the hooks what the
program does; it answers by calling the units. Its decisions depend on nothing but these
events, so ranks that run the same program make the same collectives in the same order.

What a unit goes through, and the rows that are not obvious:

| event | phase before | what happens | phase after |
|---|---|---|---|
| pre_forward | any, no backward running | gather, wait, prefetch the next | FORWARD |
| pre_forward | any, backward running | gather, wait: a checkpoint recomputes | as before |
| pre_forward of a further part | FORWARD | gather again if it was freed | FORWARD |
| post_forward of the last part, end_forward | FORWARD | free *, if so set | AWAITS_BACKWARD * |
| post_forward | any, backward running | stays whole for its own backward | as before |
| forward_failed | FORWARD | free | IDLE |
| pre_backward | any | gather, wait, prefetch the one before | BACKWARD |
| post_backward | any | free *, reduce or keep gradients | IDLE * |
| end_backward | AWAITS_BACKWARD, BACKWARD | post_backward for it; then finish all | IDLE |
| end_backward | IDLE, gradients kept before | the same, if it reduces now | IDLE |
| reset | any | drop what an exception left | IDLE |

(* AWAITS_BACKWARD, and free until then, while a backward of this iteration is to come; else
IDLE, and free altogether.)

`pre_backward` after IDLE is a second backward through a retained graph, or a module that
was used twice; `pre_forward` after AWAITS_BACKWARD is a second forward. Both are lawful.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from trine.core import tracing

__all__ = ["Phase", "Schedule", "Unit", "UnitSettings"]


_MOST_BEGUN = 64  # forwards of each unit, beyond which an order is not worth keeping


class Unit(Protocol):
    """What the schedule asks of a parameter group."""

    name: str

    def unshard(self) -> None:
        """Start to gather; nothing if it is gathered or on the way."""

    def wait_for_unshard(self) -> None:
        """Have it gathered and in place."""

    def reshard(self) -> None:
        """Free what was gathered; nothing if there is nothing."""

    def reshard_until_backward(self) -> None:
        """The same, except for what makes the gather for a backward to come a cheaper one."""

    def reduce_grads(self) -> None:
        """Start to reduce the gradients over ranks."""

    def keep_grads(self) -> None:
        """Leave the gradients for a later backward to reduce."""

    def take_up_grads(self) -> bool:
        """Make ready to reduce what earlier backwards left.

        Returns:
            False if nothing waits that a reduction would hand out.
        """

    def finish_reduce(self) -> bool:
        """Wait for the reduction's collective and hand out the gradients.

        Returns:
            False if another collective had to follow, and has been started.
        """

    def reset(self) -> None:
        """Forget an iteration that broke off."""


class Phase(Enum):
    """Where a unit is in its iteration."""

    IDLE = auto()
    FORWARD = auto()
    AWAITS_BACKWARD = auto()
    BACKWARD = auto()


@dataclass
class UnitSettings:
    """What a user sets for the units of one module; shared between module and schedule.

    Attributes:
        reshard_after_forward: free after forward; None: free, unless it is the root.
        reshard_after_backward: free after backward.
        gathers_in_backward: gather for backward, if it is not whole.
        reduces: whether a backward reduces gradients over ranks or keeps them here.
        ahead_in_forward: units to gather ahead before a forward; None: the next.
        ahead_in_backward: units to gather ahead in backward; None: the one before.
        ahead_late: gather ahead when a backward ends, rather than when it begins: less memory.
    """

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    gathers_in_backward: bool = True
    reduces: bool = True
    ahead_in_forward: Sequence[Unit] | None = None
    ahead_in_backward: Sequence[Unit] | None = None
    ahead_late: bool = False


@dataclass(eq=False)
class _Record:
    unit: Unit
    settings: UnitSettings
    is_root: bool
    parts: int
    phase: Phase = Phase.IDLE
    grads_wanted: bool = False  # by any part since the forward began
    may_free: bool = True  # after forward, for all parts
    ran: set[int] = field(default_factory=set)  # parts, since the forward began
    calls: list[int] = field(default_factory=list)  # positions in this iteration's `_ended`

    def reshards_after_forward(self) -> bool:
        if not self.may_free:
            return False
        chosen = self.settings.reshard_after_forward
        if chosen is None:
            # The root's backward comes first, so it stays; without one there is no reason to.
            return not (self.is_root and self.grads_wanted)
        return chosen


class Schedule:
    """The order of one tree of units under a root.

    Args:
        prefetch: how many units to gather ahead.
        open_reductions: how many reductions may be under way while backward goes on.

    Attributes:
        in_backward: whether a backward is running.
        is_last_backward: whether the end of backward waits for the reductions; if not,
            those of the next one do.
        free_idle: called when a forward or a backward has ended, and when a backward has
            nothing more to gather. Memory is scarcest where forward turns into backward, and
            what units took turns on is idle there.
        after_backward: called when a backward has ended and all is as it should be.
    """

    def __init__(self, *, prefetch: int = 1, open_reductions: int = 1) -> None:
        self._prefetch = prefetch
        self.open_reductions = open_reductions
        self._records: dict[Unit, _Record] = {}
        self._begun: list[_Record] = []  # forwards of this iteration, as they began
        self._ended: list[_Record] = []  # the same as they ended: backward goes in reverse
        self._last_begun: list[_Record] = []  # of the iteration before
        self._reducing: list[_Record] = []
        self.in_backward = False
        self.is_last_backward = True
        self.free_idle: Callable[[], None] = lambda: None
        self.after_backward: Callable[[], None] | None = None
        self._keep_whole = False
        self._task = 0
        self._recomputes = False

    def add(
        self, unit: Unit, settings: UnitSettings, *, is_root: bool = False, parts: int = 1
    ) -> None:
        """Take charge of a unit whose parameters serve `parts` modules."""
        self._records[unit] = _Record(unit, settings, is_root, parts)

    def phase_of(self, unit: Unit) -> Phase:
        """Where a unit is now."""
        return self._records[unit].phase

    @property
    def units(self) -> Sequence[Unit]:
        """All units, in the order in which they were added."""
        return list(self._records)

    # --- forward ----------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root's forward begins: what was learned of the order serves to prefetch."""
        if self.in_backward:
            return
        if self._begun:
            self._last_begun = self._begun
            self._begun = []
        self._ended.clear()
        for record in self._records.values():
            record.calls.clear()

    def pre_forward(self, unit: Unit, part: int = 0) -> bool:
        """A module of `unit` is about to compute.

        Args:
            unit: whose it is.
            part: which of the unit's modules.

        Returns:
            True if the unit's forward begins with this.
        """
        unit.unshard()
        unit.wait_for_unshard()
        if self.in_backward:
            self._recomputes = True
            return True
        record = self._records[unit]
        if record.phase is Phase.FORWARD and record.parts > 1:
            return False
        self._enter(record, Phase.FORWARD)
        record.grads_wanted, record.may_free = False, True
        record.ran.clear()
        if len(self._begun) > _MOST_BEGUN * len(self._records):
            self._begun.clear()  # parts of the model are used on their own, over and over
        self._begun.append(record)
        self._prefetch_forward(record)
        return True

    def _prefetch_forward(self, record: _Record) -> None:
        if record.settings.ahead_in_forward is not None:
            for unit in record.settings.ahead_in_forward:
                unit.unshard()
            return
        # Only while this iteration goes as the one before: a guess would cost a gather.
        position = len(self._begun) - 1
        last = self._last_begun
        if position < len(last) and last[position] is record:
            for ahead in last[position + 1 : position + 1 + self._prefetch]:
                ahead.unit.unshard()

    def post_forward(
        self, unit: Unit, part: int = 0, *, grads_wanted: bool, may_free: bool = True
    ) -> None:
        """A module of `unit` has computed.

        Args:
            unit: whose it is.
            part: which of the unit's modules.
            grads_wanted: a backward can follow.
            may_free: it would be noticed in time to gather again.
        """
        if self.in_backward:
            return
        record = self._records[unit]
        record.grads_wanted |= grads_wanted
        record.may_free &= may_free
        record.ran.add(part)
        if len(record.ran) == record.parts:
            self._end_forward_of(record)

    def end_forward(self) -> None:
        """The root's forward has ended, and with it that of units only some parts of which ran."""
        if self.in_backward:
            return
        for record in self._records.values():
            if record.phase is Phase.FORWARD and record.parts > 1:
                self._end_forward_of(record)
        self.free_idle()

    def _end_forward_of(self, record: _Record) -> None:
        if record.grads_wanted:
            record.calls.append(len(self._ended))
            self._ended.append(record)
        self._enter(record, Phase.AWAITS_BACKWARD if record.grads_wanted else Phase.IDLE)
        if record.reshards_after_forward():
            self._free(record)

    def forward_failed(self, unit: Unit) -> None:
        """The forward of `unit` raised: the user must find the sharded parameters in place."""
        if self.in_backward:
            return  # a recomputation that stopped early, when it had all it needed
        self._enter(self._records[unit], Phase.IDLE)
        unit.reshard()

    # --- backward ---------------------------------------------------------------------

    def pre_backward(self, unit: Unit, *, keep_whole: bool = False, task: int = 0) -> bool:
        """A gradient has reached an output of `unit`.

        Args:
            unit: whose it is.
            task: which backward pass this is. Another one while the first has not ended is
                inside it, if a forward was recomputed there; if not, the first has raised.
            keep_whole: free nothing after this backward, because a backward through it may
                follow.

        Returns:
            True if a backward pass begins with this; `end_backward` must follow when it ends.
        """
        if self.in_backward and task != self._task and not self._recomputes:
            self.reset()
        begins = not self.in_backward
        if begins:
            self.in_backward = True
            self._task = task
            self._recomputes = False
            self._keep_whole = keep_whole
        record = self._records[unit]
        if record.phase is not Phase.BACKWARD:
            self._enter(record, Phase.BACKWARD)
            if record.settings.gathers_in_backward:
                unit.unshard()
                unit.wait_for_unshard()
            if not record.settings.ahead_late:
                self._prefetch_backward(record, record.calls[-1] if record.calls else 0)
        return begins

    def _prefetch_backward(self, record: _Record, position: int) -> None:
        if record.settings.ahead_in_backward is not None:
            for unit in record.settings.ahead_in_backward:
                unit.unshard()
            return
        ahead = 0
        for before in reversed(self._ended[:position]):
            if ahead == self._prefetch:
                break
            if before.phase is Phase.AWAITS_BACKWARD and before.settings.gathers_in_backward:
                before.unit.unshard()
                ahead += 1
        if not ahead:
            # What gathers took turns on would lie idle while this unit's gradients come, and
            # with a reduction under way that is where most memory is needed.
            self.free_idle()

    def post_backward(self, unit: Unit) -> None:
        """The gradients of `unit`'s inputs are known, so those of its parameters are too."""
        record = self._records[unit]
        position = record.calls[-1] if record.calls else 0
        self._end_backward_of(record)
        if record.settings.ahead_late:
            self._prefetch_backward(record, position)

    def _end_backward_of(self, record: _Record) -> None:
        unit = record.unit
        if record.calls:
            record.calls.pop()
        self._enter(record, Phase.AWAITS_BACKWARD if record.calls else Phase.IDLE)
        if self._frees_after_backward(record):
            self._free(record)
        if not record.settings.reduces:
            unit.keep_grads()
            return
        while record in self._reducing:
            self._advance(record)
        # Those before had this unit's whole backward to arrive; now their buffers can serve
        # this one. A reduction over copies takes two collectives: it is taken one further for
        # each that is started after it.
        for earlier in self._reducing[: max(len(self._reducing) + 1 - self.open_reductions, 0)]:
            self._advance(earlier)
        unit.reduce_grads()
        self._reducing.append(record)

    def _free(self, record: _Record) -> None:
        if record.phase is Phase.AWAITS_BACKWARD and record.settings.gathers_in_backward:
            record.unit.reshard_until_backward()
        else:
            record.unit.reshard()

    def _frees_after_backward(self, record: _Record) -> bool:
        return record.settings.reshard_after_backward and not self._keep_whole

    def _advance(self, record: _Record) -> None:
        if record.unit.finish_reduce():
            self._reducing.remove(record)

    def end_backward(self) -> None:
        """The backward pass has ended: reduce what is left, hand out all gradients."""
        for record in reversed(self._in_order_of_first_call()):
            reached = record.phase in (Phase.AWAITS_BACKWARD, Phase.BACKWARD)
            # What it kept would reach the optimizer only after a step in which it is used again.
            if reached or (record.settings.reduces and record.unit.take_up_grads()):
                del record.calls[1:]
                self._end_backward_of(record)
        if self.is_last_backward:
            while self._reducing:
                for record in list(self._reducing):
                    self._advance(record)
        self._ended.clear()
        for record in self._records.values():
            record.calls.clear()
            if self._frees_after_backward(record):
                record.unit.reshard()  # gathered ahead for nothing, or for a second backward
            self._enter(record, Phase.IDLE)
        self.in_backward = False
        self.free_idle()
        if self.after_backward is not None:
            self.after_backward()

    def _in_order_of_first_call(self) -> list[_Record]:
        seen = dict.fromkeys(self._begun)
        seen.update(dict.fromkeys(self._records.values()))
        return list(seen)

    def reset(self) -> None:
        """Forget an iteration that an exception broke off."""
        self._reducing.clear()
        self._begun.clear()
        self._ended.clear()
        for record in self._records.values():
            record.calls.clear()
            record.unit.reset()
            self._enter(record, Phase.IDLE)
        self.in_backward = False

    def reshard_all(self) -> None:
        """Free everything that was gathered, so that the sharded parameters are in place."""
        for unit in self._records:
            unit.reshard()

    def _enter(self, record: _Record, phase: Phase) -> None:
        if tracing.enabled and record.phase is not phase:
            tracing.instant(phase.name.lower(), "compute", record.unit.name)
        record.phase = phase
