"""What Python imports at its start under `trine trace run`, before the program.

It imports nothing of ours until the program has imported torch, so that a process which
never does costs nothing. A `sitecustomize` that was there before is run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def _start() -> None:
    try:
        from trine.tools.recording import injected

        injected.start()
    except Exception as error:  # the program goes on, whatever is wrong with us
        print(f"trine: this process is not recorded: {error}", file=sys.stderr)


class _AfterTorch:
    """Finds torch as others do, and has something done once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_start(module: ModuleType) -> None:
                execute(module)
                _start()

            spec.loader.exec_module = execute_and_start  # type: ignore[method-assign]
        return spec


def _run_the_one_before() -> None:
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "TRINE_TRACE_OUT" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_run_the_one_before()
