"""`python -m trine.core.doctor`."""

import signal
import sys

from trine.core.doctor.examination import main


def _leave(signum: int, frame: object) -> None:
    """Turn a request to end into an exception, so that no process of ours outlives us."""
    sys.exit(128 + signum)


signal.signal(signal.SIGINT, _leave)
signal.signal(signal.SIGTERM, _leave)
sys.exit(main())
