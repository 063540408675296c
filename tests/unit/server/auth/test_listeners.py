from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health, health_pb2_grpc

from weightsync_server.auth.audit import Audit
from weightsync_server.auth.listeners import Listeners
from weightsync_server.ops.metrics import Metrics
from weightsync_server.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path


async def test_no_call_waits_for_a_registered_method(tmp_path: Path) -> None:
    # One that waits costs the process when gRPC's accept loop ends; see `wire.named_methods`.
    listen = [f"unix:{tmp_path}/a.sock", f"unix:{tmp_path}/b.sock?role=read"]
    values: dict[str, Any] = {"listen": listen}
    doors = Listeners(Settings(**values).listener_options)
    servicer = health.aio.HealthServicer()
    doors.bind(
        Audit("default", Metrics("default")),
        [],
        lambda server: health_pb2_grpc.add_HealthServicer_to_server(servicer, server),
    )
    await doors.start()
    await asyncio.sleep(0)
    try:
        coroutines = [task.get_coro() for task in asyncio.all_tasks()]
        names = [getattr(one, "__name__", "") for one in coroutines]
        assert [name for name in names if name.startswith("_request_")] == ["_request_call"] * 2
    finally:
        await doors.close(0)
