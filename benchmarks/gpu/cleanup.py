"""Nothing that a part started outlives it, also when vLLM hangs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.results import Results
from benchmarks.servers import descendants

__all__ = ["adopt_orphans", "end_children", "end_processes", "scratch", "watchdog"]

_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
#: Folders to remove, also when the part is ended from outside.
_folders: set[Path] = set()


@contextlib.contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """Make a folder for the block."""
    folder = Path(tempfile.mkdtemp(prefix="ws-gpu-", dir=place))
    _folders.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)


def adopt_orphans() -> None:
    """Make orphans of our children our children, so that `end_children` finds them."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """End all processes below this one: TERM, then KILL."""
    for signum, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        deadline = time.monotonic() + grace_s
        for pid in _below():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        while _below() and time.monotonic() < deadline:
            _reap()
            time.sleep(0.05)


def end_processes(pid: int) -> None:
    """End a process and all below it at once."""
    for each in descendants(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _below() -> list[int]:
    return descendants(os.getpid())[1:]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@contextlib.contextmanager
def watchdog(results: Results, seconds: float, *, as_json: bool) -> Iterator[None]:
    """Print what there is and end everything when the block takes longer than `seconds`."""
    over = threading.Event()

    def watch() -> None:
        if over.wait(seconds):
            return
        results.errors.append(f"the part took longer than {seconds:g} s and was ended")
        results.emit(as_json=as_json)
        end_children()
        for folder in list(_folders):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()
