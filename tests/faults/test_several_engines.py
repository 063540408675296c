"""Several engines that go together: the server, or one of them, dies or freezes in every phase.

Meanwhile it is looked all the time that no engine generates with one version while another one
generates with another.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.following import until
from tests.support.several_engines import engine_host
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import EngineState

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator

    from tests.support.several_engines import EngineHost

pytestmark = pytest.mark.timeout(180)

NAMES = ("a", "b", "c")
#: Renewed long before, also by a server that gets little of the processor.
LEASE_S = 2.0
#: Where nothing is paused yet; where all stand or will stand, undecided; where it is decided.
BEFORE = ("apply.begin", "apply.prepared", "host.intent")
UNDECIDED = ("host.still", "apply.commit", "apply.committed", "host.decide")
DECIDED = ("host.decided", "apply.resume", "apply.resumed", "host.done")
FLAGS = (f"--pause-lease-s={LEASE_S}", "--commit-timeout-s=3", "--prepare-timeout-s=20")


@pytest.fixture
def host() -> Iterator[EngineHost]:
    with engine_host(*FLAGS) as made:
        made.appear(*NAMES)
        made.all_serve(0)
        yield made
        assert made.mixtures == []
        assert "Traceback" not in made.server.log, made.server.log


def _apply(host: EngineHost, key: str = "") -> threading.Thread:
    return host.apply_once(pb.ApplyVersionRequest(model="default", idempotency_key=key))


#: Tried in every run; the others take long and tell little more.
OFTEN = ("apply.commit", "host.decide", "host.decided", "host.done")


def _seldom(points: Iterable[str]) -> list[Any]:
    often = {point: () if point in OFTEN else pytest.mark.battery for point in points}
    return [pytest.param(point, marks=marks) for point, marks in often.items()]


@pytest.mark.parametrize("point", _seldom([*BEFORE, "apply.pause", *UNDECIDED, *DECIDED]))
def test_the_server_is_killed_at_every_point(host: EngineHost, point: str) -> None:
    host.push(1)
    host.plan(f"{point}=panic")
    call = _apply(host)
    until(lambda: host.died, f"the server dies at {point}")
    host.leases_end()
    alone = set(host.serves().values())
    if point in BEFORE:
        assert alone == {0}
    elif point in UNDECIDED or point == "host.decided":
        assert alone == {None}, "they stand still and ask"
    elif point == "apply.pause":
        assert alone <= {0, None}
    elif point == "host.done":
        assert alone == {1}
    else:
        assert alone <= {1, None}
    host.restart()
    call.join()
    host.all_serve(1 if point in DECIDED else 0)
    host.push(2)
    with host.client as client:
        assert len(client.apply().engines) == len(NAMES)
    host.all_serve(2)
    with host.client as client:
        assert client.verify().verified


@pytest.mark.parametrize("point", ["host.intent", "host.still", "host.decide"])
@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.battery)]
)
def test_one_engine_dies_or_freezes_before_the_decision(
    host: EngineHost, point: str, blow: signal.Signals
) -> None:
    _strike(host, point, blow)
    # One that wakes up may still be proved; what is decided then is so for all.
    host.settle({0, 1} if blow is signal.SIGSTOP or point == "host.decide" else {0})
    host.push(2)
    with host.client as client:
        client.apply()
    host.all_serve(2)


@pytest.mark.parametrize("point", _seldom(["host.decided", "apply.resume", "apply.resumed"]))
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_one_engine_dies_or_freezes_after_the_decision(
    host: EngineHost, point: str, blow: signal.Signals
) -> None:
    _strike(host, point, blow)
    host.all_serve(1)


def _strike(host: EngineHost, point: str, blow: signal.Signals) -> None:
    """Kill or freeze an engine while an apply waits at a point, and have it back afterwards."""
    host.push(1)
    host.plan(f"{point}=1*stop")
    call = _apply(host)
    (pid,) = host.engines["b"].pids()
    with host.stopped_at(point):
        os.kill(pid, blow)
    if blow is signal.SIGSTOP:
        # Longer than its lease.
        time.sleep(1.5 * LEASE_S)
        os.kill(pid, signal.SIGCONT)
    else:
        # Until it is known without it, or as long.
        call.join(1.5 * LEASE_S)
        host.disappear("b")
        host.appear("b")
    call.join()


def test_a_server_that_stays_away_leaves_engines_that_stand_still(host: EngineHost) -> None:
    host.push(1)
    host.plan("host.still=stop")
    call = _apply(host)
    until(lambda: host.hit("host.still"), "the server stops")
    until(lambda: set(host.serves().values()) == {None}, "all stand still")
    host.leases_end()
    assert set(host.serves().values()) == {None}
    host.restart()
    call.join()
    host.all_serve(0)
    assert {one.state for one in host.status().values()} == {EngineState.SERVING}


def test_a_call_that_was_lost_is_answered_by_the_next_server(host: EngineHost) -> None:
    version = host.push(1)
    host.plan("host.decided=panic")
    call = _apply(host, "once")
    until(lambda: host.died, "the server dies")
    host.restart()
    call.join()
    host.all_serve(1)
    newest = host.push(2)
    request = pb.ApplyVersionRequest(model="default", version=0, idempotency_key="once")
    report = host.server.stub.ApplyVersion(request, timeout=60).report
    assert (report.version, report.previous_version) == (version, 1)
    host.all_serve(1)
    with host.client as client:
        assert client.apply(newest).version == newest
    host.all_serve(2)
