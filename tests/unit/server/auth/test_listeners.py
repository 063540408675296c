from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from grpc_health.v1 import health, health_pb2_grpc

from weightsync_server.auth import listeners
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.listeners import Listeners
from weightsync_server.auth.roles import ListenerSettings
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from pathlib import Path


async def test_no_call_waits_for_a_registered_method(tmp_path: Path) -> None:
    # One that waits costs the process when gRPC's accept loop ends; see `wire.grpc_channels`.
    listen = [f"unix:{tmp_path}/a.sock", f"unix:{tmp_path}/b.sock?role=read"]
    values: dict[str, Any] = {"listen": listen}
    doors = Listeners("default", ListenerSettings(**values))
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


async def test_a_call_that_grpc_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "_CANCEL_S", 0.1)
    stuck = asyncio.Event()

    class StuckServer:
        async def stop(self, grace: float) -> None:
            stuck.set()
            await asyncio.Event().wait()

    values: dict[str, Any] = {"listen": [f"unix:{tmp_path}/a.sock"]}
    doors = Listeners("default", ListenerSettings(**values))
    doors._servers.append(StuckServer())  # type: ignore[arg-type]  # what is asked of it
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(doors.close(0.1), 20)
    assert stuck.is_set()
    assert "calls are still under way" in caplog.text
