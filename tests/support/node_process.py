"""The weightsync-server of a node that is not its engine's first, as a real process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.processes import stop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["NodeProcess"]

_START_S = 30.0


@dataclass
class NodeProcess:
    """`weightsync-server --node-of`.

    Attributes:
        head: gRPC address of the head, such as `unix:PATH`.
        run_dir: For its segment socket and its log; a short path.
        variables: More environment variables.
        rank: Which node it is.
        flags: More flags.
    """

    head: str
    run_dir: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    rank: int = 1
    flags: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def segment_socket(self) -> Path:
        """Where the ranks of this node find their segments."""
        return self.run_dir / "segments.sock"

    @property
    def log(self) -> str:
        """What it has printed."""
        return (self.run_dir / "node.log").read_text()

    def start(self) -> NodeProcess:
        """Return when it listens; it may not have joined yet."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.segment_socket.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "weightsync_server.cli", "--node-of", f"grpc://{self.head}",
            "--node-rank", str(self.rank), "--run-dir", str(self.run_dir),
            *self.flags,
        ]  # fmt: skip
        with (self.run_dir / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.variables}
            )
        deadline = time.monotonic() + _START_S
        while not self.segment_socket.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the node's server did not start:\n{self.log}")
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait(self) -> int:
        """Return the exit code of one that ends by itself, as at a failpoint that kills it."""
        assert self.process is not None
        return self.process.wait(20)

    def stop(self) -> int:
        """Ask it to end; returns its exit code."""
        assert self.process is not None
        return stop(self.process)
