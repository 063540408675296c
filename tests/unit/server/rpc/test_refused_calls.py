"""A refused call leaves nothing behind that only the garbage collector would find."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_server import app as app_module
from weightsync_server.app import App
from weightsync_server.flags import Flags

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_CODE = grpc.StatusCode
_TIMES = 10


def _stub(channel: grpc.aio.Channel) -> Any:
    return weightsync_pb2_grpc.WeightSyncStub(channel)


def _health(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def _push(channel: grpc.aio.Channel, *messages: pb.PushWeightsRequest) -> Any:
    return _stub(channel).PushWeights(iter(messages))


def _raw(channel: grpc.aio.Channel, method: str, *messages: bytes) -> Any:
    call: Any = channel.stream_unary(method)
    return call(iter(messages))


_JOIN = pb.PushWeightsRequest(join=pb.JoinPush(push_id="none"))
_BEGIN = pb.PushWeightsRequest(begin=pb.BeginPushRequest(model="m"))
_CHUNK = pb.PushWeightsRequest(chunk=pb.Chunk(shard=1, data=b"abc"))
_HEADER = pb.BeginPushRequest(model="m", kind=pb.PUSH_KIND_DELTA)
_SERVICE = "/weightsync.v1.WeightSync"
_CALLS: dict[str, tuple[Any, grpc.StatusCode | None]] = {
    "unary": (lambda c: _stub(c).GetVersion(pb.GetVersionRequest(model="m")), _CODE.NOT_FOUND),
    "model": (lambda c: _stub(c).BeginPush(pb.BeginPushRequest(model="n")), _CODE.NOT_FOUND),
    "begin": (lambda c: _stub(c).BeginPush(_HEADER), _CODE.INVALID_ARGUMENT),
    "apply": (lambda c: _stub(c).ApplyVersion(pb.ApplyVersionRequest(model="m")), None),
    "token": (
        lambda c: _stub(c).ListVersions(pb.ListVersionsRequest(model="m", page_token="x")),
        _CODE.INVALID_ARGUMENT,
    ),
    "download": (lambda c: _stub(c).PullWeights(pb.PullWeightsRequest(model="m")), _CODE.NOT_FOUND),
    "upload": (lambda c: _push(c, _JOIN), _CODE.NOT_FOUND),
    "not first": (lambda c: _push(c, _CHUNK, _CHUNK), _CODE.INVALID_ARGUMENT),
    "not begun": (_push, _CODE.INVALID_ARGUMENT),
    "too soon": (lambda c: _push(c, _BEGIN, _CHUNK, _CHUNK), _CODE.INVALID_ARGUMENT),
    "no message": (
        lambda c: _raw(c, f"{_SERVICE}/PushWeights", b"\xff\xff\xff\xff", b""),
        _CODE.INVALID_ARGUMENT,
    ),
    "no request": (lambda c: _raw(c, f"{_SERVICE}/GetVersion", b"\xff"), _CODE.INVALID_ARGUMENT),
    "no method": (lambda c: _raw(c, f"{_SERVICE}/None", b""), _CODE.UNIMPLEMENTED),
    "health": (
        lambda c: _health(c).Check(health_pb2.HealthCheckRequest(service="none")),
        _CODE.NOT_FOUND,
    ),
}


@pytest.fixture
async def channel(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[grpc.aio.Channel]:
    # It would change the collector and the limits of the process that runs the tests.
    monkeypatch.setattr(app_module, "tune_process", lambda: None)
    with tempfile.TemporaryDirectory(prefix="wsr") as name:
        values: dict[str, Any] = {
            "name": "m",
            "store": "memory://",
            "engine": f"unix:{name}/absent.sock",
            "listen": [f"unix:{name}/server.sock"],
            "run_dir": Path(name),
            "state_dir": Path(name) / "state",
            "metrics": "",
            "same_host": False,
            "fetchers": 1,
            "max_pushes": 16,
            "slots": 16,
        }
        app = App(Flags(**values).tree)
        await app.start()
        async with grpc.aio.insecure_channel(values["listen"][0]) as opened:
            yield opened
        await app.stop(0)


async def _collect() -> None:
    """Collect twice: async generators are only finalized at first, which is the loop's work."""
    for _ in range(2):
        gc.collect()
        # The server ends a call a moment after its caller has heard of it.
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _garbage() -> AsyncIterator[list[Any]]:
    """Collect what the block leaves in cycles, and nothing before its end."""
    await _collect()
    gc.disable()
    found: list[Any] = []
    try:
        yield found
        await asyncio.sleep(0.1)
        gc.set_debug(gc.DEBUG_SAVEALL)
        await _collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def _refused(channel: grpc.aio.Channel, name: str) -> None:
    make, code = _CALLS[name]
    for _ in range(5):
        call = make(channel)
        if name == "download":
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
        status = await call.code()
        # gRPC's own answer to a client that still writes when the server has ended the call.
        if await call.details() != "Internal error from Core":
            break
    assert status is code or (code is None and status is not _CODE.OK), await call.details()


@pytest.mark.parametrize("name", _CALLS)
async def test_no_cycle_holds_an_error_or_a_frame(channel: grpc.aio.Channel, name: str) -> None:
    await _refused(channel, name)
    async with _garbage() as found:
        for _ in range(_TIMES):
            await _refused(channel, name)
    kinds = (BaseException, FrameType, TracebackType)
    left = Counter(type(one).__name__ for one in found if isinstance(one, kinds))
    assert not left
