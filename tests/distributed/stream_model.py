"""A model of time on a device with streams, and a detector of races in it. Knows no torch.

Each stream, and the host, is a timeline with a vector clock: for every timeline, how much of
the work on it is known to be done. Work on a stream begins after all that the host knew when
it queued it; an event carries the clock of its stream to whoever waits. Two pieces of work of
which neither knows the other may run at the same time, whatever the order in which they were
queued. If they touch one buffer, and one of them writes, that is a race.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

__all__ = ["Access", "Mark", "StreamModel", "Timeline", "Work"]

Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """Part of a buffer: bytes from `start` to before `end`."""

    buffer: Hashable
    start: int = 0
    end: int = 1


@dataclass(eq=False)
class Timeline:
    """The host, or a stream: its work is done in the order in which it was queued."""

    name: str
    clock: Clock = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        """Do what comes next after all that `other` knows."""
        for name, tick in other.items():
            self.clock[name] = max(self.clock.get(name, 0), tick)


@dataclass(frozen=True, eq=False)
class Work:
    """One piece of work, and what was known to be done when it was."""

    label: str
    timeline: str
    tick: int
    clock: Clock

    def before(self, other: Work) -> bool:
        """Whether it is known to be done when `other` begins."""
        return other.clock.get(self.timeline, 0) >= self.tick

    def beside(self, other: Work) -> bool:
        """Whether both may run at the same time."""
        return not self.before(other) and not other.before(self)


@dataclass(eq=False)
class Mark:
    """An event: what its stream will have done when it fires."""

    clock: Clock = field(default_factory=dict)


class StreamModel:
    """Everything that was queued on one device.

    Attributes:
        host: the timeline of the program.
        main: the stream on which a program computes unless it says otherwise.
        current: the stream on which work is queued now.
        journal: all work, in the order in which it was queued.
        races: what must not happen, in words.
    """

    def __init__(self) -> None:
        self.host = Timeline("host")
        self.main = self.current = Timeline("main")
        self.journal: list[Work] = []
        self.races: list[str] = []
        self._touched: dict[Hashable, list[tuple[Access, Work, bool]]] = defaultdict(list)

    def work(
        self,
        label: str,
        on: Timeline | None = None,
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
    ) -> Work:
        """Queue work, and look whether anything it touches may be in use."""
        on = self.current if on is None else on
        on.join(self.host.clock)
        tick = on.clock[on.name] = on.clock.get(on.name, 0) + 1
        done = Work(label, on.name, tick, dict(on.clock))
        self.journal.append(done)
        for accesses, is_write in ((reads, False), (writes, True)):
            for access in accesses:
                self._touch(access, done, is_write)
        return done

    def _touch(self, access: Access, work: Work, is_write: bool) -> None:
        kept = []
        for other, earlier, was_write in self._touched[access.buffer]:
            overlap = other.start < access.end and access.start < other.end
            if overlap and (is_write or was_write) and earlier is not work:
                if not earlier.before(work):
                    self.races.append(
                        f"{work.label!r} on {work.timeline} {'writes' if is_write else 'reads'} "
                        f"what {earlier.label!r} on {earlier.timeline} "
                        f"{'writes' if was_write else 'reads'}, and nothing orders the two"
                    )
                elif is_write and access.start <= other.start and other.end <= access.end:
                    continue  # whoever comes after this write comes after the other, too
            kept.append((other, earlier, was_write))
        self._touched[access.buffer] = [*kept, (access, work, is_write)]

    def forget(self, buffer: Hashable) -> None:
        """The buffer is no more."""
        self._touched.pop(buffer, None)

    def record(self, on: Timeline, mark: Mark) -> None:
        """Let `mark` stand for all that is queued on a timeline."""
        on.join(self.host.clock)
        mark.clock = dict(on.clock)

    def wait(self, on: Timeline, mark: Mark) -> None:
        """Let later work on a timeline, the host's too, begin after `mark`."""
        on.join(mark.clock)

    def find(self, label: str, number: int = -1) -> Work:
        """The work of that label; the last of several, unless another is asked for."""
        found = [work for work in self.journal if work.label == label]
        assert found, f"no {label!r} among {sorted({work.label for work in self.journal})}"
        return found[number]

    def queued_before(self, first: Work, second: Work) -> bool:
        """Whether the program came to `first` before it came to `second`."""
        return self.journal.index(first) < self.journal.index(second)
