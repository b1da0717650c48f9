"""The base class of the errors that Trine raises for its users.

Mistakes in an argument stay `ValueError` and `TypeError`; the classes here are
for what goes wrong while a correct program runs.
"""

from __future__ import annotations

__all__ = ["TrineError"]


class TrineError(RuntimeError):
    """Something went wrong that the message explains; no traceback is needed to act on it."""
