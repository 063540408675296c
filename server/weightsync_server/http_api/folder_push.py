"""A checkpoint folder as a push: begun, sent and committed as a trainer's is."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import PUSH_WEIGHTS
from weightsync_server.http_api.inner_calls import ABORT_PUSH, BEGIN_PUSH
from weightsync_server.push import ChunkView
from weightsync_server.rpc.requests import layout_parts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from weightsync_server.http_api.cast_folder import CastFolder
    from weightsync_server.http_api.inner_calls import InnerCalls
    from weightsync_server.ops.http_endpoint import HttpRequest
    from weightsync_server.push import Message

__all__ = ["push_folder"]

#: Bytes of one chunk.
_CHUNK_BYTES = 2 << 20


async def push_folder(
    calls: InnerCalls, sender: HttpRequest, model: str, sent: CastFolder
) -> pb.CommitPushResponse:
    """Return when the folder is a committed version, the next one; a push that fails leaves none.

    Args:
        calls: The server's methods.
        sender: For whom it is pushed.
        model: Name of the model.
        sent: What is pushed.

    Raises:
        WeightSyncError: As of BeginPush, PushWeights and CommitPush.
    """
    begin = pb.BeginPushRequest(
        model=model,
        kind=pb.PUSH_KIND_FULL,
        total_bytes=sent.layout.size,
        shard_count=len(sent.layout.shards),
        metadata={"weight_dir": sent.folder.path},
    )
    push_id = (await calls.call(BEGIN_PUSH, begin, sender)).push_id
    try:
        reply = await calls.call(PUSH_WEIGHTS, _messages(push_id, sent), sender)
    except BaseException:
        # What it failed with is told; that it has ended already is no news.
        with contextlib.suppress(WeightSyncError):
            await calls.call(ABORT_PUSH, pb.AbortPushRequest(push_id=push_id), sender)
        raise
    done: pb.CommitPushResponse = reply.commit
    return done


async def _messages(push_id: str, sent: CastFolder) -> AsyncIterator[Message]:
    yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))
    count = len(sent.layout.shards)
    for shard in range(count):
        for part in layout_parts(sent.layout, shard):
            yield pb.PushWeightsRequest(layout=part)
            await asyncio.sleep(0)
    for index in range(count):
        async for begin, block in sent.blocks(index):
            for at in range(0, len(block), _CHUNK_BYTES):
                yield ChunkView(index, begin + at, block[at : at + _CHUNK_BYTES])
                # What comes by gRPC lets others have their turn between two messages, too.
                await asyncio.sleep(0)
    sent.folder.check_unchanged()
    commit = pb.CommitPushRequest(shard_count=count, cast_tensors=sent.cast)
    yield pb.PushWeightsRequest(commit=commit)
