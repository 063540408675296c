"""The debug service of a real server: there only when asked for, and never for strangers."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.support.weightsync_server import WeightSyncServer
from weightsync.debug.v1 import debug_pb2 as pb
from weightsync.debug.v1 import debug_pb2_grpc
from weightsync.failpoints import VARIABLE
from weightsync_server.push import is_here

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def _server(plan: str | None) -> Iterator[tuple[WeightSyncServer, debug_pb2_grpc.DebugServiceStub]]:
    root = Path(tempfile.mkdtemp(prefix="wd-"))
    value = plan.format(root=root) if plan is not None else None
    server = WeightSyncServer(
        root / "run",
        root / "state",
        flags=("--fetchers", "1"),
        variables={} if value is None else {VARIABLE: value},
    )
    try:
        server.start()
        with grpc.insecure_channel(server.address) as channel:
            yield server, debug_pb2_grpc.DebugServiceStub(channel)
    finally:
        server.stop()
        shutil.rmtree(root)


def test_a_server_without_failpoints_has_no_such_service() -> None:
    with _server(None) as (_, stub), pytest.raises(grpc.RpcError) as caught:
        stub.GetFailpoints(pb.GetFailpointsRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("value", ["apply.fence=1*sleep(0)", "@{root}/plan"])
def test_plans_are_set_told_and_followed(value: str) -> None:
    with _server(value) as (server, stub):
        asked = stub.GetFailpoints(pb.GetFailpointsRequest(), timeout=5)
        assert asked.plan == ("" if value.startswith("@") else value)
        stub.SetFailpoints(pb.SetFailpointsRequest(plan="journal.write=error"), timeout=5)
        assert stub.GetFailpoints(pb.GetFailpointsRequest(), timeout=5).plan == (
            "journal.write=error"
        )
        if value.startswith("@"):
            plan = server.run_dir.parent / "plan"
            assert plan.read_text() == "journal.write=error"
            Path(f"{plan}.hits").write_text("worker.half panic 77\n")
            (hit,) = stub.GetFailpoints(pb.GetFailpointsRequest(), timeout=5).hits
            assert (hit.name, hit.action, hit.pid) == ("worker.half", "panic", 77)
        for wrong in ("nonsense", "no.such=panic", "x" * (65 << 10)):
            with pytest.raises(grpc.RpcError) as caught:
                stub.SetFailpoints(pb.SetFailpointsRequest(plan=wrong), timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert stub.GetFailpoints(pb.GetFailpointsRequest(), timeout=5).plan == (
            "journal.write=error"
        )
        stub.SetFailpoints(pb.SetFailpointsRequest(), timeout=5)
        assert stub.GetFailpoints(pb.GetFailpointsRequest(), timeout=5).plan == ""


@pytest.mark.parametrize(
    ("peer", "near"),
    [
        ("unix:", True),
        ("unix:/run/x", True),
        ("ipv4:127.0.0.1:4711", True),
        ("ipv6:[::1]:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv4:10.0.0.1:4711", False),
        ("ipv4:128.0.0.1:127", False),
        ("ipv6:%5B::1:2%5D:4711", False),
        ("vsock:2:1", False),
        ("", False),
    ],
)
def test_only_this_host_is_near(peer: str, near: bool) -> None:
    assert is_here(peer) == near
