"""The processes of the soak: a server, its engine, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from tests.support.completion import Completion
from tests.support.leftovers import Mark
from tests.support.processes import state
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync import failpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Engine", "MemoryEngineProcess", "Site", "VllmEngineProcess"]

#: However busy the machine is.
_START_S = 120.0
_PROMPT = "the quick brown fox"


class Engine(Protocol):
    """An engine process that can be killed and started."""

    def start(self) -> None:
        """Return when it listens."""

    def stop(self) -> None:
        """End it and all its children."""

    def alive(self) -> bool:
        """Whether all its processes live."""

    def pids(self) -> list[int]:
        """Return all its processes."""

    def victims(self) -> list[int]:
        """Return the processes of which one may be killed."""

    def told(self) -> dict[str, Any] | None:
        """Return what it generates with; None: nothing can be said now."""


class MemoryEngineProcess:
    """`tests.soak.engine` in a process.

    Args:
        run_dir: Where the server's sockets are.
        socket: Its own; None: engine.sock there.
        content: Of its checkpoint.
    """

    def __init__(self, run_dir: Path, socket: Path | None = None, content: int = 0) -> None:
        self._run_dir = run_dir
        self._socket = socket or run_dir / "engine.sock"
        self._content = content
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it listens."""
        command = [sys.executable, "-m", "tests.soak.engine", str(self._run_dir)]
        command += [str(self._socket), str(self._content)]
        path = self._socket.with_suffix(".log")
        with path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while self.told() is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = path.read_text()[-2000:]
                raise RuntimeError(f"the engine did not start:\n{text}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Return its id."""
        return [self._process.pid] if self._process is not None else []

    def victims(self) -> list[int]:
        """Return its id."""
        return self.pids()

    def told(self) -> dict[str, Any] | None:
        """Ask it what it generates with."""
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5)
            probe.connect(str(self._socket.with_suffix(".probe")))
            data = b""
            while part := probe.recv(4096):
                data += part
            found: dict[str, Any] = json.loads(data)
            return found
        return None


