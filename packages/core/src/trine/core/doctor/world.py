"""The variables by which a launcher tells a process its place, and whether they make sense."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator, Mapping

from trine.core.doctor.checks import Check

__all__ = ["check_world", "mpi_launcher"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHOWN = (*_NEEDED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
_MPI_SIZES = {"OMPI_COMM_WORLD_SIZE": "Open MPI", "PMI_SIZE": "MPICH"}
_LOOKUP_S = 5.0


def mpi_launcher(environ: Mapping[str, str]) -> str | None:
    """The MPI whose launcher started this process, or None."""
    return next((name for size, name in _MPI_SIZES.items() if environ.get(size)), None)


def check_world(environ: Mapping[str, str], gpus: int) -> Iterator[Check]:
    """Read the variables as a rank would, and report whatever would stop it.

    Args:
        environ: the environment.
        gpus: how many CUDA devices this process sees.
    """
    given = {name: environ[name] for name in _SHOWN if environ.get(name)}
    faults = list(_faults(given, environ, gpus))
    for summary, mend in faults:
        yield Check("world", "error", summary, mend, given)
    if not faults:
        yield Check("world", "ok", _place(given, environ), details=given)


def _place(given: Mapping[str, str], environ: Mapping[str, str]) -> str:
    if "RANK" in given:
        by = "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "its environment"
        meeting = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
        return f"rank {given['RANK']} of {given['WORLD_SIZE']} by {by}, meeting at {meeting}"
    mpi = mpi_launcher(environ)
    if mpi is not None:
        return f"launched by {mpi}; the variables of torchrun are not set, and need not be for mpi"
    return "not launched by torchrun or mpiexec: a program started like this is the only rank"


def _faults(
    given: Mapping[str, str], environ: Mapping[str, str], gpus: int
) -> Iterator[tuple[str, str]]:
    yield from _unknown_interfaces(given.get("GLOO_SOCKET_IFNAME", ""))
    present = [name for name in _NEEDED if name in given]
    missing = [name for name in _NEEDED if name not in given]
    if present and missing:
        yield (
            f"{', '.join(present)} set, but not {', '.join(missing)}",
            "Start the program with torchrun, which sets all four, or unset them all.",
        )
    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in given and not given[name].isdecimal():
            yield (f"{name}={given[name]} is not a whole number from 0", f"Correct {name}.")
        elif name in given:
            numbers[name] = int(given[name])
    for place, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if place in numbers and size in numbers and numbers[place] >= numbers[size]:
            yield (
                f"{place}={numbers[place]}, but {size}={numbers[size]}",
                f"Ranks count from 0 to {size} - 1: correct one of the two.",
            )
    if gpus and numbers.get("LOCAL_RANK", 0) >= gpus:
        yield (
            f"LOCAL_RANK={numbers['LOCAL_RANK']}, but this process sees {gpus} GPUs",
            f"Start at most {gpus} ranks on this machine, or widen CUDA_VISIBLE_DEVICES.",
        )
    port = numbers.get("MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        yield (f"MASTER_PORT={port} is not a port", "Set it to a number from 1 to 65535.")
        port = None
    if "MASTER_ADDR" in given and not _resolves(given["MASTER_ADDR"]):
        yield (
            f"MASTER_ADDR={given['MASTER_ADDR']} does not resolve within {_LOOKUP_S:g} s",
            "Set it to the address of the machine of rank 0; 127.0.0.1 if all ranks run here.",
        )
    # Under torchrun the agent holds the port.
    if port is not None and numbers.get("RANK") == 0 and not environ.get("TORCHELASTIC_RUN_ID"):
        yield from _port_taken(port)


def _unknown_interfaces(names: str) -> Iterator[tuple[str, str]]:
    have = {name for _, name in socket.if_nameindex()}
    for name in filter(None, names.split(",")):
        if name not in have:
            yield (
                f"GLOO_SOCKET_IFNAME names {name}, which this machine does not have",
                f"Set it to one of {', '.join(sorted(have))}, or unset it.",
            )


def _port_taken(port: int) -> Iterator[tuple[str, str]]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken by another program" if taken else f"cannot be opened: {error.strerror}"
            yield (
                f"MASTER_PORT={port} {why}, and rank 0 has to listen there",
                "Set MASTER_PORT to a free port above 1023, or use torchrun --standalone.",
            )


def _resolves(host: str) -> bool:
    """Whether the name has an address; a name server that does not answer means no."""
    found: list[object] = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(host, None))
        except (OSError, UnicodeError):
            return

    # No call of the system ends a lookup; a daemon thread may be left waiting instead.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_LOOKUP_S)
    return bool(found)
