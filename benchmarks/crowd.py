"""Several client processes that send one version together, each its own shards on one stream."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from benchmarks.servers import process, weightsync_server
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1.weightsync_pb2_grpc import WeightSyncStub

__all__ = ["Crowd", "crowd", "crowd_samples"]

#: As `weightsync_server` names it.
_MODEL = "bench"
_SHARDS_EACH = 2
#: Rounds that make and warm the slots and are not counted.
_WARM_UP = 3
_CALL_S = 300.0


class Crowd:
    """Clients and the server that they push to.

    Args:
        address: Of the server.
        clients: The processes.
        nbytes: Bytes of a version.
    """

    def __init__(self, address: str, clients: list[subprocess.Popen[bytes]], nbytes: int) -> None:
        self._address = address
        self._clients = clients
        self._nbytes = nbytes

    def push(self) -> float:
        """Change every byte, then push once; return GB/s from the begin to the commit's answer."""
        self._all([{"op": "change"}] * len(self._clients))
        with grpc.insecure_channel(self._address) as channel:
            stub = WeightSyncStub(channel)
            started = time.perf_counter()
            begun = stub.BeginPush(
                pb.BeginPushRequest(
                    model=_MODEL,
                    shard_count=_SHARDS_EACH * len(self._clients),
                    metadata={"run_id": "crowd"},
                ),
                timeout=_CALL_S,
            )
            doors = list(begun.data_endpoints) or [""]
            self._all(
                [
                    {"op": "send", "push_id": begun.push_id, "endpoint": doors[at % len(doors)]}
                    for at in range(len(self._clients))
                ]
            )
            commit = pb.CommitPushRequest(push_id=begun.push_id)
            reply = stub.CommitPush(commit, timeout=_CALL_S)
            seconds = time.perf_counter() - started
        if reply.size_bytes < self._nbytes:
            msg = f"{reply.size_bytes} bytes were committed, not {self._nbytes}"
            raise RuntimeError(msg)
        return self._nbytes / seconds / 1e9

    def _all(self, orders: list[dict[str, str]]) -> None:
        for client, order in zip(self._clients, orders, strict=True):
            assert client.stdin is not None
            client.stdin.write(json.dumps(order).encode() + b"\n")
            client.stdin.flush()
        for client in self._clients:
            assert client.stdout is not None
            if client.stdout.readline() != b"done\n":
                msg = "a client process failed; its log is beside the server's"
                raise RuntimeError(msg)


@contextlib.contextmanager
def crowd(folder: Path, clients: int, ingest: int, nbytes: int, *flags: str) -> Iterator[Crowd]:
    """Run a server and clients until the block ends.

    Args:
        folder: For sockets and logs.
        clients: Client processes.
        ingest: Ingest processes of the server; 0: it receives itself.
        nbytes: Bytes of a version; rounded down to equal shards.
        *flags: More flags of the server.
    """
    size = nbytes // (clients * _SHARDS_EACH) // 1024 * 1024
    address = f"unix:{folder}/push.sock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(weightsync_server(folder, [address], "--ingest", str(ingest), *flags))
        own = [
            stack.enter_context(
                process(
                    *("-m", "benchmarks.crowd_client", address, str(number * _SHARDS_EACH)),
                    *(str(_SHARDS_EACH), str(size)),
                    log=folder / f"client{number}.log",
                    piped=True,
                )
            )
            for number in range(clients)
        ]
        yield Crowd(address, own, size * clients * _SHARDS_EACH)


def crowd_samples(
    folder: Path, clients: int, ingest: int, nbytes: int, rounds: int, *flags: str
) -> list[float]:
    """Return the GB/s of so many pushes, after some that warm everything."""
    folder.mkdir()
    with crowd(folder, clients, ingest, nbytes, *flags) as pushing:
        return [pushing.push() for _ in range(_WARM_UP + rounds)][_WARM_UP:]
