"""Starts the parts as real processes and leaves none of them behind, whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

__all__ = [
    "Processes",
    "ProcessesError",
    "exit_on_signals",
    "free_port",
    "give_way",
    "short_folder",
    "vllm_command",
]

_TERM_S = 15.0
#: As of nice(1): a tenth of the weight that others have.
_LITTLE = "10"
#: Of a folder for temporary ones. A unix socket's path has at most 107 bytes.
_FOLDER_MAX = 60


class ProcessesError(RuntimeError):
    """A process could not start or ended early; the message holds the end of its log."""


class Processes:
    """Processes of one run. Leaving the context stops every one of them, and all they started.

    Each gets a session of its own, so that Ctrl-C reaches this process alone, which then stops the
    others in order: last started, first stopped.

    Args:
        directory: Where each process writes NAME.log.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        piped: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process; with `piped` its standard output can be read, else all goes to its log.

        Args:
            name: Of the process and its log; of one that has ended it may be used again.
            command: What to run.
            variables: Environment variables besides those of this process.
            piped: Whether standard output is a pipe.
        """
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env={**os.environ, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                start_new_session=True,
            )
        return self._running[name]

    def kill(self, name: str) -> None:
        """End a process and all that it started at once, as a crash does, and forget it."""
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def check(self) -> None:
        """Return if every process runs or has ended well.

        Raises:
            ProcessesError: One has failed.
        """
        for name, process in self._running.items():
            if process.poll():
                end = self._last_words(name, 3000)
                msg = f"{name} ended with status {process.returncode}; its last words:\n{end}"
                raise ProcessesError(msg)

    def wait(self, ready: Callable[[], bool], what: str, deadline: float) -> None:
        """Return when `ready` does; asked five times a second.

        Raises:
            ProcessesError: A process failed, or the deadline (monotonic) passed.
        """
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                ends = "\n".join(f"{name}: {self._last_words(name, 500)}" for name in self._running)
                msg = f"{what} was not ready in time; the ends of the logs:\n{ends}"
                raise ProcessesError(msg)
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop everything, last started first. A second Ctrl-C does not interrupt this."""
        with _undisturbed():
            for process in reversed(self._running.values()):
                _stop(process)
            self._running.clear()

    def _last_words(self, name: str, most: int) -> str:
        return self._log(name).read_text(errors="replace")[-most:]

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"


def give_way(process: subprocess.Popen[bytes]) -> None:
    """Let a process, and all that it starts, have only what others leave of the processor.

    Args:
        process: It leads a session, which Linux weighs as a whole (sched(7), autogroup).
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(_LITTLE)


def _stop(process: subprocess.Popen[bytes]) -> None:
    # The group outlives its leader as long as a member lives, so it is killed at last in any case.
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does: through every clean-up."""

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def short_folder() -> str | None:
    """Return where temporary folders may lie; None: where they always do."""
    return None if len(tempfile.gettempdir()) <= _FOLDER_MAX else "/tmp"  # noqa: S108 - for tempfile


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def vllm_command(model: Path, port: int, *flags: str) -> list[str]:
    """Return the command line of a stock vLLM API server that serves `model` as "demo"."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "demo", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"),
        *("--disable-uvicorn-access-log", *flags),
    ]
