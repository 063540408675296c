"""One of several client processes that serve one push together: `-m benchmarks.crowd_client ...`.

It sends its own shards on one stream, with the public client's own means, whenever a line on its
standard input tells the push and where to. Each line is answered with one.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import numpy as np

from weightsync_client.options import CHUNK_BYTES
from weightsync_client.rpc.channels import Link
from weightsync_client.source.shards import Shard
from weightsync_client.source.source import make_source
from weightsync_client.transport import messages
from weightsync_client.transport.grpc_transport import Messages, StreamConnection
from weightsync_client.transport.messages import ShardDigester

__all__ = ["main"]

_TENSORS_PER_SHARD = 25


def main() -> None:
    """Read what shards to have, and then what to do."""
    address, first, count, size = sys.argv[1], *map(int, sys.argv[2:5])
    words = np.arange(count * size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    shards = _shards(words, first, count, size)
    lane, joined = None, ""
    for line in sys.stdin:
        order = json.loads(line)
        if order["op"] == "change":
            words += np.uint64(0x0101010101010101)
        else:
            if lane is None or joined != order["endpoint"]:
                lane, joined = StreamConnection(Link(address), order["endpoint"]), order["endpoint"]
            error = lane.carry(_messages(order["push_id"], shards, lane))
            if error is not None:
                raise error
        print("done", flush=True)


def _shards(
    words: np.ndarray[tuple[int], np.dtype[np.uint64]], first: int, count: int, size: int
) -> list[Shard]:
    tensors = {}
    for number, part in enumerate(np.split(words.view(np.uint16), count)):
        cuts = np.linspace(0, len(part), _TENSORS_PER_SHARD + 1).astype(int)
        for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
            tensors[f"shard{first + number:03}.tensor{index:02}.weight"] = part[begin:end]
    own = list(make_source(tensors, size).shards)
    if len(own) != count:
        msg = f"{len(own)} shards, not {count}"
        raise ValueError(msg)
    return [_numbered(shard, first + shard.index) for shard in own]


def _numbered(shard: Shard, index: int) -> Shard:
    return replace(shard, index=index, entry=replace(shard.entry, name=f"{index}.safetensors"))


def _messages(push_id: str, shards: list[Shard], lane: StreamConnection) -> Messages:
    yield messages.join_message(push_id)
    for shard in shards:
        yield from messages.layout_messages(shard)
        digester, reader = ShardDigester(shard), shard.open(lane.scratch)
        yield from messages.shard_bytes(shard, reader, digester, 0, CHUNK_BYTES, _ignore)
        reader.close()
        yield from messages.digest_messages(shard, digester.digests)


def _ignore(_: int) -> None:
    pass


if __name__ == "__main__":
    main()
