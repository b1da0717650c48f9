"""What mpiexec starts and watches in the place of a rank of `run_on_ranks`.

A script, not a module: it runs without site-packages, so that it is there in 20 ms. It hands
over what makes a process a rank, its environment and the descriptor that Hydra speaks
through, and stays for as long as the rank does.
"""

from __future__ import annotations

import os
import socket
import sys

__all__: list[str] = []


def main() -> None:
    """Stand in for one rank."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(sys.argv[1])
        environ = b"\0".join(name + b"=" + value for name, value in os.environb.items())
        # Not closed here: Hydra ends the job when a descriptor closes that says no goodbye.
        descriptors = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []
        socket.send_fds(caller, [len(environ).to_bytes(8, "little")], descriptors)
        caller.sendall(environ)
        caller.recv(1)  # nothing ever comes but the end of the rank


if __name__ == "__main__":
    main()
