"""A trainer that sends half a push and then sits there: python -m tests.soak.half.

Arguments: ADDRESS VERSION KEY EPOCH. On stdin: shards, each with its length in 8 bytes before it;
all but the last are sent whole, of the last the first half. It prints "half" when they are sent.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import grpc

from tests.support.stock import push_messages
from weightsync.v1 import weightsync_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.v1 import weightsync_pb2 as pb

__all__ = ["half_a_push"]

_CHUNK = 32 << 10


@contextlib.contextmanager
def half_a_push(
    address: str, version: int, key: str, epoch: int, shards: list[tuple[str, bytes]]
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Give a trainer in a process of its own that has sent half of a push; None: it could not."""
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.soak.half", address, str(version), key, str(epoch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    try:
        with trainer.stdin:
            for _, data in shards:
                trainer.stdin.write(len(data).to_bytes(8, "big") + data)
        yield trainer if trainer.stdout.readline() == b"half\n" else None
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def _shards() -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    while length := sys.stdin.buffer.read(8):
        data = sys.stdin.buffer.read(int.from_bytes(length, "big"))
        found.append((f"{len(found)}.safetensors", data))
    return found


def _messages(version: int, key: str, epoch: int) -> Iterator[pb.PushWeightsRequest]:
    shards = _shards()
    half = len(shards[-1][1]) // 2
    for message in push_messages(
        shards, version, chunk_bytes=_CHUNK, epoch=epoch, idempotency_key=key
    ):
        if message.HasField("chunk"):
            chunk = message.chunk
            if chunk.shard == len(shards) - 1 and chunk.offset > half:
                break
        yield message
    sys.stdout.write("half\n")
    sys.stdout.flush()
    time.sleep(3600)


if __name__ == "__main__":
    _, address, version, key, epoch = sys.argv
    with grpc.insecure_channel(address) as channel:
        stub = weightsync_pb2_grpc.WeightSyncStub(channel)
        stub.PushWeights(_messages(int(version), key, int(epoch)))
