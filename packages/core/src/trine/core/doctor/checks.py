"""What one look at the machine found, and what all of them say together."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

__all__ = ["Check", "Diagnosis", "Status"]

Status = Literal["ok", "absent", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at, such as `"gloo"`.
        status: `"ok"`; `"absent"` for something that is not here and need not be;
            `"warning"` for what will hurt; `"error"` for what keeps training from starting.
        summary: the finding in one line.
        mend: what to do about it; given for every warning and error.
        details: the facts behind it, ready for JSON.
    """

    name: str
    status: Status
    summary: str
    mend: str = ""
    details: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status in ("warning", "error") and not self.mend:
            raise ValueError(f"{self.name}: a finding of status {self.status!r} needs a mend.")

    def to_text(self) -> str:
        """The lines shown to a reader."""
        text = _wrapped(f"{self.name:<9} {self.status:<8} ", self.summary)
        return f"{text}\n{_wrapped(' ' * 19 + '-> ', self.mend)}" if self.mend else text


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def can_start(self) -> bool:
        """Whether nothing was found that keeps training from starting."""
        return not self._names("error")

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        errors, warnings = self._names("error"), self._names("warning")
        if errors:
            return f"Training cannot start: see {', '.join(errors)}."
        if warnings:
            return f"Training can start, with warnings: see {', '.join(warnings)}."
        return "Training can start."

    def to_dict(self) -> dict[str, object]:
        """The same, ready for JSON."""
        return {
            "can_start": self.can_start,
            "verdict": self.verdict,
            "checks": [asdict(check) for check in self.checks],
        }

    def _names(self, status: Status) -> list[str]:
        return list(dict.fromkeys(check.name for check in self.checks if check.status == status))


def _wrapped(lead: str, text: str) -> str:
    # Paths and host names are for copying: they are not broken.
    return textwrap.fill(
        text,
        width=100,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )
