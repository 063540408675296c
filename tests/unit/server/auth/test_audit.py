"""The witness: what reaches the work without a caller is refused and counted as a violation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import JsonLines
from weightsync.v1 import attach_pb2, train_pb2
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import RULES, Caller, Role
from weightsync_server.auth.audit import Audit, noting
from weightsync_server.auth.caller import RejectedCall
from weightsync_server.auth.principals import Principal
from weightsync_server.ops.metrics import Metrics

PATH = "/weightsync.v1.WeightSync/DeleteVersion"
STATUS = "/weightsync.v1.WeightSync/GetStatus"
JOIN = "/weightsync.node.v1.NodeService/Join"
#: What a door hands on that has asked for nobody's authority.
NOBODY: Any = None


class _Servicer:
    def __init__(self, metrics: Metrics) -> None:
        self.deleted: list[int] = []
        calls = {PATH: self._delete, JOIN: self._join, STATUS: self._status}
        self.calls = Audit("default", metrics).witnessed(calls)

    async def _delete(self, _: Caller, request: Any) -> Any:
        self.deleted.append(request.version)
        return pb.DeleteVersionResponse()

    async def _join(self, _: Caller, requests: Any) -> AsyncIterator[Any]:
        for request in requests:
            self.deleted.append(request)
            yield request

    async def _status(self, _: Caller, request: Any) -> Any:
        return pb.GetStatusResponse()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("default")


@pytest.fixture
def servicer(metrics: Metrics) -> _Servicer:
    return _Servicer(metrics)


def _caller(role: Role, path: str) -> Caller:
    return Caller(Principal("x", frozenset({role})), path, RULES[path], "unix:")


async def test_without_a_caller_nothing_changes(servicer: _Servicer, metrics: Metrics) -> None:
    with pytest.raises(WeightSyncError) as caught:
        await servicer.calls[PATH](NOBODY, pb.DeleteVersionRequest(version=3))
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert servicer.deleted == []
    assert metrics.violations()["authority"] == 1
    await servicer.calls[STATUS](NOBODY, None)


@pytest.mark.parametrize(
    "caller",
    [_caller(Role.PUSH, PATH), _caller(Role.ADMIN, PATH.replace("Delete", "Pin"))],
    ids=["role", "method"],
)
async def test_a_caller_admitted_to_something_else_changes_nothing(
    servicer: _Servicer, metrics: Metrics, caller: Caller
) -> None:
    with pytest.raises(WeightSyncError):
        await servicer.calls[PATH](caller, pb.DeleteVersionRequest(version=3))
    assert servicer.deleted == []
    assert metrics.violations()["authority"] == 1


async def test_with_one_it_does_its_work(servicer: _Servicer, metrics: Metrics) -> None:
    await servicer.calls[PATH](_caller(Role.ADMIN, PATH), pb.DeleteVersionRequest(version=3))
    assert servicer.deleted == [3]
    assert metrics.violations()["authority"] == 0


async def test_a_stream_of_answers_is_witnessed_as_well(
    servicer: _Servicer, metrics: Metrics
) -> None:
    with pytest.raises(WeightSyncError):
        await anext(servicer.calls[JOIN](NOBODY, [1]))
    assert (servicer.deleted, metrics.violations()["authority"]) == ([], 1)
    caller = _caller(Role.MEMBER, JOIN)
    assert [answer async for answer in servicer.calls[JOIN](caller, [1, 2])] == [1, 2]
    assert (caller.worked, caller.response) == (True, 2)


def test_names_cannot_forge_a_line(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    caller = _caller(Role.ADMIN, PATH)
    caller.request = pb.AbortPushRequest(push_id='x"}\n{"who": "admin"\u2028\u202e\x00')
    Audit("default", metrics).write(caller, "OK")
    (record,) = caplog.records
    assert record.name == "weightsync.audit"
    text = record.getMessage()
    assert text.isascii()
    assert text.isprintable()


_LIVE = attach_pb2.WriteInPlaceResponse(live=attach_pb2.InPlaceLive(version=5))
_DONE = attach_pb2.WriteInPlaceResponse(
    committed=attach_pb2.InPlaceCommitted(report=pb.ApplyReport(version=5))
)


@pytest.mark.parametrize(
    ("response", "version"),
    [
        (None, 0),
        (attach_pb2.WriteInPlaceResponse(begun=attach_pb2.InPlaceBegun(transaction_id="t")), 0),
        (_LIVE, 5),
        (_DONE, 5),
        (train_pb2.TrainResponse(step=train_pb2.TrainStep(version=6)), 6),
        (pb.ApplyVersionResponse(report=pb.ApplyReport(version=7)), 7),
    ],
)
def test_a_line_names_the_version_that_came_of_a_call(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, response: Any, version: int
) -> None:
    caplog.set_level("INFO", "weightsync.audit")
    caller = _caller(Role.ADMIN, "/weightsync.v1.AttachService/WriteInPlace")
    caller.request, caller.response = attach_pb2.BeginInPlace(), response
    Audit("default", metrics).write(caller, "OK")
    (record,) = caplog.records
    assert json.loads(record.getMessage())["version"] == version


def test_strangers_leave_one_line_a_minute(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("weightsync.clock.monotonic", lambda: now)
    audit = Audit("default", metrics)
    error = WeightSyncError(Reason.UNAUTHENTICATED, "send a token")

    def lines() -> list[dict[str, Any]]:
        return [json.loads(record.message) for record in caplog.records]

    for port in range(500):
        audit.refuse(error, RejectedCall("", "GetStatus", f"ipv4:10.0.0.1:{port}"))
    (first,) = lines()
    del first["time"]
    assert first == {
        "who": "",
        "method": "GetStatus",
        "model": "default",
        "outcome": "UNAUTHENTICATED",
        "peer": "ipv4:10.0.0.1:0",
        "refused": "send a token",
    }
    # Those of a principal are written all the same.
    denied = WeightSyncError(Reason.PERMISSION_DENIED, "no")
    audit.refuse(denied, RejectedCall("trainer", "Rollback", "unix:"))
    now += 61
    audit.refuse(error, RejectedCall("", "Rollback", "ipv4:10.0.0.2:1"), 3)
    audit.refuse(error, RejectedCall("", "Rollback", "ipv4:10.0.0.2:1"))
    _, denial, last = lines()
    assert (denial["outcome"], "times" in denial) == ("PERMISSION_DENIED", False)
    assert (last["peer"], last["times"]) == ("ipv4:10.0.0.2:1", 502)
    counted = metrics.registry.get_sample_value
    labels = {"model": "default", "reason": "unauthenticated"}
    assert counted("weightsync_refused_calls_total", labels) == 504


async def test_as_json_a_line_names_apply_engines_and_why(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "weightsync.audit")
    path = "/weightsync.v1.WeightSync/ApplyVersion"
    done = pb.ApplyVersionResponse(report=pb.ApplyReport(version=7, apply_id="a1"))
    for name in ("x", "y"):
        done.engines.add(engine=name, report=done.report)
    done.engines.add(engine="z", absent="it is away")
    failed = WeightSyncError(Reason.APPLY_RESTORED, "no", metadata={"apply_id": "a2"})
    answers: list[Any] = [done, failed]

    async def apply(_: Caller, request: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, WeightSyncError):
            raise answer
        return answer

    audit = Audit("default", metrics)
    call = audit.witnessed({path: apply})[path]
    caller = _caller(Role.APPLY, path)
    with noting(audit, caller):
        await call(caller, pb.ApplyVersionRequest())
    caller = _caller(Role.APPLY, path)
    with pytest.raises(WeightSyncError), noting(audit, caller):
        await call(caller, pb.ApplyVersionRequest(version=8))
    audit.refuse(WeightSyncError(Reason.PERMISSION_DENIED, "no"), RejectedCall("t", "Rollback"), 2)
    ok, restored, refused = (json.loads(JsonLines("m").format(line)) for line in caplog.records)
    assert (ok["event"], ok["version"], ok["apply_id"]) == ("audit.call", 7, "a1")
    assert ok["engine"] == "x, y"
    assert ok["message"] == "x called ApplyVersion: OK"
    assert (restored["apply_id"], restored["reason"]) == ("a2", "APPLY_RESTORED")
    assert restored["outcome"] == "ABORTED"
    assert (refused["event"], refused["level"]) == ("audit.refused", "WARNING")
    assert (refused["reason"], refused["times"]) == ("PERMISSION_DENIED", 2)
    # Fields that a text line has with no value are left out.
    assert "push_id" not in ok
    assert json.loads(caplog.records[0].getMessage())["push_id"] == ""
