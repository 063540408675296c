"""Ranks of a trainer as processes, of which PyTorch is imported once: they are copies of one.

Run as a program it is that one: MODULE FUNCTION COUNT ARGUMENT...
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_ranks"]


def run_ranks(function: Callable[..., None], count: int, *arguments: str) -> None:
    """Return when every rank has ended; what one of them raised is in the failure.

    Args:
        function: Of a module without other processes and threads. Takes a rank's number first.
        count: How many ranks.
        arguments: What it takes then.
    """
    command = [sys.executable, "-m", __name__, function.__module__, function.__name__]
    done = subprocess.run(
        [*command, str(count), *arguments],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _main(module: str, name: str, count: str, *arguments: str) -> None:
    from torch.multiprocessing.spawn import start_processes

    function = getattr(importlib.import_module(module), name)
    start_processes(function, arguments, nprocs=int(count), start_method="fork")  # type: ignore[no-untyped-call] # torch's


if __name__ == "__main__":
    _main(*sys.argv[1:])
