"""A trainer that sends the first half of a push and then sits there; run as a program."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import grpc

from tests.support.bounds import Message, begin, one_shard
from weightsync.v1 import weightsync_pb2_grpc


def _messages() -> Iterator[Message]:
    shard = one_shard(1 << 20)
    yield Message(begin=begin())
    yield from shard.layout()
    yield shard.chunks(1 << 19)[0]
    sys.stdout.write("half\n")
    sys.stdout.flush()
    time.sleep(3600)


if __name__ == "__main__":
    with grpc.insecure_channel(sys.argv[1]) as channel:
        weightsync_pb2_grpc.WeightSyncStub(channel).PushWeights(_messages())
