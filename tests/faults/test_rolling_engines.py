"""Engines that go one after the other: the server, or one of them, dies or freezes in the middle.

Each serves one whole version then, and not all of them the same one: the call that is repeated, or
what was written down, brings them together again.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.following import until
from tests.support.several_engines import engine_host
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import EngineState

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from tests.support.several_engines import EngineHost

pytestmark = pytest.mark.timeout(180)

NAMES = ("a", "b", "c")
#: Renewed long before, also by a server that gets little of the processor.
LEASE_S = 2.0
FLAGS = (f"--pause-lease-s={LEASE_S}", "--commit-timeout-s=3", "--prepare-timeout-s=20")
_SELDOM = pytest.mark.battery


@pytest.fixture
def host() -> Iterator[EngineHost]:
    with engine_host(*FLAGS) as made:
        made.appear(*NAMES)
        made.all_serve(0)
        yield made
        torn = [seen for seen in made.mixtures if any("," in one for one in seen.values())]
        assert torn == [], "two versions within an engine"
        assert "Traceback" not in made.server.log, made.server.log


def _request() -> pb.ApplyVersionRequest:
    order = pb.ENGINE_ORDER_ROLLING
    return pb.ApplyVersionRequest(model="default", idempotency_key="once", order=order)


def _roll(host: EngineHost) -> threading.Thread:
    return host.apply_once(_request())


def _all_generate(host: EngineHost) -> bool:
    return None not in host.serves().values()


def _known(host: EngineHost) -> None:
    """Return when the server knows what every engine serves."""

    def so() -> bool:
        status = host.status()
        states = {one.state for one in status.values()}
        return status.keys() == host.engines.keys() and states == {EngineState.SERVING}

    until(so, "the server knows what they serve")


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("1>1*panic@apply.intent", marks=_SELDOM),
        pytest.param("1>1*panic@apply.pause", marks=_SELDOM),
        "1>1*panic@apply.commit",
        pytest.param("1>1*panic@apply.committed", marks=_SELDOM),
        pytest.param("1>1*panic@apply.resume", marks=_SELDOM),
        "1>1*panic@apply.resumed",
        pytest.param("1>1*panic@apply.done", marks=_SELDOM),
        "panic@host.done",
    ],
)
def test_the_server_is_killed_when_one_has_gone(host: EngineHost, point: str) -> None:
    action, _, name = point.partition("@")
    version = host.push(1)
    host.plan(f"{name}={action}")
    call = _roll(host)
    until(lambda: host.died, f"the server dies at {name}")
    # What stood still goes on by itself, with what its ranks hold.
    until(lambda: _all_generate(host), "all generate")
    alone = host.serves()
    assert alone["a"] == 1
    assert alone["c"] == (1 if name == "host.done" else 0)
    host.restart()
    call.join()
    _known(host)
    # None of them was led anywhere by that: who was told nothing asks again.
    assert host.serves() == alone
    report = host.server.stub.ApplyVersion(_request(), timeout=60).report
    assert report.version == version
    host.all_serve(1)
    with host.client as client:
        assert client.verify().verified
        assert client.rollback().report.version < version
    host.all_serve(0)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("apply.pause", marks=_SELDOM),
        "apply.commit",
        pytest.param("apply.resume", marks=_SELDOM),
    ],
)
@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=_SELDOM)])
def test_the_second_dies_or_freezes_and_the_first_goes_back(
    host: EngineHost, point: str, blow: signal.Signals
) -> None:
    host.push(1)
    host.plan(f"{point}=1>1*stop")
    call = _roll(host)
    (pid,) = host.engines["b"].pids()
    with host.stopped_at(point):
        assert host.serves()["a"] == 1
        os.kill(pid, blow)
    if blow is signal.SIGSTOP:
        # Longer than its lease.
        time.sleep(1.5 * LEASE_S)
    else:
        # Until it is known without it, or as long.
        call.join(1.5 * LEASE_S)
    assert host.serves()["c"] == 0
    if blow is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    else:
        host.disappear("b")
        host.appear("b")
    call.join()
    # One that wakes up with the version may have it served, and the others follow.
    host.settle({0, 1} if blow is signal.SIGSTOP else {0})
    host.push(2)
    with host.client as client:
        client.apply(order="rolling")
    host.all_serve(2)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("apply.intent=2>1*panic", marks=_SELDOM),
        "apply.commit=2>1*panic",
        pytest.param("apply.resumed=1>1*panic", marks=_SELDOM),
    ],
)
def test_the_server_is_killed_while_the_first_goes_back(host: EngineHost, point: str) -> None:
    version = host.push(1)
    host.plan(f"apply.committed=1>1*stop;{point}")
    call = _roll(host)
    (pid,) = host.engines["b"].pids()
    # The second has the version.
    with host.stopped_at("apply.committed"):
        os.kill(pid, signal.SIGKILL)
    until(lambda: host.died, "the server dies while it puts the first back")
    host.disappear("b")
    until(lambda: _all_generate(host), "the first goes on with what it holds")
    alone = host.serves()
    assert alone == {"a": 0 if point.startswith("apply.resumed") else 1, "c": 0}
    host.appear("b")
    host.restart()
    call.join()
    _known(host)
    assert {name: host.serves()[name] for name in alone} == alone
    # Nobody was told anything, so that the call begins anew.
    report = host.server.stub.ApplyVersion(_request(), timeout=60).report
    assert report.version == version
    host.all_serve(1)
