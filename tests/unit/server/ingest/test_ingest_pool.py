"""Ingest processes as the server starts them: who comes early waits until it knows the process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_server.auth import Caller, Endpoint
from weightsync_server.flags import Flags
from weightsync_server.ingest.ingest_pool import IngestPool
from weightsync_server.ops.metrics import Metrics
from weightsync_server.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync_server.workers.runtime.child_process import ChildProcess


class Held(IngestPool):
    """Has its processes ready, and knows of none before it is let."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Metrics(settings.name))
        self.ready: asyncio.Queue[ChildProcess] = asyncio.Queue()
        self.known = asyncio.Event()

    async def _begin(self, place: int) -> ChildProcess:
        process = await super()._begin(place)
        self.ready.put_nowait(process)
        await self.known.wait()
        return process


class Audit:
    """Writes nothing down."""

    def refuse(self, error: Any, attempt: Any, times: int = 1) -> None:
        raise AssertionError(error, times)

    def write(self, *_: Any) -> None:
        """A call has ended."""


async def push_weights(_: Caller, requests: Any) -> pb.PushWeightsResponse:
    """Tell every push its own id."""
    ids = [message.join.push_id async for message in requests]
    return pb.PushWeightsResponse(push_id=ids[0])


async def test_a_stream_to_a_process_that_is_not_known_yet_waits(tmp_path: Path) -> None:
    values: Any = {"listen": ["127.0.0.1:0"], "run_dir": tmp_path, "state_dir": tmp_path}
    ingesters = Held(Flags(**values | {"ingest": 1}).tree)
    audit: Any = Audit()
    serving = asyncio.create_task(ingesters.serve(push_weights, audit))
    try:
        async with asyncio.timeout(60):
            process = await ingesters.ready.get()
            (endpoint,) = process.ready["endpoints"]
            async with grpc.aio.insecure_channel(Endpoint.parse(endpoint).address) as channel:
                push = weightsync_pb2_grpc.WeightSyncStub(channel).PushWeights
                join = pb.PushWeightsRequest(join=pb.JoinPush(push_id="mine"))
                call = asyncio.ensure_future(push(iter([join])))
                # Time enough to be refused.
                await asyncio.wait([call], timeout=1)
                assert not call.done()
                ingesters.known.set()
                assert (await call).push_id == "mine"
            await serving
            assert ingesters.pids == [process.pid]
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await ingesters.close()
