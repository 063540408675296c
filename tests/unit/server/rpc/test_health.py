"""When `push` is serving."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2

from weightsync_server.rpc import PUSH, HealthServicer, PushHealth

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_push_is_serving_while_pushes_are_let_in_and_there_is_room() -> None:
    service = HealthServicer()
    await service.set(PUSH, _NOT_SERVING)

    async def said() -> int:
        await asyncio.sleep(0.01)  # it is told in a task
        answer = await service.Check(health_pb2.HealthCheckRequest(service=PUSH), None)
        return int(answer.status)

    push = PushHealth(service)
    push.fill(full=True)
    assert await said() == _NOT_SERVING
    push.let_in()
    assert await said() == _NOT_SERVING
    push.fill(full=False)
    assert await said() == _SERVING
    push.fill(full=True)
    assert await said() == _NOT_SERVING
    # A server that ends says so, whatever its disks do.
    await service.enter_graceful_shutdown()
    push.fill(full=False)
    assert await said() == _NOT_SERVING


async def test_room_lets_in_nobody() -> None:
    service = HealthServicer()
    await service.set(PUSH, _NOT_SERVING)
    push = PushHealth(service)
    push.fill(full=True)
    push.fill(full=False)
    await asyncio.sleep(0.01)
    answer = await service.Check(health_pb2.HealthCheckRequest(service=PUSH), None)
    assert answer.status == _NOT_SERVING
