"""A second server on the same engine: who lives keeps it, who has died is replaced at once."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.servers import free_port
from tests.support.following import until
from tests.support.several_engines import engine_host
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.several_engines import EngineHost

pytestmark = pytest.mark.timeout(240)

LEASE_S = 2.0


@pytest.fixture
def host() -> Iterator[EngineHost]:
    with engine_host(f"--pause-lease-s={LEASE_S}", named=("a",)) as made:
        made.appear("a")
        made.all_serve(0)
        yield made
        assert made.mixtures == []
        assert "Traceback" not in made.server.log, made.server.log


@pytest.fixture
def http() -> str:
    """Address of the other server's HTTP API."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def second(host: EngineHost, http: str) -> Iterator[WeightSyncServer]:
    """Another server, not started, with folders of its own."""
    folder = host.folder.parent
    flags = [f"--engine=unix:{host.folder}/a.sock", f"--pause-lease-s={LEASE_S}", f"--http={http}"]
    made = WeightSyncServer(folder / "run2", folder / "state2", flags=flags)
    yield made
    made.kill()
    assert "Traceback" not in made.log, made.log


def _engine(server: WeightSyncServer) -> pb.EngineStatus:
    return server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models[0].engine


def _owned(server: WeightSyncServer, owner: WeightSyncServer) -> bool:
    """Whether a server says in its status that another one has the engine."""
    assert owner.process is not None
    engine = _engine(server)
    named = f"(pid {owner.process.pid}, run_dir {owner.run_dir})" in engine.reason
    return named and engine.state == pb.ENGINE_STATE_AWAY


def _is_healthy(server: WeightSyncServer) -> bool:
    """Whether the health service says that an engine serves."""
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="serving"), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _pid(server: WeightSyncServer) -> int:
    assert server.process is not None
    return server.process.pid


def _beside_the_engine(server: WeightSyncServer, run_dir: Path) -> None:
    """Let the engine's ranks find the segments of another server than the one they began with."""
    path = run_dir / "segments.sock"
    path.unlink(missing_ok=True)
    path.symlink_to(server.segment_socket)


@pytest.mark.parametrize("starts", [2, pytest.param(20, marks=pytest.mark.battery)])
def test_a_newcomer_takes_nothing_from_an_owner_that_applies_and_answers(
    host: EngineHost, second: WeightSyncServer, http: str, starts: int
) -> None:
    content = 0
    cause = f"stop the other weightsync-server (pid {_pid(host.server)}, run_dir "
    cause += f"{host.server.run_dir}), or name another engine here"
    for start in range(starts):
        second.start()
        begun = content
        while not _owned(second, host.server) or content == begun:
            content += 1
            host.push(content % 8)
            with host.client as client:
                client.apply()
            assert host.serves()["a"] == content % 8
        with Client(second.address) as client, pytest.raises(ClientError) as caught:
            client.apply()
        assert caught.value.reason == Reason.ENGINE_OWNED
        assert caught.value.message.startswith(cause)
        assert (_is_healthy(host.server), _is_healthy(second)) == (True, False)
        health = httpx.get(f"http://{http}/health")
        assert (health.status_code, health.json()["error"]) == (503, caught.value.message)
        # Once a life, however often it asks.
        assert second.log.count(f"engine a: {cause}") == start + 1
        second.kill() if start % 2 else second.stop()
        assert host.serves()["a"] == content % 8
    host.all_serve(content % 8)
    assert "stop the other" not in host.server.log


def test_who_has_died_is_replaced_and_takes_the_engine_back_when_the_other_has_gone(
    host: EngineHost, second: WeightSyncServer
) -> None:
    second.start()
    until(lambda: _owned(second, host.server), "the newcomer is refused by name")
    host.server.kill()
    _beside_the_engine(second, host.server.run_dir)
    second.wait_serving()
    (host.server.run_dir / "segments.sock").unlink()
    host.server.start()
    until(lambda: _owned(host.server, second), "the first one is the newcomer now")
    second.kill()
    until(lambda: host.serves()["a"] == 0, "the engine generates what is proved")
    host.all_serve(0)
    host.push(1)
    with host.client as client:
        client.apply()
    host.all_serve(1)


@pytest.mark.parametrize("point", [pytest.param("", marks=pytest.mark.battery), "apply.committed"])
def test_an_owner_that_stands_still_longer_than_its_lease_keeps_the_engine(
    host: EngineHost, second: WeightSyncServer, point: str
) -> None:
    second.start()
    until(lambda: _owned(second, host.server), "the newcomer is refused by name")
    host.push(1)
    if point:
        host.plan(f"{point}=1*stop")
        call = host.apply_once(pb.ApplyVersionRequest(model="default"))
        with host.stopped_at(point):
            _stay(second, host)
        call.join()
    else:
        os.kill(_pid(host.server), signal.SIGSTOP)
        _stay(second, host)
        os.kill(_pid(host.server), signal.SIGCONT)
    host.settle({0, 1})
    host.push(2)
    with host.client as client:
        client.apply()
    host.all_serve(2)


def _stay(second: WeightSyncServer, host: EngineHost) -> None:
    end = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < end:
        assert _owned(second, host.server)
        time.sleep(0.1)


def test_an_engine_that_restarts_comes_back_to_the_server_that_had_it(
    host: EngineHost, second: WeightSyncServer
) -> None:
    host.push(1)
    with host.client as client:
        client.apply()
    second.start()
    until(lambda: _owned(second, host.server), "the newcomer is refused by name")
    host.engines.pop("a").stop()
    host.appear("a")
    host.all_serve(1)
    until(lambda: _owned(second, host.server), "the newcomer is refused still")
