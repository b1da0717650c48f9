"""Say whether training can start on this machine, and if not, what to do about it.

`python -m trine.core.doctor` examines what a training run stands on: Python and torch, our
packages, the devices, the backends (by real collectives between real processes), the
launcher's variables, cores and memory. Whatever could hang or crash runs in a process of
its own with a time limit; nothing is left behind.
"""

from trine.core.doctor.checks import Check, Diagnosis, Status
from trine.core.doctor.examination import examine, main

__all__ = ["Check", "Diagnosis", "Status", "examine", "main"]
