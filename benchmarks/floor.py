"""The floor: what a bare grpcio client stream of flat messages reaches on this machine.

The message holds a shard, an offset and the bytes; the server copies them into a warm buffer and
does nothing else. `python -m benchmarks.floor ADDRESS BYTES` is that server. It runs in a process
of its own with the allocator settings and the channel options of weightsync-server, because a
floor without them is 20 to 60 % too low.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from weightsync_server.ops.process_tuning import tune_allocator

__all__ = ["CLIENT_OPTIONS", "make_chunk_class", "push_floor"]

_METHOD = "/weightsync.benchmarks.Floor/Push"
_MAX_MESSAGE = (4 << 20) + (64 << 10)
#: As in the client.
CLIENT_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.http2.write_buffer_size", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)
#: As in the server.
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)


def make_chunk_class() -> Any:
    """Return the class that protoc would generate for `Chunk {uint32, uint64, bytes}`."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="weightsync/benchmarks/floor.proto", package="weightsync.benchmarks", syntax="proto3"
    )
    message = file.message_type.add(name="Chunk")
    kinds = (
        ("shard", field.TYPE_UINT32),
        ("offset", field.TYPE_UINT64),
        ("data", field.TYPE_BYTES),
    )
    for number, (name, kind) in enumerate(kinds, 1):
        message.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("weightsync.benchmarks.Chunk")
    )


def push_floor(
    channel: grpc.Channel, source: memoryview, shards: int, chunk_bytes: int, chunk_class: Any
) -> int:
    """Send `source` as equal shards in chunks and return the bytes that the server counted."""
    size = len(source) // shards

    def messages() -> Iterator[Any]:
        for shard in range(shards):
            end = (shard + 1) * size
            for offset in range(shard * size, end, chunk_bytes):
                # Not through the constructor, which copies the bytes once more.
                chunk = chunk_class(shard=shard, offset=offset)
                chunk.data = bytes(source[offset : min(end, offset + chunk_bytes)])
                yield chunk

    serialize: Callable[[Any], bytes] = chunk_class.SerializeToString
    call = channel.stream_unary(_METHOD, serialize, chunk_class.FromString)
    reply: Any = call(messages())
    return int(reply.offset)


async def _serve(address: str, size: int) -> None:
    chunk_class = make_chunk_class()
    buffer = mmap.mmap(-1, size)
    view = memoryview(buffer)
    for page in range(0, size, mmap.PAGESIZE):
        view[page] = 1

    async def push(requests: AsyncIterator[Any], _: Any) -> Any:
        received = 0
        async for chunk in requests:
            data = chunk.data
            view[chunk.offset : chunk.offset + len(data)] = data
            received += len(data)
        return chunk_class(offset=received)

    handler = grpc.stream_unary_rpc_method_handler(
        push, chunk_class.FromString, chunk_class.SerializeToString
    )
    service, method = _METHOD[1:].split("/")
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port(address)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    tune_allocator()
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
