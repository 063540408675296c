"""The ports of ingest processes ask who calls, by the same rules as the server's own."""

from __future__ import annotations

import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from tests.support.bounds import within
from tests.support.secured import METHODS, Secured, code_of
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_client import Access, Client, Retry
from weightsync_server.auth import PUSH_WEIGHTS, RULES, Role
from weightsync_server.auth.principals import new_token

if TYPE_CHECKING:
    from collections.abc import Iterator

CODE = grpc.StatusCode
JOIN = pb.PushWeightsRequest(join=pb.JoinPush(push_id="none")).SerializeToString()
ARRAYS = {f"t{i}": np.full(100_000, i, dtype=np.uint8) for i in range(4)}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def secured(request: pytest.FixtureRequest) -> Iterator[Secured]:
    folder = Path(tempfile.mkdtemp(prefix="wsg"))
    secured = Secured(folder, tls=request.param, flags=("--ingest=2",)).start()
    yield secured
    assert secured.stop() == 0
    shutil.rmtree(folder)


@pytest.fixture
def data(secured: Secured) -> grpc.Channel:
    return secured.channel(address=beside(secured, 2))


def audited(secured: Secured, lines: int) -> bool:
    return len(secured.audit()) >= lines


def beside(secured: Secured, number: int) -> str:
    host = secured.address.rpartition(":")[0]
    return f"{host}:{secured.port + number}"


def test_a_stream_takes_the_push_role_and_nothing_else_is_served(
    secured: Secured, data: grpc.Channel
) -> None:
    before = secured.metric("weightsync_refused_calls_total")
    assert code_of(data, PUSH_WEIGHTS, (), JOIN) is CODE.UNAUTHENTICATED
    made_up = (("authorization", f"Bearer {new_token()}"),)
    assert code_of(data, PUSH_WEIGHTS, made_up, JOIN) is CODE.UNAUTHENTICATED
    assert code_of(data, PUSH_WEIGHTS, secured.bearer("read"), JOIN) is CODE.PERMISSION_DENIED
    assert code_of(data, PUSH_WEIGHTS, secured.bearer("other"), JOIN) is CODE.PERMISSION_DENIED
    # What a port refuses is counted with the rest.
    within(5, lambda: secured.metric("weightsync_refused_calls_total") == before + 4)
    lines = secured.refusals()[-2:]
    assert [(line["who"], line["method"]) for line in lines] == [
        ("read", "PushWeights"),
        ("other", "PushWeights"),
    ]
    assert all(line["time"] and line["peer"].startswith(("ipv4:", "ipv6:")) for line in lines)
    assert code_of(data, PUSH_WEIGHTS, secured.bearer("push"), JOIN) is CODE.NOT_FOUND
    for path in METHODS:
        if path != PUSH_WEIGHTS:
            assert code_of(data, path, secured.bearer("admin")) is CODE.UNIMPLEMENTED, path
            assert code_of(data, path) is CODE.UNAUTHENTICATED, path


def test_strangers_cannot_end_a_process_while_the_server_stands_still(secured: Secured) -> None:
    before = secured.metric("weightsync_refused_calls_total")
    restarts = secured.metric("weightsync_ingest_restarts_total")
    server = secured.server.process
    assert server is not None
    channels = [secured.channel(address=beside(secured, number)) for number in (1, 2)]
    for channel in channels:
        assert code_of(channel, PUSH_WEIGHTS, (), JOIN) is CODE.UNAUTHENTICATED
    server.send_signal(signal.SIGSTOP)
    try:
        # More than a socket holds messages.
        for _ in range(600):
            for channel in channels:
                assert code_of(channel, PUSH_WEIGHTS, (), JOIN) is CODE.UNAUTHENTICATED
    finally:
        server.send_signal(signal.SIGCONT)
    # What was refused before may be counted only now as well.
    within(10, lambda: secured.metric("weightsync_refused_calls_total") >= before + 1202)
    assert secured.metric("weightsync_ingest_restarts_total") == restarts


def test_a_model_out_of_scope_is_denied(secured: Secured, data: grpc.Channel) -> None:
    begin = pb.PushWeightsRequest(begin=pb.BeginPushRequest(model="elsewhere"))
    for channel in (secured.channel(), data):
        before = len(secured.audit())
        code = code_of(channel, PUSH_WEIGHTS, secured.bearer("push"), begin.SerializeToString())
        assert code is CODE.PERMISSION_DENIED
        # Whichever the door, the line is the same.
        within(5, partial(audited, secured, before + 1))
        (line,) = secured.audit()[before:]
        assert (line["who"], line["method"]) == ("push", "PushWeights")
        assert line["outcome"] == "PERMISSION_DENIED"


def test_a_push_goes_over_the_ports_and_leaves_its_lines(secured: Secured) -> None:
    before = len(secured.audit())
    ca = secured.ca.ca if secured.tls else ""
    access = Access(token=secured.tokens["push"], tls_ca=ca)
    with Client(secured.address, access=access, retry=Retry(attempts=1)) as client:
        version = client.push(ARRAYS, shard_bytes=150_000, delta="never", same_host="never").version
        assert client.status().ingest_processes == 2
    lines = [line for line in secured.audit()[before:] if line["method"] == "PushWeights"]
    # One tells the layouts; of the two with bytes one may have taken every shard alone.
    assert len(lines) in (2, 3)
    for line in lines:
        assert (line["who"], line["role"], line["outcome"]) == ("push", "push", "OK")
        assert line["version"] == version
        assert line["peer"].startswith(("ipv4:127.0.0.1:", "ipv6:"))
    assert secured.metric("weightsync_audit_lines_total") == len(secured.audit())
    assert secured.metric("weightsync_state_calls_total") == len(secured.audit())
    assert secured.metric("weightsync_invariant_violations_total") == 0


def test_ports_are_told_to_those_who_can_reach_them(secured: Secured) -> None:
    def told(channel: grpc.Channel, name: str = "") -> list[str]:
        stub = weightsync_pb2_grpc.WeightSyncStub(channel)
        metadata = secured.bearer(name) if name else ()
        begun = stub.BeginPush(pb.BeginPushRequest(model="default"), metadata=metadata, timeout=10)
        abort = pb.AbortPushRequest(push_id=begun.push_id)
        stub.AbortPush(abort, metadata=metadata, timeout=10)
        return sorted(begun.data_endpoints)

    ports = sorted([f":{secured.port + 1}", f":{secured.port + 2}"])
    assert told(secured.channel(), "push") == ports
    for role in (Role.PUSH, Role.ADMIN):
        socket = secured.socket(role)
        assert told(secured.channel(address=socket)) == [f"{socket}.1", f"{socket}.2"]
    for role in Role:
        there = Path(f"{secured.socket(role).removeprefix('unix:')}.1")
        assert there.exists() == RULES[PUSH_WEIGHTS].allows(frozenset({role}))
        if there.exists():
            own = Path(secured.socket(role).removeprefix("unix:"))
            assert there.stat().st_mode == own.stat().st_mode


def test_a_token_that_is_replaced_holds_at_once(secured: Secured, data: grpc.Channel) -> None:
    old = secured.bearer("push")
    secured.write(push=new_token())
    assert code_of(data, PUSH_WEIGHTS, old, JOIN) is CODE.UNAUTHENTICATED
    assert code_of(data, PUSH_WEIGHTS, secured.bearer("push"), JOIN) is CODE.NOT_FOUND
