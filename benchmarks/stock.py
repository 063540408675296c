"""A trainer that has nothing but grpcio and the generated stubs: one call for a whole version.

It is a process of its own, with two settings of glibc that any user can make: without them glibc
gives each message's buffers back to the kernel, and new pages cost 1.5 s of processor time per GiB.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks.floor import CLIENT_OPTIONS
from benchmarks.servers import process
from benchmarks.source import Block, Source
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import build_header
from weightsync.model.manifest import TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1.weightsync_pb2_grpc import WeightSyncStub

__all__ = ["StockClient", "stock_client"]

#: As `benchmarks.servers.weightsync_server` names it.
_MODEL = "bench"
#: Of 1, 1.3 and 2 MiB the best: two for each of the benchmark's tensors.
_CHUNK_BYTES = 1344 << 10
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


class StockClient:
    """Tells a trainer process what to do.

    Args:
        child: The process; it answers each line with a number.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def change(self) -> None:
        """Change every byte."""
        self._ask("change")

    def push(self) -> int:
        """Push and commit a version; return its number when it is verified and staged."""
        return self._ask("push")

    def _ask(self, order: str) -> int:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(order.encode() + b"\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            msg = "the stock client failed; its log is beside the server's"
            raise RuntimeError(msg)
        return int(answer)


@contextlib.contextmanager
def stock_client(folder: Path, address: str, spec: tuple[int, int]) -> Iterator[StockClient]:
    """Run a trainer until the block ends.

    Args:
        folder: For its log.
        address: Of the server.
        spec: Bytes and shards of its weights.
    """
    arguments = ("-m", "benchmarks.stock", address, *map(str, spec))
    log = folder / "stock.log"
    with process(*arguments, log=log, piped=True, environment=_MALLOC) as child:
        yield StockClient(child)


def _push(address: str, blocks: Sequence[Block]) -> int:
    with grpc.insecure_channel(address, CLIENT_OPTIONS) as channel:
        stub: Any = WeightSyncStub(channel)
        reply: pb.PushWeightsResponse = stub.PushWeights(_messages(blocks))
    return reply.commit.version


def _messages(blocks: Sequence[Block]) -> Iterator[pb.PushWeightsRequest]:
    begin = pb.BeginPushRequest(model=_MODEL, shard_count=len(blocks))
    yield pb.PushWeightsRequest(begin=begin)
    for shard, block in enumerate(blocks):
        document, entries = build_header(block.tensors, shard)
        header = len(document).to_bytes(8, "little") + document
        yield _layout(shard, len(header), len(header) + len(block.view), entries)
        yield _chunk(shard, 0, header)
        digests = []
        for entry in entries:
            # Just before its bytes are copied: then they are read from memory once.
            digests.append(tensor_digest(block.view[entry.begin : entry.end]))
            for at in range(entry.begin, entry.end, _CHUNK_BYTES):
                data = bytes(block.view[at : min(at + _CHUNK_BYTES, entry.end)])
                yield _chunk(shard, len(header) + at, data)
        told = pb.ShardDigests(shard=shard, digests=b"".join(digests))
        yield pb.PushWeightsRequest(digests=told)
    yield pb.PushWeightsRequest(commit=pb.CommitPushRequest())


def _layout(
    shard: int, start: int, size: int, entries: Sequence[TensorEntry]
) -> pb.PushWeightsRequest:
    part = pb.LayoutPart(shard=shard, size_bytes=size, header_bytes=start - 8, last=True)
    part.shard_name = f"{shard}.safetensors"
    for entry in entries:
        part.tensors.add(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            begin=entry.begin,
            end=entry.end,
        )
    return pb.PushWeightsRequest(layout=part)


def _chunk(shard: int, offset: int, data: bytes) -> pb.PushWeightsRequest:
    message = pb.PushWeightsRequest()
    # Not through the constructor, which copies the bytes once more.
    message.chunk.shard, message.chunk.offset = shard, offset
    message.chunk.data = data
    return message


def _serve(address: str, size: int, shards: int) -> None:
    source = Source(size, shards)
    for order in sys.stdin:
        version = 0
        if order == "push\n":
            version = _push(address, source.blocks)
        else:
            source.change()
        print(version, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
