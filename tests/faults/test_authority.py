"""Who may call what, asked of a real server on every method: attacks A1 and A2, invariant 11."""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from tests.support.bounds import within
from tests.support.secured import METHODS, Secured, code_of
from tests.support.stock import push_messages
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_server.auth import RULES, Role

STRANGE = (
    "/weightsync.v1.WeightSync/NoSuchMethod",
    "/no.such.Service/Call",
    "/weightsync.v1.WeightSync/getstatus",
    "//weightsync.v1.WeightSync/GetStatus",
    "weightsync.v1.WeightSync/GetStatus",
    "/weightsync.v1.WeightSync/GetStatus/",
    "/",
)
DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
#: A whole safetensors file: one tensor of four zero bytes.
HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
SHARD = ("model.safetensors", len(HEADER).to_bytes(8, "little") + HEADER + bytes(4))


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    # Short: unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="wsa"))
    secured = Secured(folder)
    secured.start()
    yield secured
    assert secured.stop() == 0
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def channel(secured: Secured) -> grpc.Channel:
    return secured.channel()


def _bad(secured: Secured) -> dict[str, tuple[tuple[str, str], ...]]:
    good = secured.tokens["admin"]
    return {
        "none": (),
        "wrong": (("authorization", f"Bearer {good[:-1]}"),),
        "empty": (("authorization", "Bearer "),),
        "lower": (("authorization", f"bearer {good}"),),
        "upper": (("authorization", f"BEARER {good}"),),
        "basic": (("authorization", f"Basic {good}"),),
        "bare": (("authorization", good),),
        "spaces": (("authorization", f"Bearer  {good}"),),
        "two": (("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}")),
        "good and bad": (("authorization", f"Bearer {good}"), ("authorization", "Bearer x")),
        "other header": (("x-authorization", f"Bearer {good}"),),
    }


@pytest.mark.parametrize("path", [*METHODS, *STRANGE])
def test_a_call_without_authority_is_unauthenticated(
    secured: Secured, channel: grpc.Channel, path: str
) -> None:
    received = secured.metric("weightsync_received_bytes_total")
    lines = len(secured.audit())
    found = {name: code_of(channel, path, metadata) for name, metadata in _bad(secured).items()}
    assert found == dict.fromkeys(found, grpc.StatusCode.UNAUTHENTICATED)
    assert secured.metric("weightsync_received_bytes_total") == received
    assert len(secured.audit()) == lines


@pytest.mark.parametrize("path", [*METHODS, *STRANGE])
def test_nothing_is_read_before_authority_is_asked(
    secured: Secured, channel: grpc.Channel, path: str
) -> None:
    # No message is sent and the stream does not end: the answer is here nevertheless.
    hold = threading.Event()

    def never() -> Iterator[bytes]:
        hold.wait(20)
        yield b""

    call: Any = cast("Any", channel).stream_stream(path)(never(), timeout=10)
    assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    hold.set()


@pytest.mark.parametrize("proof", ["token", "socket"])
@pytest.mark.parametrize("role", Role)
def test_each_role_may_call_what_the_table_says(secured: Secured, role: Role, proof: str) -> None:
    if proof == "token":
        channel, metadata = secured.channel(), secured.bearer(role)
    else:
        channel, metadata = secured.channel(address=secured.socket(role)), ()
    allowed = {
        path for path in METHODS if code_of(channel, path, metadata, timeout_s=2) not in DENIED
    }
    served = {path: RULES[path] for path in METHODS}
    wanted = {path for path, rule in served.items() if role in rule.roles or role is Role.ADMIN}
    assert allowed == wanted


@pytest.mark.parametrize("path", METHODS)
def test_a_token_for_another_model_is_denied_everything(
    secured: Secured, channel: grpc.Channel, path: str
) -> None:
    assert code_of(channel, path, secured.bearer("other")) is grpc.StatusCode.PERMISSION_DENIED


