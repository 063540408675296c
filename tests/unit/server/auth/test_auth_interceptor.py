"""Authority on a gRPC server in this process: what other interceptors refuse leaves no line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_server.auth import Caller, Endpoint, Role
from weightsync_server.auth.admission import Admission
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.auth_interceptor import AuthorityInterceptor
from weightsync_server.ops.metrics import Metrics
from weightsync_server.rpc import add_calls
from weightsync_server.rpc.status_interceptor import GuardInterceptor
from weightsync_server.usecases.guard import CallGuard, RpcMetrics


async def _delete(_: Caller, request: pb.DeleteVersionRequest) -> pb.DeleteVersionResponse:
    if request.version == 9:
        raise WeightSyncError(Reason.VERSION_UNKNOWN, "no version 9")
    return pb.DeleteVersionResponse()


class _Full(grpc.aio.ServerInterceptor):
    """Refuses everything, as a limit does that is reached."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        await continuation(handler_call_details)

        async def refuse(request: Any, context: Any) -> None:
            raise WeightSyncError(Reason.LIMIT_EXCEEDED, "full")

        return grpc.unary_unary_rpc_method_handler(refuse, pb.DeleteVersionRequest.FromString)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("default")


@pytest.fixture
async def stub(
    request: pytest.FixtureRequest, metrics: Metrics
) -> AsyncIterator[weightsync_pb2_grpc.WeightSyncAsyncStub]:
    audit = Audit("default", metrics)
    calls = audit.witnessed({"/weightsync.v1.WeightSync/DeleteVersion": _delete})
    admission = Admission(Endpoint("unix:x", Role.ADMIN), None, "default", audit)
    guard = GuardInterceptor(CallGuard(RpcMetrics(metrics.registry), lambda: None))
    server = grpc.aio.server(interceptors=[AuthorityInterceptor(admission), guard, *request.param])
    add_calls(calls, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield weightsync_pb2_grpc.WeightSyncStub(channel)
    await server.stop(0)


async def test_a_caller_with_another_role_has_nothing_done(metrics: Metrics) -> None:
    done: list[int] = []

    async def delete(_: Caller, request: pb.DeleteVersionRequest) -> pb.DeleteVersionResponse:
        done.append(request.version)
        return pb.DeleteVersionResponse()

    audit = Audit("default", metrics)
    admission = Admission(Endpoint("unix:x", Role.READ), None, "default", audit)
    server = grpc.aio.server(interceptors=[AuthorityInterceptor(admission)])
    # Not witnessed: it is this interceptor alone that refuses.
    add_calls({"/weightsync.v1.WeightSync/DeleteVersion": delete}, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = weightsync_pb2_grpc.WeightSyncStub(channel)
        call = stub.DeleteVersion(pb.DeleteVersionRequest(model="default", version=3))
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
    await server.stop(0)
    assert not done


def _counts(metrics: Metrics) -> tuple[float | None, float | None]:
    read = metrics.registry.get_sample_value
    labels = {"model": "default"}
    return (
        read("weightsync_state_calls_total", labels),
        read("weightsync_audit_lines_total", labels),
    )


@pytest.mark.parametrize(
    ("stub", "version", "code", "lines"),
    [
        ([], 3, grpc.StatusCode.OK, 1),
        ([], 9, grpc.StatusCode.NOT_FOUND, 1),
        ([_Full()], 3, grpc.StatusCode.RESOURCE_EXHAUSTED, 0),
    ],
    indirect=["stub"],
)
async def test_lines_and_work_are_equally_many(
    stub: Any,
    metrics: Metrics,
    caplog: pytest.LogCaptureFixture,
    version: int,
    code: grpc.StatusCode,
    lines: int,
) -> None:
    caplog.set_level("INFO", "weightsync.audit")
    call = stub.DeleteVersion(pb.DeleteVersionRequest(model="default", version=version))
    assert await call.code() is code
    # A refusal is on its way to the caller before its line is written.
    async with asyncio.timeout(10):
        while _counts(metrics) != (lines, lines):  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0.01)
    written = [record for record in caplog.records if record.name == "weightsync.audit"]
    assert len(written) == lines
    assert all(f'"outcome": "{code.name}"' in record.getMessage() for record in written)
