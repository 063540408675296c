"""An engine of two nodes: a real head, a real node's server, and a rank that sees only the latter.

The engine is the in-memory one behind the real bridge protocol; its second rank opens segments at
the other node's socket alone. The real vLLM is in tests/vllm/test_nodes_faults.py.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.bounds import one_shard
from tests.support.memory_bridge import memory_bridge
from tests.support.node_process import NodeProcess
from tests.support.stock import push_messages
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.testing import MemoryEngine
from weightsync.testing.memory_rank import MemoryRank
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.engine import EngineInfo

pytestmark = pytest.mark.timeout(120)

_SIZE = 3_000_000
_KEEP = pb.PauseOptions(mode=pb.PAUSE_MODE_KEEP)


class _TwoNodes(MemoryEngine):
    """Its second rank is on another node."""

    def __init__(self, tensors: Any, socket: Path, other: Path) -> None:
        super().__init__(tensors, socket)
        self.ranks = (self, MemoryRank("0/0/1", tensors, other, self._serving))

    async def hello(self) -> EngineInfo:
        return dataclasses.replace(await super().hello(), nodes=2)


def _weight(seed: int) -> bytes:
    return one_shard(_SIZE, seed).data[-_SIZE:]


class Site:
    """A head, the engine, the other node's server, and a plan of faults for each of the two.

    Attributes:
        version: What the engine served when the test began.
        weight: Its bytes.
    """

    version: int
    weight: bytes

    def __init__(self, folder: Path) -> None:
        self.plans = {name: folder / f"{name}.plan" for name in ("head", "node")}
        head, node = (
            {"WEIGHTSYNC_FAILPOINTS": f"@{self.plans[name]}"} for name in ("head", "node")
        )
        self.head = WeightSyncServer(folder / "run", folder / "state", variables=head)
        self.node = NodeProcess(self.head.address, folder / "other", node)
        self.engine: Any = None
        self._seed = 0
        self._log_start = 0

    def made(self, tensors: Any, socket: Path) -> MemoryEngine:
        return _TwoNodes(tensors, socket, self.node.segment_socket)

    def begin(self) -> None:
        """Begin a test: both servers run, and the engine serves."""
        self._disarm()
        self.start_head()
        if self.node.process is None or self.node.process.poll() is not None:
            self.start_node()
        self.until_joined()
        self.version = self.head.wait_serving(30).live_version
        (self.weight,) = self.held
        for plan in self.plans.values():
            Path(f"{plan}.hits").unlink(missing_ok=True)

    def start_head(self) -> None:
        """Start it, unless it runs."""
        if self.head.process is None or self.head.process.poll() is not None:
            self._log_start = len(self.head.log) if self.head.process else 0
            self.head.start()

    def start_node(self) -> None:
        self._log_start = len(self.head.log)
        self.node.start()

    def until_joined(self) -> None:
        """Return when the node that was started last has joined the head that was."""
        _until(lambda: "node 1 has joined" in self.new_log)

    @property
    def new_log(self) -> str:
        """What the head has printed since a server was started."""
        return self.head.log[self._log_start :]

    def arm(self, where: str, plan: str) -> None:
        self.plans[where].write_text(plan)

    def _disarm(self) -> None:
        for where in self.plans:
            self.arm(where, "")

    def met(self, where: str) -> bool:
        hits = Path(f"{self.plans[where]}.hits")
        return hits.exists() and bool(hits.read_text())

    def push(self) -> tuple[int, bytes]:
        self._seed += 1
        shard = one_shard(_SIZE, self._seed)
        messages = push_messages([(shard.name, shard.data)], 0)
        answer = self.head.stub.PushWeights(messages, timeout=30)
        return answer.commit.version, _weight(self._seed)

    def apply(self, version: int) -> pb.ApplyReport:
        request = pb.ApplyVersionRequest(model="default", version=version, pause=_KEEP)
        return self.head.stub.ApplyVersion(request, timeout=40).report

    def refused(self, version: int) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            self.apply(version)
        return from_call(caught.value)

    def kill_when_met(self) -> threading.Thread:
        """Kill the node's server when the head has come to what it was armed with."""

        def kill() -> None:
            _until(lambda: self.met("head"))
            self.node.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        return thread

    def recover(self) -> int:
        """Return what is served when an apply is possible again."""
        self._disarm()
        if self.node.process is not None and self.node.process.poll() is not None:
            self.start_node()
            self.until_joined()
        return self.head.wait_serving(30).live_version

    @property
    def held(self) -> set[bytes]:
        return {rank.live["weight"] for rank in self.engine.ranks}


@pytest.fixture(name="one_site", scope="module")
def _one_site() -> Iterator[Site]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    folder = Path(tempfile.mkdtemp(prefix="en-"))
    (folder / "run").mkdir()
    site = Site(folder)
    checkpoint = {"weight": ("U8", (_SIZE,), _weight(0))}
    try:
        with memory_bridge(site.head.run_dir, checkpoint, site.made) as site.engine:
            yield site
            site.begin()
            assert site.node.stop() == 0
            assert site.head.stop() == 0
    finally:
        site.node.kill()
        site.head.kill()
        shutil.rmtree(folder)


@pytest.fixture
def site(one_site: Site) -> Iterator[Site]:
    one_site.begin()
    yield one_site
    status = one_site.head.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
    assert sum(status.invariant_violations.values()) == 0, one_site.head.log


