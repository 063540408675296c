"""A real server beside engines that are processes of their own, in a folder where they come and go.

What each generates with is asked all the while, so that a mixture over engines is seen.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import torch

from tests.soak.contents import KINDS, MemoryContents
from tests.soak.site import MemoryEngineProcess
from tests.support.following import until
from tests.support.processes import state
from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client, EngineState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync_client.types import EngineStatus

__all__ = ["EngineHost", "engine_host"]

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
_CONTENTS = 8
_PACE_S = 0.002
_SETTLE_S = 60.0


class EngineHost:
    """A server, its engines by name, and who looks at what they generate with.

    Args:
        folder: Of sockets and state; a short path.
        flags: More flags.
        named: Engines that the server is given by name; none: it watches their folder.

    Attributes:
        mixtures: What engines generated with at one time, where that was not one content.
    """

    def __init__(self, folder: Path, flags: tuple[str, ...], named: tuple[str, ...]) -> None:
        self.folder = folder / "engines"
        self.folder.mkdir()
        sockets = [f"--engine=unix:{self.folder}/{name}.sock" for name in named]
        given = sockets or ["--engine=none", f"--engines={self.folder}"]
        self.failpoints = folder / "failpoints"
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=[*given, "--fetchers=2", "--slots=3", *flags],
            variables={"WEIGHTSYNC_FAILPOINTS": f"@{self.failpoints}"},
        )
        self.contents = MemoryContents()
        self.engines: dict[str, MemoryEngineProcess] = {}
        self.mixtures: list[dict[str, str]] = []
        self._over = threading.Event()
        self._looker = threading.Thread(target=self._look, name="mixtures")

    @property
    def client(self) -> Client:
        """A client of its own."""
        return Client(self.server.address)

    def appear(self, *names: str, content: int = 0) -> None:
        """Start engines whose checkpoint has a content."""

        def start(name: str) -> None:
            engine = MemoryEngineProcess(self.server.run_dir, self.folder / f"{name}.sock", content)
            engine.start()
            self.engines[name] = engine

        with ThreadPoolExecutor(len(names)) as starting:
            list(starting.map(start, names))

    def disappear(self, name: str) -> None:
        """Kill an engine, and remove its socket."""
        self.engines.pop(name).stop()
        (self.folder / f"{name}.sock").unlink()

    def push(self, content: int, **options: Any) -> int:
        """Push a content, and return its version."""
        tensors = {
            name: torch.frombuffer(bytearray(data), dtype=_DTYPES[KINDS[name][0]]).reshape(
                KINDS[name][1]
            )
            for name, data in self.contents.tensors(content).items()
        }
        with self.client as client:
            return client.push(tensors, **options).version

    def serves(self) -> dict[str, int | None]:
        """Return the content that each engine generates with; None: it stands still."""
        return {name: self._number(self._told(name)) for name in list(self.engines)}

    def leases_end(self) -> None:
        """Return when no engine is paused under a lease any more: each has run out or was ended."""

        def so() -> bool:
            told = [engine.told() for engine in self.engines.values()]
            return all(one is not None and not one["leased"] for one in told)

        until(so, "the leases of pauses end", _SETTLE_S)

    def all_serve(self, content: int) -> None:
        """Return when every engine generates with a content, and the server says so."""
        self.settle({content})

    def settle(self, contents: set[int]) -> None:
        """Return when every engine generates with the same one of contents, as the server says."""

        def so() -> bool:
            served = set(self.serves().values())
            if len(served) != 1 or not served <= contents:
                return False
            status = self.status().values()
            serving = all(one.state is EngineState.SERVING for one in status)
            return serving and len({one.live_version for one in status}) == 1

        try:
            until(so, f"all serve one of {contents}", _SETTLE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.serves()}\n{self.server.log[-4000:]}") from error

    def status(self) -> dict[str, EngineStatus]:
        """Return what the server says of each engine."""
        with self.client as client:
            (model,) = client.status().models
        return {one.name: one for one in model.engines}

    def apply_once(self, request: pb.ApplyVersionRequest) -> threading.Thread:
        """Apply in a thread, whatever comes of it; not as the client, which repeats a lost call."""
        stub = self.server.stub

        def call() -> None:
            # ValueError: the channel is closed, with the server.
            with contextlib.suppress(grpc.RpcError, ValueError):
                stub.ApplyVersion(request, timeout=60)

        thread = threading.Thread(target=call, name="apply")
        thread.start()
        return thread

    @property
    def died(self) -> bool:
        """Whether the server has ended."""
        process = self.server.process
        return process is not None and process.poll() is not None

    @contextlib.contextmanager
    def stopped_at(self, point: str) -> Iterator[None]:
        """Let the server go on, at a failpoint whose plan is `stop`, when the block ends."""
        process = self.server.process
        assert process is not None
        until(lambda: self.hit(point), f"the apply comes to {point}")
        until(lambda: state(process.pid) == "T", "the server stands still there")
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Start the server again, without failpoints."""
        self.server.kill()
        self.failpoints.unlink(missing_ok=True)
        self.server.start()

    def plan(self, text: str) -> None:
        """Have the server do something at failpoints; what it did is in `hit`."""
        self.failpoints.write_text(text)

    def hit(self, name: str) -> bool:
        """Tell whether the server has done so at a failpoint."""
        hits = Path(f"{self.failpoints}.hits")
        return hits.exists() and any(
            line.startswith(f"{name} ") for line in hits.read_text().splitlines()
        )

    def start(self) -> None:
        """Start the server, and begin to look."""
        for number in range(_CONTENTS):
            self.contents.digest(number)
        self._looker.start()
        self.server.start()

    def stop(self) -> None:
        """End all of it."""
        self._over.set()
        self._looker.join()
        self.server.kill()
        for engine in self.engines.values():
            engine.stop()

    def _told(self, name: str) -> str:
        engine = self.engines.get(name)
        told = engine.told() if engine is not None else None
        return str(told["content"]) if told is not None and told["generating"] else ""

    def _number(self, content: str) -> int | None:
        return self.contents.known[content] if content else None

    def _look(self) -> None:
        while not self._over.wait(_PACE_S):
            # A second look at each: who says the same twice did so at the end of the first.
            looks = [{name: self._told(name) for name in list(self.engines)} for _ in range(2)]
            steady = {n: c for n, c in looks[0].items() if c and looks[1].get(n) == c}
            if len(set(steady.values())) > 1 or any("," in content for content in steady.values()):
                self.mixtures.append(steady)


@contextlib.contextmanager
def engine_host(*flags: str, named: tuple[str, ...] = ()) -> Iterator[EngineHost]:
    """Run a server without engines until the block ends.

    Args:
        flags: More flags.
        named: As in `EngineHost`.
    """
    folder = Path(tempfile.mkdtemp(prefix="wse"))
    host = EngineHost(folder, flags, named)
    try:
        host.start()
        yield host
    finally:
        host.stop()
        shutil.rmtree(folder, ignore_errors=True)
