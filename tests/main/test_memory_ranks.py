"""The in-memory engine with three ranks behind the real bridge protocol and a real server."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.bounds import one_shard
from tests.support.memory_bridge import memory_bridge
from tests.support.stock import push_messages
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.testing import MemoryEngine
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from weightsync.testing.memory_rank import MemoryRank

_SIZE, _RANKS = 1000, 3
_MODES = pytest.mark.parametrize(
    "mode", [pb.PAUSE_MODE_KEEP, pb.PAUSE_MODE_BETWEEN_STEPS], ids=["keep", "between_steps"]
)


def _weight(seed: int) -> bytes:
    return one_shard(_SIZE, seed).data[-_SIZE:]


class Wrongly:
    """Takes the place of the `write` of a rank: one byte is wrong, `times` times."""

    def __init__(self, rank: MemoryRank) -> None:
        self.times = 0
        self._rank, self._write = rank, rank.write

    def __call__(self, tensors: Mapping[str, bytes]) -> None:
        self._write(tensors)
        if self.times:
            self.times -= 1
            live = self._rank.live
            live["weight"] = bytes([live["weight"][0] ^ 1]) + live["weight"][1:]


class Site:
    """A server, the engine and what was pushed."""

    def __init__(self, server: WeightSyncServer, engine: MemoryEngine) -> None:
        self.server, self.engine = server, engine
        self.wrong = Wrongly(engine.ranks[-1])
        setattr(engine.ranks[-1], "write", self.wrong)  # noqa: B010 - a method, to a type checker
        self.stub = server.stub
        #: What the server shall have counted in the end.
        self.violations = 0
        self._seed = 0

    def push(self) -> tuple[int, bytes]:
        self._seed += 1
        shard = one_shard(_SIZE, self._seed)
        answer = self.stub.PushWeights(push_messages([(shard.name, shard.data)], 0), timeout=20)
        return answer.commit.version, _weight(self._seed)

    def apply(self, version: int, mode: int) -> pb.ApplyReport:
        pause = pb.PauseOptions(mode=pb.PauseMode.ValueType(mode))
        request = pb.ApplyVersionRequest(model="default", version=version, pause=pause)
        return self.stub.ApplyVersion(request, timeout=20).report

    def refused(self, version: int, mode: int) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            self.apply(version, mode)
        return from_call(caught.value)

    @property
    def held(self) -> set[bytes]:
        return {rank.live["weight"] for rank in self.engine.ranks}


def _engine(tensors: Any, socket: Path) -> MemoryEngine:
    return MemoryEngine(tensors, socket, _RANKS)


@pytest.fixture
def site() -> Iterator[Site]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    folder = Path(tempfile.mkdtemp(prefix="mr-"))
    (folder / "run").mkdir()
    server = WeightSyncServer(folder / "run", folder / "state")
    checkpoint = {"weight": ("U8", (_SIZE,), _weight(0))}
    try:
        with memory_bridge(server.run_dir, checkpoint, _engine) as engine:
            server.start()
            server.wait_serving()
            site = Site(server, engine)
            yield site
            status = server.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
            assert sum(status.invariant_violations.values()) == site.violations
            assert server.stop() == 0
    finally:
        server.kill()
        shutil.rmtree(folder)


@_MODES
def test_every_rank_gets_a_version_proves_it_and_goes_back(site: Site, mode: int) -> None:
    version, weight = site.push()
    report = site.apply(version, mode)
    assert [rank.rank for rank in report.ranks] == ["0/0/0", "0/0/1", "0/0/2"]
    assert site.held == {weight}
    verified = site.stub.VerifyVersion(pb.VerifyVersionRequest(model="default"), timeout=20)
    assert verified.verified
    assert len(verified.ranks) == _RANKS
    site.stub.Rollback(pb.RollbackRequest(model="default", pause=report.pause), timeout=20)
    assert site.held == {_weight(0)}


@_MODES
def test_one_rank_that_writes_wrongly_takes_all_back(site: Site, mode: int) -> None:
    version, _ = site.push()
    site.wrong.times = 1
    refusal = site.refused(version, mode)
    assert refusal.reason is Reason.APPLY_RESTORED
    assert site.held == {_weight(0)}
    assert site.server.wait_serving().live_version == 1


@_MODES
def test_one_rank_that_cannot_go_back_fences_all_of_them(site: Site, mode: int) -> None:
    version, _ = site.push()
    site.wrong.times = 1000
    refusal = site.refused(version, mode)
    assert refusal.reason is Reason.ENGINE_FENCED
    assert site.engine._condition != "serving"
    site.wrong.times = 0
    # The server puts a version back as soon as it can.
    assert site.server.wait_serving().live_version == 1
    assert site.held == {_weight(0)}


def test_a_rank_that_holds_something_else_is_found(site: Site) -> None:
    version, _ = site.push()
    site.apply(version, pb.PAUSE_MODE_KEEP)
    site.engine.ranks[1].live["weight"] = _weight(9)
    verified = site.stub.VerifyVersion(pb.VerifyVersionRequest(model="default"), timeout=20)
    assert not verified.verified
    assert [rank.rank for rank in verified.ranks if rank.error] == ["0/0/1"]
    site.violations = 1
