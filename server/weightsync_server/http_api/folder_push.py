"""A checkpoint folder as a push: begun, sent and committed as a trainer's is."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import PUSH_WEIGHTS
from weightsync_server.http_api.inner_calls import ABORT_PUSH, BEGIN_PUSH
from weightsync_server.http_api.weight_folder import changed
from weightsync_server.ops.tasks import in_thread
from weightsync_server.push import ChunkView
from weightsync_server.rpc.requests import layout_parts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from weightsync.shm.segment_socket import OfferedFile
    from weightsync_server.http_api.inner_calls import InnerCalls
    from weightsync_server.http_api.weight_folder import WeightFolder
    from weightsync_server.ops.http_endpoint import HttpRequest
    from weightsync_server.push import Message

__all__ = ["push_folder"]

#: Bytes that are read at once, off the event loop, and those of one chunk of them.
_BLOCK_BYTES, _CHUNK_BYTES = 16 << 20, 2 << 20


async def push_folder(
    calls: InnerCalls, sender: HttpRequest, model: str, folder: WeightFolder
) -> pb.CommitPushResponse:
    """Return when the folder is a committed version, the next one; a push that fails leaves none.

    Args:
        calls: The server's methods.
        sender: For whom it is pushed.
        model: Name of the model.
        folder: What is pushed.

    Raises:
        WeightSyncError: As of BeginPush, PushWeights and CommitPush.
    """
    begin = pb.BeginPushRequest(
        model=model,
        kind=pb.PUSH_KIND_FULL,
        total_bytes=folder.layout.size,
        shard_count=len(folder.files),
        metadata={"weight_dir": folder.path},
    )
    push_id = (await calls.call(BEGIN_PUSH, begin, sender)).push_id
    try:
        sent = await calls.call(PUSH_WEIGHTS, _messages(push_id, folder), sender)
    except BaseException:
        # What it failed with is told; that it has ended already is no news.
        with contextlib.suppress(WeightSyncError):
            await calls.call(ABORT_PUSH, pb.AbortPushRequest(push_id=push_id), sender)
        raise
    done: pb.CommitPushResponse = sent.commit
    return done


async def _messages(push_id: str, folder: WeightFolder) -> AsyncIterator[Message]:
    yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))
    for shard in range(len(folder.files)):
        for part in layout_parts(folder.layout, shard):
            yield pb.PushWeightsRequest(layout=part)
            await asyncio.sleep(0)
    for index, file in enumerate(folder.files):
        async for begin, block in _blocks(file):
            for at in range(0, len(block), _CHUNK_BYTES):
                yield ChunkView(index, begin + at, block[at : at + _CHUNK_BYTES])
                # What comes by gRPC lets others have their turn between two messages, too.
                await asyncio.sleep(0)
    folder.check_unchanged()
    yield pb.PushWeightsRequest(commit=pb.CommitPushRequest(shard_count=len(folder.files)))


async def _blocks(file: OfferedFile) -> AsyncIterator[tuple[int, memoryview]]:
    # Not mapped: a page of a file that got shorter would end the process.
    name, size, fd = file
    for begin in range(0, size, _BLOCK_BYTES):
        wanted = min(_BLOCK_BYTES, size - begin)
        block = await in_thread(os.pread, fd, wanted, begin)
        if len(block) != wanted:
            raise changed(name)
        yield begin, memoryview(block)
