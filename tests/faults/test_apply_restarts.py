"""A real server that dies in an apply or a rollback, and the same call to the next one.

The answer to the first call is lost each time. The second has one effect with the first, and tells
what was done: it applies nothing again and goes back once, never twice.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.support.memory_bridge import memory_bridge
from tests.support.stock import push_messages
from tests.support.weightsync_server import WeightSyncServer
from weightsync import failpoints
from weightsync.model.layout import build_header
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.testing import MemoryEngine

MODEL, SIZE = "default", 4096
#: Where the server dies, and whether every rank holds the new version by then.
POINTS = {
    "apply.prepared": False,
    "apply.intent": False,
    "apply.pause": False,
    "apply.commit": False,
    "apply.committed": True,
    "apply.resume": True,
    "apply.resumed": True,
    "journal.write=1": True,
    "apply.done": True,
}
#: Those that `make test` meets; the others are in the battery, because each costs seconds.
ALWAYS = ("apply.resumed",)


def _shard(seed: int) -> bytes:
    header, _ = build_header([("a", "U8", (SIZE,))])
    return len(header).to_bytes(8, "little") + header + bytes([seed]) * SIZE


@dataclass
class Site:
    """A server that dies where it is told to, beside an engine that lives on."""

    server: WeightSyncServer
    engine: MemoryEngine
    plan: Path
    begun: int = field(default=0)

    @property
    def seed(self) -> int:
        """What the engine's parameters are, one whole version."""
        (seed,) = set(self.engine.live["a"])
        return seed

    def push(self, seed: int) -> None:
        shards = [("s", _shard(seed))]
        self.server.stub.PushWeights(push_messages(shards, seed), timeout=20)

    def apply(self, version: int, key: str, *, between: bool = False) -> pb.ApplyReport:
        request = pb.ApplyVersionRequest(model=MODEL, version=version, idempotency_key=key)
        if between:
            request.pause.mode = pb.PAUSE_MODE_BETWEEN_STEPS
        return self.server.stub.ApplyVersion(request, timeout=20).report

    def rollback(self, key: str, reason: str = "it babbles") -> pb.RollbackResponse:
        request = pb.RollbackRequest(model=MODEL, idempotency_key=key, reason=reason)
        return self.server.stub.Rollback(request, timeout=20)

    def dies(self, point: str) -> None:
        """Let the server die at a point of the next call, after as many hits as are named."""
        name, _, skip = point.partition("=")
        self.plan.write_text(f"{name}={skip or 0}>panic")
        self.begun += self.commits

    def again(self) -> None:
        """Return when the next server serves one proved version."""
        process = self.server.process
        assert process is not None
        assert process.wait(20) == -9
        self.plan.unlink(missing_ok=True)
        self.restart()

    def restart(self) -> None:
        self.server.kill()
        self.server.start()
        self.server.wait_serving()

    @property
    def commits(self) -> int:
        """How often parameters were written since the server was told to die."""
        return sum(event in ("commit", "switch") for event in self.engine.events) - self.begun

    def version(self, version: int) -> pb.VersionInfo:
        request = pb.GetVersionRequest(model=MODEL, version=version)
        return self.server.stub.GetVersion(request, timeout=5).version

    def last(self) -> str:
        """The newest record of the journal."""
        return (self.server.state_dir / "journal").read_text().splitlines()[-1]


@pytest.fixture
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="wsa"))
    plan = folder / "plan"
    variables = {failpoints.VARIABLE: f"@{plan}"}
    server = WeightSyncServer(folder / "run", folder / "state", variables=variables)
    server.run_dir.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        checkpoint = {"a": ("U8", (SIZE,), bytes([1]) * SIZE)}
        engine = stack.enter_context(memory_bridge(server.run_dir, checkpoint))
        server.start()
        stack.callback(server.stop)
        server.wait_serving()
        yield Site(server, engine, plan)


def _timed(point: str) -> object:
    return pytest.param(point, marks=() if point in ALWAYS else pytest.mark.battery)