class VllmEngineProcess:
    """A real vLLM with two workers.

    Args:
        server: Not started yet.
    """

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        #: How it answers, by content.
        self._answers: dict[str, Completion] = {}
        self._one = threading.Lock()

    def start(self) -> None:
        """Return when its HTTP server answers."""
        self._server.start()

    def stop(self) -> None:
        """End its process group."""
        self._server.stop()

    def alive(self) -> bool:
        """Whether its API server runs and has not lost its engine."""
        process = self._server.process
        return process is not None and process.poll() is None and self._server.healthy()

    def pids(self) -> list[int]:
        """Return its API server and all below it."""
        with contextlib.suppress(psutil.Error):
            if self._server.process is not None:
                top = psutil.Process(self._server.process.pid)
                return [top.pid, *(child.pid for child in top.children(recursive=True))]
        return []

    def victims(self) -> list[int]:
        """Return its workers, or what else it has."""
        processes = {pid: _title(pid) for pid in self.pids()}
        workers = [pid for pid, title in processes.items() if "Worker" in title]
        return workers or [pid for pid, title in processes.items() if "EngineCore" in title]

    def told(self) -> dict[str, Any] | None:
        """Ask for one token: whose content gives such an answer?"""
        answer = self._answer() if self._answers else None
        if answer is None:
            return None
        names = [content for content, known in self._answers.items() if known == answer]
        return {"generating": True, "content": names[0] if names else f"no version: {answer}"}

    def learn(self, content: str) -> None:
        """Remember how it answers with a content that it is proved to hold.

        Raises:
            RuntimeError: It answers as with another content, or not at all.
        """
        # The first answer of an engine takes what it compiles and allocates for it.
        answer = self._answer(timeout_s=60)
        if answer is None or answer in self._answers.values():
            raise RuntimeError(f"vLLM answers {answer}: contents cannot be told apart")
        self._answers[content] = answer

    def _answer(self, timeout_s: float = 10) -> Completion | None:
        # One token: a longer request may rightly begin under one version and end under another.
        body = {"model": "model", "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
        with self._one, contextlib.suppress(OSError):
            status, answer = self._server.request(
                "/v1/completions", {**body, "logprobs": 3}, timeout_s
            )
            return Completion.read(answer) if status == 200 else None
        return None


def _title(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return " ".join([process.name(), *process.cmdline()])
    return ""


class Site:
    """A server with its engine.

    Attributes:
        server: The server.
        engine: The engine.
        plan: The failpoints' plan file, which all processes read.
        starts: How often the server was started.
    """

    def __init__(self, folder: Path, engine: Engine, flags: tuple[str, ...]) -> None:
        self.plan = folder / "plan"
        self.engine = engine
        self.state = folder / "state"
        self.server = WeightSyncServer(folder / "run", self.state, flags=flags, start_s=_START_S)
        #: Where an ingest process listens.
        self.ingest_address = f"{self.server.address}.1"
        self.starts = 0
        self.mark = Mark()
        os.environ.update(self.mark.variables)
        # Inherited by every process that is started from now on, and by their children.
        os.environ[failpoints.VARIABLE] = f"@{self.plan}"

    @property
    def pid(self) -> int:
        """The server's process id; 0: it does not run."""
        process = self.server.process
        return process.pid if process is not None and process.poll() is None else 0

    def wake(self) -> None:
        """Continue whatever was stopped."""
        for pid in [self.pid, *self.fetchers(), *self.ingesters(), *self.engine.pids()]:
            if pid and state(pid) == "T":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def revive_engine(self) -> bool:
        """Start the engine again if any of its processes is dead, as a supervisor does.

        Returns:
            Whether it was.
        """
        self.wake()
        if self.engine.alive():
            return False
        self.engine.stop()
        self.engine.start()
        return True

    def start_server(self) -> None:
        """Return when it answers.

        Raises:
            RuntimeError: It does not.
        """
        self.starts += 1
        self.server.start()

    def kill_server(self) -> None:
        """End it as a crash does, children included: fetchers end with their parent."""
        self.server.kill()

    def fetchers(self) -> list[int]:
        """Return the fetchers' process ids."""
        return self._children("fetch")

    def ingesters(self) -> list[int]:
        """Return the process ids of those that receive."""
        return self._children("ingest")

    def _children(self, kind: str) -> list[int]:
        with contextlib.suppress(psutil.Error):
            if self.pid:
                children = psutil.Process(self.pid).children()
                return [child.pid for child in children if kind in _title(child.pid)]
        return []

    def hits(self) -> list[tuple[str, str, int]]:
        """Return name, action and process of every failpoint that was met."""
        path = Path(f"{self.plan}.hits")
        if not path.exists():
            return []
        lines = (line.split() for line in path.read_text().splitlines())
        return [(name, action, int(pid)) for name, action, pid in lines]

    def segments(self) -> dict[int, int]:
        """Return size by inode of each segment that the server holds open."""
        found = {}
        for fd in _descriptors(self.pid):
            with contextlib.suppress(OSError):
                if "memfd:weightsync" in str(fd.readlink()):
                    status = fd.stat()
                    found[status.st_ino] = status.st_size
        return found

    def descriptors(self) -> int:
        """Return how many descriptors the server holds, those of shared memory aside."""
        found = 0
        for fd in _descriptors(self.pid):
            with contextlib.suppress(OSError):
                found += "memfd:weightsync" not in str(fd.readlink())
        return found

    def leftovers(self) -> list[str]:
        """Return the files that belong to no version; some stay until the next start."""
        names = (".tmp", ".new", ".kept", "push.json")
        paths = (self.state / "store").rglob("*")
        return [str(path) for path in paths if path.name.endswith(names)]

    def folders(self, model: str) -> set[int]:
        """Return the versions that have a folder in the store."""
        return {int(path.name[1:]) for path in (self.state / "store" / model).glob("v*")}

    def stop(self) -> list[str]:
        """End everything; returns what is still alive afterwards."""
        for pid in [*self.fetchers(), *self.ingesters(), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGCONT)
        self.server.stop()
        self.engine.stop()
        return self.mark.left_after(10)


def _descriptors(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from Path(f"/proc/{pid}/fd").iterdir()
