from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from weightsync.wire.grpc_channels import generic_only

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def _serving(server: grpc.aio.Server) -> AsyncIterator[int]:
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # It begins to wait for callers with the loop's next step.
    await asyncio.sleep(0)
    try:
        yield port
    finally:
        await server.stop(None)


def _waiting() -> set[str]:
    """Return what gRPC's own tasks are called that wait for a caller."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    names = {getattr(one, "__name__", "") for one in coroutines}
    return {name for name in names if name.startswith("_request_")}


async def test_no_call_waits_for_a_registered_method() -> None:
    async with _serving(grpc.aio.server()):
        assert _waiting() == {"_request_call", "_request_registered_call"}, "what is prevented"
    async with _serving(generic_only(grpc.aio.server())):
        assert _waiting() == {"_request_call"}


async def test_what_generated_code_adds_is_served() -> None:
    async with (
        _serving(generic_only(grpc.aio.server())) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