def test_a_model_out_of_scope_is_denied_whether_it_exists_or_not(secured: Secured) -> None:
    stub = weightsync_pb2_grpc.WeightSyncStub(secured.channel())
    metadata = secured.bearer("push")

    def named(model: str) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            stub.AcquireEpoch(pb.AcquireEpochRequest(model=model), metadata=metadata, timeout=5)
        return caught.value

    real, made_up = named("elsewhere"), named("no-such-model")
    assert real.code() is made_up.code() is grpc.StatusCode.PERMISSION_DENIED
    assert real.details() == made_up.details()
    messages = push_messages([SHARD], 3, model="elsewhere")
    with pytest.raises(grpc.RpcError) as caught:
        stub.PushWeights(messages, metadata=metadata, timeout=5)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_only_an_admin_accepts_a_rejected_version_again(secured: Secured) -> None:
    stub = weightsync_pb2_grpc.WeightSyncStub(secured.channel())
    request = pb.ApplyVersionRequest(model="default", version=7, clear_rejected=True)
    codes = {}
    for name in ("apply", "admin"):
        with pytest.raises(grpc.RpcError) as caught:
            stub.ApplyVersion(request, metadata=secured.bearer(name), timeout=5)
        codes[name] = caught.value.code()
    assert codes["apply"] is grpc.StatusCode.PERMISSION_DENIED
    assert codes["admin"] not in DENIED


@pytest.mark.parametrize("path", STRANGE)
def test_an_unknown_method_is_unimplemented_for_those_with_authority(
    secured: Secured, channel: grpc.Channel, path: str
) -> None:
    code = code_of(channel, path, secured.bearer("admin"))
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_a_request_that_is_no_message_is_refused(secured: Secured, channel: grpc.Channel) -> None:
    for path, method in METHODS.items():
        if method.client_streaming:
            continue
        code = code_of(channel, path, secured.bearer("admin"), b"\xff\xff\xff")
        assert code is grpc.StatusCode.INVALID_ARGUMENT, path


def test_every_change_leaves_one_line(secured: Secured) -> None:
    stub = weightsync_pb2_grpc.WeightSyncStub(secured.channel())
    # A refusal of an earlier test may have reached its caller before its line was written.
    calls = secured.metric("weightsync_state_calls_total")
    within(5, lambda: len(secured.audit()) == calls)
    before = len(secured.audit())
    metadata = secured.bearer("push")
    stub.AcquireEpoch(pb.AcquireEpochRequest(model="default"), metadata=metadata, timeout=5)
    reply = stub.PushWeights(push_messages([SHARD], 0), metadata=metadata, timeout=20)
    with pytest.raises(grpc.RpcError):
        stub.AbortPush(pb.AbortPushRequest(push_id='"\n{'), metadata=metadata, timeout=5)
    stub.PinVersion(
        pb.PinVersionRequest(model="default", version=reply.version),
        metadata=secured.bearer("admin"),
        timeout=5,
    )
    with pytest.raises(grpc.RpcError):
        stub.Rollback(pb.RollbackRequest(model="default"), metadata=metadata, timeout=5)
    lines = secured.audit()[before:]
    facts = [(line["who"], line["role"], line["method"], line["outcome"]) for line in lines]
    assert facts == [
        ("push", "push", "AcquireEpoch", "OK"),
        ("push", "push", "PushWeights", "OK"),
        ("push", "push", "AbortPush", "NOT_FOUND"),
        ("admin", "admin", "PinVersion", "OK"),
    ]
    assert [line["version"] for line in lines] == [0, reply.version, 0, reply.version]
    assert lines[1]["push_id"] == reply.push_id
    assert lines[2]["push_id"] == '"\n{'
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in lines)
    assert secured.metric("weightsync_audit_lines_total") == len(secured.audit())
    assert secured.metric("weightsync_state_calls_total") == len(secured.audit())
    assert secured.metric("weightsync_invariant_violations_total") == 0


def test_refusals_are_counted(secured: Secured, channel: grpc.Channel) -> None:
    before = secured.metric("weightsync_refused_calls_total")
    code_of(channel, "/weightsync.v1.WeightSync/GetStatus")
    code_of(channel, "/weightsync.v1.WeightSync/Rollback", secured.bearer("read"))
    assert secured.metric("weightsync_refused_calls_total") == before + 2
    line = secured.refusals()[-1]
    assert (line["who"], line["method"], line["model"]) == ("read", "Rollback", "default")
    assert line["outcome"] == "PERMISSION_DENIED"
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert dt.datetime.fromisoformat(line["time"]).tzinfo is not None
