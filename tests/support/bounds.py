"""A server of its own for each test of bounds, and pushes made of plain messages."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.weightsync_server import WeightSyncServer
from tests.unit.server.world import Shard, make_shard
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from weightsync.v1 import weightsync_pb2_grpc

__all__ = [
    "FIRST",
    "MODEL",
    "Message",
    "begin",
    "model_status",
    "one_shard",
    "push_messages",
    "serving",
    "within",
]

MODEL = "default"
#: The version of the first push: 1 is kept for the engine's checkpoint.
FIRST = 2
Message = pb.PushWeightsRequest


@contextlib.contextmanager
def serving(
    *flags: str,
    store: str = "memory://",
    tcp: str = "",
    disk: str = "",
) -> Iterator[WeightSyncServer]:
    """Run a server until the block ends, which must end by itself when it is asked to.

    Args:
        *flags: More flags.
        store: Where versions are kept; empty: in the state directory.
        tcp: A second address to listen on.
        disk: Options of a tmpfs of its own for its state, such as size=16m; it then also has a
            small /dev/shm of its own. Needs root.
    """
    with tempfile.TemporaryDirectory(prefix="wsb") as folder:
        state = Path(folder, "state")
        server = WeightSyncServer(Path(folder, "run"), state, store=store, flags=flags)
        if disk:
            state.mkdir()
            server.wrapper = _private_disk(state, disk)
        if tcp:
            server.flags = (*flags, "--listen", f'["{server.address}", "{tcp}"]')
        server.start()
        try:
            yield server
        finally:
            code = server.stop()
        assert code == 0, server.log


def _private_disk(path: Path, options: str) -> list[str]:
    # Other processes see it below /proc/PID/root; it is gone with the server.
    state, shm = f"mount -t tmpfs -o {options} tmpfs {path}", "mount -t tmpfs -o size=1m tmpfs"
    return ["unshare", "--mount", "sh", "-c", f'{state} && {shm} /dev/shm && exec "$@"', "sh"]


def one_shard(size: int = 1000, seed: int = 0) -> Shard:
    """Return shard 0 with one tensor of `size` bytes that depend on `seed`."""
    data = (bytes((seed + i) % 251 for i in range(251)) * (size // 251 + 1))[:size]
    return make_shard(0, [("weight", "U8", (size,), data)])


def begin(**fields: object) -> pb.BeginPushRequest:
    """Return a begin of the server's only model."""
    return pb.BeginPushRequest(model=MODEL, **fields)  # type: ignore[arg-type]


def push_messages(shard: Shard, **fields: object) -> Iterator[Message]:
    """Yield a whole push on one stream, from begin to commit."""
    yield Message(begin=begin(**fields))
    yield from shard.all()
    yield Message(commit=pb.CommitPushRequest())


def model_status(stub: weightsync_pb2_grpc.WeightSyncStub) -> pb.ModelStatus:
    """Return the state of the server's only model."""
    (model,) = stub.GetStatus(pb.GetStatusRequest(), timeout=20).models
    return model


def within(seconds: float, holds: Callable[[], bool]) -> float:
    """Return after how many seconds something began to hold; fail when it does not in time."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - start
