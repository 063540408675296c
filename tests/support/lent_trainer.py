"""A trainer in a process of its own that begins a push, writes half of a shard and stays so.

    python -m tests.support.lent_trainer ADDRESS KEY

It prints a line when half of shard 0 lies in the server's memory. Whatever it is sent on its
standard input, it then writes over the first byte of the memory, and prints another.
"""

from __future__ import annotations

import sys

import grpc

from tests.support.lending import Trainer
from weightsync.v1 import weightsync_pb2_grpc


def main() -> None:
    """Do it."""
    address, key = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:
        trainer = Trainer(weightsync_pb2_grpc.WeightSyncStub(channel), key=key)
        lent = trainer.borrower.take_lease(0)
        data = trainer.shards[0].data
        trainer.write(lent, data[: len(data) // 2])
        _say("half")
        for _ in sys.stdin:
            trainer.write(lent, b"\xff")
            _say("again")


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
