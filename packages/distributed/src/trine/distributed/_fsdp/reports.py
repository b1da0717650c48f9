"""What the tracing seam is told about a collective: that it begins, is waited for, is through.

The names of the attributes are those that `trine.core.tracing` lists. Nothing here is called
while nobody listens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter_ns

from torch import Tensor

from trine.core import tracing
from trine.distributed.ledger import Ledger

__all__ = ["Report", "report_begin"]


class Report:
    """One collective as it is reported.

    Args:
        operation: what it is, such as `all_gather`.
        unit: whose it is.
        nbytes: bytes that this rank sends.
        about: the attributes that all its events have.
    """

    __slots__ = ("_about", "_asked_ns", "_blocked_ns", "_nbytes", "_operation", "_unit")

    def __init__(self, operation: str, unit: str, nbytes: int, about: dict[str, str | int]) -> None:
        self._operation = operation
        self._unit = unit
        self._nbytes = nbytes
        self._about = about
        self._asked_ns = self._blocked_ns = perf_counter_ns()

    def waiting(self) -> AbstractContextManager[object]:
        """For the block in which this thread waits for it."""
        self._blocked_ns = perf_counter_ns()
        return tracing.span(f"wait {self._operation}", "comm", self._unit, args=self._about)

    def end(self, begun_ns: int = 0, done_ns: int = 0) -> None:
        """Report that it is through; it was waited for.

        Args:
            begun_ns: when the backend took it up, 0 if that is not known.
            done_ns: when it was complete, 0 if that is not known.
        """
        now_ns = perf_counter_ns()
        tracing.record_span(
            self._operation,
            begun_ns or self._asked_ns,
            done_ns or now_ns,
            "comm",
            self._unit,
            self._nbytes,
            {
                **self._about,
                "enqueue_ns": self._asked_ns,
                "exposed_ns": now_ns - self._blocked_ns,
            },
        )


def report_begin(
    operation: str, unit: str, buffer: Tensor, nbytes: int, backend: str, ledger: Ledger | None
) -> Report:
    """Report that a collective is about to start, so that it is known should it never end.

    Args:
        operation: what it is.
        unit: whose it is.
        buffer: what it moves.
        nbytes: bytes that this rank sends.
        backend: who carries them.
        ledger: of its group, which has counted it; None where there is no other rank.
    """
    about: dict[str, str | int] = {
        "op": operation,
        "dtype": str(buffer.dtype).removeprefix("torch."),
        "backend": backend,
    }
    if ledger is not None:
        about["group"], about["seq"] = ledger.name, ledger.number
        begin: dict[str, object] = {**about, "elements": buffer.numel()}
        # Who belongs to the group need not be said each time. Once for each step is enough
        # for a recording that starts anywhere, or has lost its beginning.
        step = tracing.current_step()
        if step < 0 or step != ledger.told_step:
            ledger.told_step = step
            begin["ranks"] = list(ledger.ranks)
        tracing.instant(f"start {operation}", "comm", unit, begin)
    return Report(operation, unit, nbytes, about)
