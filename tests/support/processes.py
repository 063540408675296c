"""What the kernel says of a process, and what it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "descriptors",
    "end",
    "give_way",
    "names",
    "open_files",
    "python_says",
    "state",
    "stop",
]

#: As of nice(1): a third of the weight that others have.
_LITTLE = 5


def descriptors(pid: int | str = "self") -> int:
    """Return the number of open descriptors, one of which belongs to the question."""
    return len(_list(f"/proc/{pid}/fd"))


def open_files() -> frozenset[tuple[str, str]]:
    """Return what each descriptor of this process leads to.

    Unlike their count this is no smaller where something else is closed meanwhile.
    """
    found = set()
    for number in _list("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, str(Path(f"/proc/self/fd/{number}").readlink())))
    return frozenset(found)


def names(directory: Path) -> list[str]:
    """Return the sorted names in a directory."""
    return sorted(_list(directory))


def state(pid: int) -> str:
    """Return the state of a process as in proc(5), such as `T`; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stop(process: subprocess.Popen[Any], seconds: float = 50.0) -> int:
    """Ask a process to end and return its exit code.

    Whatever comes of that, neither it nor its process group is left to the tests that follow.

    Args:
        process: What was started, perhaps in a session of its own.
        seconds: How long it may take; a server takes 40 at most (`stop_timeout_s`).

    Raises:
        subprocess.TimeoutExpired: It did not end in time.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(seconds)
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process at once, and its process group, also what it has left of that."""
    # Of one that leads no group there is none.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def give_way(pid: int) -> None:
    """Let a session of processes have only what others leave of the processor.

    Workers of vLLM spin on sched_yield(2) between two steps. Where as many of them run as there are
    cores, others get so little that 0.1 s of work take up to ten seconds.

    Args:
        pid: A process that leads a session; the kernel weighs sessions as a whole (sched(7)).
    """
    with contextlib.suppress(FileNotFoundError):
        Path(f"/proc/{pid}/autogroup").write_text(str(_LITTLE))


def _list(path: Path | str) -> list[str]:
    return os.listdir(path)  # noqa: PTH208 - names are what is wanted


def python_says(program: str) -> str:
    """Return what a program prints in a Python of its own; fail when it fails."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()
