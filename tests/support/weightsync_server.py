"""Starts real weightsync-server processes and stops them by process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tests.support.processes import stop
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["INGEST", "WeightSyncServer", "short_server"]

#: Environment variable: how many ingest processes every server has that does not say.
INGEST = "WEIGHTSYNC_TEST_INGEST"


@dataclass
class WeightSyncServer:
    """A weightsync-server on unix sockets in its run directory.

    Attributes:
        run_dir: Sockets and log; a short path, because unix sockets allow 107 bytes.
        state_dir: State and store.
        store: Where versions are kept; empty: in the state directory.
        flags: More flags.
        variables: More environment variables.
        wrapper: Command line that runs the server's, such as one that prepares a namespace.
        start_s: Longest time until it answers, in seconds.
        ingest: Ingest processes. With any, stubs send their PushWeights streams to the first one.
    """

    run_dir: Path
    state_dir: Path
    store: str = ""
    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    start_s: float = 60.0
    ingest: int = field(default_factory=lambda: int(os.environ.get(INGEST, "0")))
    process: subprocess.Popen[bytes] | None = None
    _channels: list[grpc.Channel] = field(default_factory=list)

    @property
    def address(self) -> str:
        """gRPC address."""
        return f"unix:{self.run_dir / 'server.sock'}"

    @property
    def segment_socket(self) -> Path:
        """Where segments are handed over."""
        return self.run_dir / "segments.sock"

    @property
    def log(self) -> str:
        """What the server has printed."""
        return (self.run_dir / "server.log").read_text()

    @property
    def command(self) -> list[str]:
        """The command line."""
        flags = {
            "--engine": f"unix:{self.run_dir / 'engine.sock'}",
            "--listen": f'["{self.address}"]',
            "--run-dir": str(self.run_dir),
            "--state-dir": str(self.state_dir),
            "--store": self.store,
            "--metrics": "127.0.0.1:0",
            "--ingest": str(self.ingest),
        }
        given = {flag.partition("=")[0] for flag in self.flags}
        pairs = [part for key, value in flags.items() if key not in given for part in (key, value)]
        # Most tests are about streams; those about the hand-off ask for it.
        streams = [] if "--same-host" in self.flags else ["--no-same-host"]
        server = [sys.executable, "-m", "weightsync_server.cli", *pairs, *streams, *self.flags]
        return [*self.wrapper, *server]

    def start(self) -> WeightSyncServer:
        """Return when the server answers."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        before = self._bound_at()
        with (self.run_dir / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.variables},
            )
        deadline = time.monotonic() + self.start_s
        while True:
            # A channel takes more of a busy processor than a look, and goes on trying.
            if self._bound_at() != before:
                with contextlib.suppress(grpc.RpcError):
                    self.stub.GetStatus(pb.GetStatusRequest(), timeout=1)
                    return self
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the server did not start:\n{self.log}")
            time.sleep(0.05)

    def _bound_at(self) -> int:
        """Return when the address was bound, ns; 0: it is not, or was given up."""
        try:
            return Path(self.address.removeprefix("unix:")).stat().st_ctime_ns
        except FileNotFoundError:
            return 0

    @property
    def stub(self) -> weightsync_pb2_grpc.WeightSyncStub:
        """A stub on a channel of its own."""
        stub = self._stub_to(self.address)
        if self.ingest:
            stub.PushWeights = self._stub_to(f"{self.address}.1").PushWeights
        return stub

    def _stub_to(self, address: str) -> weightsync_pb2_grpc.WeightSyncStub:
        channel = grpc.insecure_channel(address)
        self._channels.append(channel)
        return weightsync_pb2_grpc.WeightSyncStub(channel)

    def wait_serving(self, timeout_s: float = 60.0) -> pb.ModelStatus:
        """Return the model's status once the engine serves one verified version."""
        stub = self.stub
        deadline = time.monotonic() + timeout_s
        while True:
            (model,) = stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
            if model.engine.state == pb.ENGINE_STATE_SERVING:
                return model
            if time.monotonic() > deadline:
                raise TimeoutError(f"{model.engine}\n{self.log}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.close_channels()

    def stop(self, timeout_s: float = 50.0) -> int:
        """Ask the process to end; returns its exit code. Nothing of it is left, also if it hangs.

        Raises:
            subprocess.TimeoutExpired: It did not end in time.
        """
        self.close_channels()
        return 0 if self.process is None else stop(self.process, timeout_s)

    def close_channels(self) -> None:
        """Close the channels of all stubs."""
        for channel in self._channels:
            channel.close()
        self._channels.clear()


@contextlib.contextmanager
def short_server(**options: Any) -> Iterator[WeightSyncServer]:
    """Run a server in a folder of its own, whose path is as short as unix sockets need it.

    Args:
        options: Attributes of `WeightSyncServer`.
    """
    folder = Path(tempfile.mkdtemp(prefix="ws"))
    try:
        server = WeightSyncServer(folder / "run", folder / "state", **options)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
