"""What the demo prints before and after training."""

from __future__ import annotations

from statistics import fmean

from trine.core.recording import Recorder
from trine.distributed.demo.check import compare
from trine.distributed.demo.settings import Outcome, Settings

__all__ = ["print_report"]

_LAST = 10


def print_report(settings: Settings, outcomes: list[Outcome], recorder: Recorder | None) -> bool:
    """Print everything that came of a run, and say whether its check held.

    Args:
        settings: of the run.
        outcomes: one per rank, in order.
        recorder: the one that the ranks recorded with; its own summary is printed too.

    Returns:
        False if losses were checked and differ.
    """
    first = outcomes[0]
    tokens_per_s = sum(outcome.tokens for outcome in outcomes) / first.train_s
    sent = [outcome.sent_nbytes for outcome in outcomes]
    last = first.losses[-_LAST:]
    agrees = True
    print()
    _line(
        "loss",
        f"{first.losses[0]:.3f} -> {fmean(last):.3f} nats per byte "
        f"(first step -> mean of the last {len(last)})",
    )
    if settings.check:
        agrees, sentence = compare(first.losses, first.reference_losses, settings.tolerance)
        _line("check" if agrees else "CHECK FAILED", sentence)
    _line("speed", f"{tokens_per_s:,.0f} tokens/s over {first.train_s:.1f} s, all ranks together")
    _line("peak memory", _per_rank([o.peak_nbytes for o in outcomes]) + " (resident)")
    _line(
        "bytes sent", f"{_per_rank(sent)}; {_mebibytes(sum(sent) / settings.steps)} per step in all"
    )
    print(f"\nWhat it makes of 'def ' after {settings.steps} steps:\n")
    for line in first.sample.decode(errors="replace").splitlines():
        print(f"    {''.join(c if c.isprintable() else '·' for c in line)}".rstrip())
    print()
    if recorder is None:
        _line("timeline", "none was recorded; for one, install trine-tools")
    else:
        report = recorder.finish(settings.timeline_folder)
        print()
        for what, path in report.files.items():
            _line(what, str(path))
        if report.dropped:
            _line("dropped", f"{report.dropped} events did not fit into the recording")
    _line("checkpoint", str(settings.checkpoint_folder))
    return agrees


def _line(title: str, text: str) -> None:
    print(f"{title:<14}{text}")


def _per_rank(nbytes: list[int]) -> str:
    if len(nbytes) > 8:
        return f"{_mebibytes(min(nbytes))} to {_mebibytes(max(nbytes))} per rank"
    return ", ".join(f"rank {rank}: {_mebibytes(count)}" for rank, count in enumerate(nbytes))


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