def _until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _battery(*points: str) -> list[Any]:
    return [pytest.param(point, marks=pytest.mark.battery) for point in points]


def test_both_nodes_get_a_version_prove_it_and_go_back(site: Site) -> None:
    weights = []
    for _ in range(4):
        version, weight = site.push()
        report = site.apply(version)
        assert [rank.rank for rank in report.ranks] == ["0/0/0", "0/0/1"]
        assert len({rank.content_digest for rank in report.ranks}) == 1
        assert site.held == {weight}
        weights.append(weight)
    site.head.stub.Rollback(pb.RollbackRequest(model="default", pause=_KEEP), timeout=30)
    assert site.held == {weights[-2]}
    verified = site.head.stub.VerifyVersion(pb.VerifyVersionRequest(model="default"), timeout=30)
    assert verified.verified
    assert len(verified.ranks) == 2


def test_a_node_without_a_server_is_named_and_nothing_changes(site: Site) -> None:
    version, weight = site.push()
    site.node.kill()
    # Its call has ended at the head as well.
    _until(lambda: "node 1 has exited" in site.new_log)
    refusal = site.refused(version)
    assert refusal.reason is Reason.SERVER_AWAY
    assert "--node-rank 1" in refusal.message
    assert site.held == {site.weight}
    assert site.head.wait_serving().live_version == site.version
    site.recover()
    site.apply(version)
    assert site.held == {weight}


@pytest.mark.parametrize(
    "point", ["node.stage", "node.report", *_battery("node.chunk", "node.staged")]
)
def test_a_node_that_dies_before_the_pause_changes_nothing(site: Site, point: str) -> None:
    version, weight = site.push()
    site.arm("node", f"{point}=panic")
    refusal = site.refused(version)
    assert refusal.reason is Reason.SERVER_AWAY
    assert "node 1" in refusal.message
    assert site.met("node")
    # Its connections close a moment before it has ended.
    assert site.node.wait() == -signal.SIGKILL
    assert site.held == {site.weight}
    assert site.recover() == site.version
    site.apply(version)
    assert site.held == {weight}


def test_a_node_that_is_frozen_counts_as_gone(site: Site) -> None:
    version, weight = site.push()
    site.arm("node", "node.chunk=stop")
    refusal = site.refused(version)
    assert refusal.reason is Reason.SERVER_AWAY
    assert site.held == {site.weight}
    site.node.kill()
    assert site.recover() == site.version
    site.apply(version)
    assert site.held == {weight}


@pytest.mark.parametrize(
    "point",
    [
        "apply.prepared",
        "apply.commit",
        "apply.resumed",
        *_battery("apply.intent", "apply.pause", "apply.committed", "apply.resume", "apply.done"),
    ],
)
def test_a_node_that_dies_later_on_never_leaves_it_half_done(site: Site, point: str) -> None:
    version, weight = site.push()
    site.arm("head", f"{point}=sleep(1)")
    killing = site.kill_when_met()
    try:
        site.apply(version)
    finally:
        killing.join()
    # Every rank has mapped the version: whoever staged it is needed no more.
    assert site.held == {weight}
    assert site.recover() == version
    site.head.stub.Rollback(pb.RollbackRequest(model="default", pause=_KEEP), timeout=30)
    assert site.held == {site.weight}


def test_what_one_node_writes_wrongly_is_taken_back_on_both(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, _ = site.push()
    rank = site.engine.ranks[1]
    write, left = rank.write, [1]

    def wrongly(tensors: dict[str, bytes]) -> None:
        write(tensors)
        if left:
            left.pop()
            rank.live["weight"] = bytes(_SIZE)

    monkeypatch.setattr(rank, "write", wrongly)
    # Its server is gone too when the version before is put back.
    site.arm("head", "apply.restore=sleep(1)")
    killing = site.kill_when_met()
    try:
        assert site.refused(version).reason is Reason.APPLY_RESTORED
    finally:
        killing.join()
    assert site.held == {site.weight}
    assert site.recover() == site.version


def test_a_head_that_comes_back_finds_the_node_and_proves_both(site: Site) -> None:
    version, weight = site.push()
    site.apply(version)
    site.head.kill()
    site.start_head()
    assert site.head.wait_serving().live_version == version
    again, other = site.push()
    site.apply(again)
    assert weight != other
    assert site.held == {other}


def test_an_engine_does_not_serve_before_all_its_nodes_have_a_server(site: Site) -> None:
    site.node.kill()
    site.head.kill()
    site.engine.restart({"weight": site.weight})
    site.start_head()
    (model,) = site.head.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
    _until(lambda: "node 1 of this engine has no weightsync-server" in site.new_log)
    assert model.engine.state != pb.ENGINE_STATE_SERVING
    assert site.recover() == site.version


def test_memory_that_no_version_needs_is_given_back_on_the_node(site: Site) -> None:
    # A new one, which holds nothing of other tests.
    site.node.kill()
    site.recover()
    assert site.node.process is not None
    status = Path(f"/proc/{site.node.process.pid}/fd")

    def memfds() -> int:
        links = [link.readlink().name for link in status.iterdir() if link.is_symlink()]
        return sum("weightsync" in name for name in links)

    counts = []
    for _ in range(6):
        version, _ = site.push()
        site.apply(version)
        counts.append(memfds())
    # What it lets go of it closes a moment after the apply.
    _until(lambda: memfds() <= counts[2])
