"""Calls for senders of HTTP requests: admitted, limited, counted and written down as gRPC's are."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from tests.support.secured import authority_text
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import JsonLines
from weightsync.v1 import train_pb2
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import PUSH_WEIGHTS, Caller, Endpoint
from weightsync_server.auth.admission import Admission
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.principals import AuthorityFile, new_token, token_hash
from weightsync_server.http.http_app import HttpApi
from weightsync_server.http.http_calls import HttpCalls
from weightsync_server.http.http_messages import Verb
from weightsync_server.http.http_server import HttpReply, HttpRequest
from weightsync_server.ops.metrics import Metrics
from weightsync_server.usecases.guard import CallGuard, RpcMetrics
from weightsync_server.usecases.methods import APPLY_VERSION, GET_STATUS
from weightsync_server.usecases.rate_limits import CallSettings, RateLimits

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = "/weightsync.v1.TrainService/Train"


class Door:
    """An HTTP door to a server of which each call does what `error` says.

    Attributes:
        callers: Of what was done, in order.
        tokens: By role.
        refused: Calls that were refused at the door.
    """

    def __init__(self, folder: Path) -> None:
        self.error: BaseException | None = None
        self.callers: list[Caller] = []
        self.metrics = Metrics("default")
        self.tokens = {role: new_token() for role in ("push", "apply", "read", "train")}
        file = folder / "authority.toml"
        file.touch(mode=0o600)
        hashes = {role: token_hash(token) for role, token in self.tokens.items()}
        file.write_text(
            authority_text(
                [
                    {"name": role, "roles": [role], "models": ["default"], "tokens": [hashed]}
                    for role, hashed in hashes.items()
                ]
            )
        )
        audit = Audit("default", self.metrics)
        calls = {
            APPLY_VERSION: self._answer,
            GET_STATUS: self._answer,
            PUSH_WEIGHTS: self._answer,
            TRAIN: self._stream,
        }
        limits = RateLimits(CallSettings(calls_per_s=5))
        guard = CallGuard(RpcMetrics(self.metrics.registry), lambda: None, limits)
        witnessed = audit.witnessed(calls)
        self.calls = HttpCalls(
            {path: guard.guarded(path, call) for path, call in witnessed.items()},
            Admission(Endpoint("127.0.0.1:1"), AuthorityFile(file), "default", audit),
        )

    async def _answer(self, caller: Caller, request: Any) -> Any:
        if hasattr(request, "__aiter__"):
            [message async for message in request]
        self.callers.append(caller)
        if self.error is not None:
            raise self.error
        return pb.ApplyVersionResponse(report=pb.ApplyReport(version=7))

    async def _stream(self, caller: Caller, _: Any) -> AsyncIterator[Any]:
        self.callers.append(caller)
        yield train_pb2.TrainResponse(job_id="j")
        await asyncio.Event().wait()

    def sender(self, role: str = "") -> HttpRequest:
        headers = (("authorization", f"Bearer {self.tokens[role]}"),) if role else ()
        return HttpRequest("POST", "/x", headers=headers, peer="ipv4:127.0.0.1:9")

    async def refused(self, method: str, message: Any, role: str = "") -> Reason:
        with pytest.raises(WeightSyncError) as caught:
            await self.calls.call(method, message, self.sender(role))
        return caught.value.reason

    def handled(self, path: str, code: str, kind: str = "unary") -> float | None:
        _, service, method = path.split("/")
        labels = {"grpc_service": service, "grpc_method": method, "grpc_type": kind}
        read = self.metrics.registry.get_sample_value
        return read("grpc_server_handled_total", labels | {"grpc_code": code})


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


async def test_what_is_called_over_http_counts_as_if_it_came_by_grpc(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "weightsync.audit")
    await door.calls.call(APPLY_VERSION, pb.ApplyVersionRequest(), door.sender("apply"))
    assert door.handled(APPLY_VERSION, "OK") == 1
    door.error = WeightSyncError(Reason.VERSION_UNKNOWN, "x" * 5000, metadata={"version": "3"})
    with pytest.raises(WeightSyncError) as caught:
        await door.calls.call(APPLY_VERSION, pb.ApplyVersionRequest(), door.sender("apply"))
    # A copy, as gRPC would have brought it: what it was raised with keeps nothing of this request.
    assert caught.value is not door.error
    assert caught.value.reason is Reason.VERSION_UNKNOWN
    assert caught.value.metadata == {"version": "3"}
    assert len(caught.value.message) == 2000
    assert door.error.__traceback__ is None
    assert door.handled(APPLY_VERSION, "NotFound") == 1
    door.error = RuntimeError("secret")
    assert await door.refused(APPLY_VERSION, pb.ApplyVersionRequest(), "apply") is Reason.FAULT
    assert door.handled(APPLY_VERSION, "Unavailable") == 1
    lines = [
        json.loads(record.message) for record in caplog.records if record.name == "weightsync.audit"
    ]
    assert [line["outcome"] for line in lines] == ["OK", "NOT_FOUND", "UNAVAILABLE"]
    assert [(line["who"], line["version"]) for line in lines] == [("apply", 7), *[("apply", 0)] * 2]


async def test_the_trace_of_a_sender_is_in_the_log(
    door: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "weightsync.audit")
    monkeypatch.setattr(caplog.handler, "formatter", JsonLines("m"))
    trace, plain = "0af7651916cd43dd8448eb211c80319c", door.sender("apply")
    headers = (*plain.headers, ("traceparent", f"00-{trace}-b7ad6b7169203331-01"))
    traced = HttpRequest("POST", "/x", headers=headers, peer=plain.peer)
    for sender in (traced, plain):
        await door.calls.call(APPLY_VERSION, pb.ApplyVersionRequest(), sender)
    first, second = map(json.loads, caplog.text.splitlines())
    assert first["trace_id"] == trace
    assert "trace_id" not in second, "it is of one call alone"


class _Sender:
    """A request that a weak reference can be made of."""

    def __init__(self, request: HttpRequest) -> None:
        self.path, self.peer, self.certificate = request.path, request.peer, request.certificate
        self.values = request.values


async def test_a_refused_request_is_kept_by_nothing(door: Door) -> None:
    door.error = WeightSyncError(Reason.VERSION_UNKNOWN, "no")
    gc.collect()
    gc.disable()
    try:
        request = pb.ApplyVersionRequest()
        sender = _Sender(door.sender("apply"))
        kept = weakref.ref(sender)
        with contextlib.suppress(WeightSyncError):
            await door.calls.call(APPLY_VERSION, request, cast("HttpRequest", sender))
        del sender
        assert kept() is None
    finally:
        gc.enable()


async def test_nothing_is_done_for_who_may_not_have_it_done(door: Door) -> None:
    apply = pb.ApplyVersionRequest()
    assert await door.refused(APPLY_VERSION, apply) is Reason.UNAUTHENTICATED
    assert await door.refused(APPLY_VERSION, apply, "read") is Reason.PERMISSION_DENIED
    apply.clear_rejected = True
    assert await door.refused(APPLY_VERSION, apply, "apply") is Reason.PERMISSION_DENIED
    apply = pb.ApplyVersionRequest(model="other")
    assert await door.refused(APPLY_VERSION, apply, "apply") is Reason.PERMISSION_DENIED
    assert not door.callers
    # No more than a call by gRPC that is refused before it begins.
    assert door.handled(APPLY_VERSION, "PermissionDenied") is None
    read = door.metrics.registry.get_sample_value
    refused = {"model": "default", "reason": "permission_denied"}
    assert read("weightsync_refused_calls_total", refused) == 3


async def test_the_first_message_of_a_stream_is_looked_at(door: Door) -> None:
    async def messages() -> AsyncIterator[pb.PushWeightsRequest]:
        yield pb.PushWeightsRequest(begin=pb.BeginPushRequest(model="other"))

    assert await door.refused(PUSH_WEIGHTS, messages(), "push") is Reason.PERMISSION_DENIED
    assert not door.callers
    assert door.handled(PUSH_WEIGHTS, "PermissionDenied", "client_stream") == 1


async def test_calls_over_http_have_the_rate_of_their_caller(door: Door) -> None:
    status = pb.GetStatusRequest()
    for _ in range(10):
        await door.calls.call(GET_STATUS, status, door.sender("read"))
    assert await door.refused(GET_STATUS, status, "read") is Reason.LIMIT_EXCEEDED
    assert door.handled(GET_STATUS, "ResourceExhausted") == 1
    await door.calls.call(GET_STATUS, status, door.sender("apply"))
    assert {caller.name for caller in door.callers} == {"read", "apply"}


@pytest.mark.parametrize("waits", [False, True], ids=["between two", "waiting for one"])
async def test_who_leaves_a_stream_has_cancelled_it(
    door: Door, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    caplog.set_level("INFO", "weightsync.audit")
    stream = door.calls.stream(TRAIN, train_pb2.TrainRequest(), door.sender("train"))
    assert (await anext(stream)).job_id == "j"
    if waits:
        following = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        following.cancel()
        await asyncio.wait([following])
    await stream.aclose()
    assert door.handled(TRAIN, "Cancelled", "server_stream") == 1
    (line,) = (record.getMessage() for record in caplog.records)
    assert '"outcome": "CANCELLED"' in line


async def test_two_that_answer_one_path_are_refused(door: Door) -> None:
    async def run(_: HttpRequest, __: object) -> HttpReply:
        return HttpReply(200)

    class Mine:
        verbs: ClassVar = {"/mine": Verb("GET", (), run)}

        async def close(self, grace_s: float) -> None:
            pass

    others = {"/mine": Verb("POST", (), run)}
    for sources, more in (([Mine()], [others]), ([Mine(), Mine()], []), ([], [others, others])):
        with pytest.raises(WeightSyncError, match="two answer /mine"):
            HttpApi("127.0.0.1", 0, None, door.calls, sources, more, print)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_the_address_of_a_door_on_ipv6_can_be_opened(door: Door, host: str) -> None:
    api = HttpApi(host, 0, None, door.calls, [], [], lambda: None)
    try:
        assert api.url == f"http://[::1]:{api.port}"
    finally:
        await api.drain(0)
