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
from weightsync_server.auth import Endpoint, Role
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.auth_interceptor import AuthorityInterceptor
from weightsync_server.auth.authenticator import Authenticator
from weightsync_server.ops.metrics import Metrics
from weightsync_server.rpc.status_interceptor import GuardInterceptor, RpcMetrics


class _Servicer(weightsync_pb2_grpc.WeightSyncServicer):
    async def DeleteVersion(  # noqa: N802 - an RPC
        self, request: pb.DeleteVersionRequest, context: Any
    ) -> pb.DeleteVersionResponse:
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
    servicer = _Servicer()  # type: ignore[abstract]  # one method is enough
    audit.witness(servicer)
    gate = Authenticator(Endpoint("unix:x", Role.ADMIN), None)
    guard = GuardInterceptor(RpcMetrics(metrics.registry), lambda: None)
    chain = [AuthorityInterceptor(gate, "default", audit), guard, *request.param]
    server = grpc.aio.server(interceptors=chain)
    weightsync_pb2_grpc.add_WeightSyncServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield weightsync_pb2_grpc.WeightSyncStub(channel)
    await server.stop(0)


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
