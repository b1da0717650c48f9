"""Choose what to record of a run, and have every rank record it."""

from trine.tools.recording.profiler import Profile, profile
from trine.tools.recording.window import Window

__all__ = ["Profile", "Window", "profile"]
