"""The errors that trine-tools raises for its users."""

from __future__ import annotations

from trine.core.errors import TrineError

__all__ = ["NotComparableError", "TraceFileError"]


class TraceFileError(TrineError):
    """A trace file cannot be read or written; the message says which one and why."""


class NotComparableError(TrineError):
    """Two runs cannot be compared; the message says why and what to do."""