def _code(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    code: grpc.StatusCode = error.value.code()
    return code


@pytest.mark.parametrize("point", [_timed(point) for point in POINTS])
def test_an_apply_is_made_once(site: Site, point: str) -> None:
    site.push(2)
    site.push(3)
    site.dies(point)
    with pytest.raises(grpc.RpcError) as lost:
        # The newest, which is another one when the call is repeated.
        site.apply(0, "k")
    assert _code(lost) == grpc.StatusCode.UNAVAILABLE
    site.again()
    done = POINTS[point]
    assert site.seed == (3 if done else 1)
    if done:
        site.push(4)
    report = site.apply(0, "k")
    assert report.outcome == pb.APPLY_OUTCOME_APPLIED
    assert (report.version, report.previous_version) == (3, 1)
    assert report.content_digest == site.version(3).content_digest
    assert [rank.version for rank in report.ranks] == [3]
    assert report.apply_id in site.last()
    assert site.seed == 3
    assert site.commits == 1
    # The answer stays the same: to the next call, and to the next server.
    assert site.apply(0, "k") == report
    site.restart()
    assert site.apply(0, "k") == report
    assert site.seed == 3
    assert site.commits == 1
    with pytest.raises(grpc.RpcError, match="belongs to another request") as refused:
        site.apply(4, "k")
    assert _code(refused) == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError, match="belongs to another request"):
        site.rollback("k")


@pytest.mark.parametrize("point", [_timed(point) for point in POINTS if point != "apply.resume"])
def test_a_switch_between_two_steps_is_made_once(site: Site, point: str) -> None:
    site.push(2)
    site.dies(point)
    with pytest.raises(grpc.RpcError):
        site.apply(2, "k", between=True)
    site.again()
    assert site.seed == (2 if POINTS[point] else 1)
    report = site.apply(2, "k", between=True)
    assert (report.version, report.previous_version) == (2, 1)
    assert report.apply_id in site.last()
    assert (site.seed, site.commits) == (2, 1)
    assert "pause" not in site.engine.events
    with pytest.raises(grpc.RpcError, match="belongs to another request"):
        site.apply(2, "k")


@pytest.mark.parametrize("point", [_timed(point) for point in POINTS])
def test_a_rollback_goes_back_once(site: Site, point: str) -> None:
    for version in (2, 3):
        site.push(version)
        site.apply(version, f"to {version}")
    site.dies(point)
    with pytest.raises(grpc.RpcError):
        site.rollback("k")
    site.again()
    if POINTS[point]:
        # Whether or not it is asked again: "newest" must not go back to what was left.
        assert site.version(3).serving == pb.SERVING_REJECTED
        assert site.version(3).rejected_reason == "it babbles"
        assert site.apply(0, "").outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    first = site.rollback("k")
    assert (first.report.version, first.report.previous_version) == (2, 3)
    assert first.report.outcome == pb.APPLY_OUTCOME_APPLIED
    assert first.rejected_version == 3
    site.restart()
    assert site.rollback("k") == first
    assert site.seed == 2
    assert site.commits == 1
    assert site.version(3).rejected_reason == "it babbles"
    with pytest.raises(grpc.RpcError, match="belongs to another request"):
        site.rollback("k", "another reason")
    # The way back after a rollback lies before it, not at the version that was left.
    assert site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models[0].live_version == 2


@pytest.mark.battery
def test_killed_again_while_it_finds_out(site: Site) -> None:
    site.push(2)
    site.push(3)
    site.apply(2, "")
    site.dies("apply.resumed")
    with pytest.raises(grpc.RpcError):
        site.apply(3, "k")
    for point in ("apply.reconcile", "journal.write"):
        site.server.kill()
        site.plan.write_text(f"{point}=panic")
        with contextlib.suppress(RuntimeError, TimeoutError, grpc.RpcError):
            site.server.start()
            site.server.wait_serving()
        assert site.server.process is not None
        assert site.server.process.wait(20) == -9
    site.again()
    report = site.apply(3, "k")
    assert (report.outcome, report.previous_version) == (pb.APPLY_OUTCOME_APPLIED, 2)
    assert site.commits == 1
    assert site.rollback("back").report.version == 2
