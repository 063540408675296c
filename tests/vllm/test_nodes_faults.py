"""A real vLLM of two nodes (`--nnodes 2`, one rank on each) over loopback: both as one, or none.

Each node has a folder of sockets of its own, so that the second rank reaches the segments of its
own node's server and no others. That server dies in every phase.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.models import make_checkpoint
from tests.support.node_process import NodeProcess
from tests.support.stock import push_folder
from tests.support.vllm_nodes import NodesVllm
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.failpoints import VARIABLE
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.vllm, pytest.mark.battery, pytest.mark.timeout(900)]

_START_S, _SERVING_S = 600.0, 150.0
_PROMPT = "The quick brown fox"


class NodesSite:
    """The engine, the head, the other node's server, and a plan of faults for each of these two."""

    def __init__(self, root: Path) -> None:
        self.folders = {
            name: make_checkpoint(root / name, seed=seed) for seed, name in enumerate("ab")
        }
        self.plans = {name: root / f"{name}.plan" for name in ("head", "node")}
        points = {name: {VARIABLE: f"@{plan}"} for name, plan in self.plans.items()}
        self.vllm = NodesVllm(
            self.folders["a"],
            root / "run",
            tp=2,
            start_s=_START_S,
            flags=["--worker-extension-cls", "tests.support.live_extension.LiveExtension"],
            variables={"VLLM_SERVER_DEV_MODE": "1"},
            other_dir=root / "other",
        )
        self.head = WeightSyncServer(root / "run", root / "state", variables=points["head"])
        self.node = NodeProcess(self.head.address, root / "other", points["node"])
        self.answers: dict[str, Any] = {}
        self._joined = 0

    def start(self) -> None:
        for plan in self.plans.values():
            plan.write_text("")
        self.head.start()
        self.node.start()
        self.vllm.start()
        self.head.wait_serving(_SERVING_S)

    def stop(self) -> None:
        self.vllm.stop()
        self.node.kill()
        self.head.stop()

    def arm(self, where: str, plan: str) -> None:
        Path(f"{self.plans[where]}.hits").unlink(missing_ok=True)
        self.plans[where].write_text(plan)

    def met(self, where: str) -> bool:
        hits = Path(f"{self.plans[where]}.hits")
        return hits.exists() and bool(hits.read_text())

    def push(self, name: str) -> int:
        return push_folder(self.head.stub, self.folders[name]).version

    def apply(self, version: int) -> pb.ApplyReport:
        request = pb.ApplyVersionRequest(model="default", version=version)
        return self.head.stub.ApplyVersion(request, timeout=120).report

    def refused(self, version: int) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            self.apply(version)
        return from_call(caught.value)

    def kill_at(self, point: str) -> threading.Thread:
        """Kill the node's server when the head has come to a point of an apply."""
        self.arm("head", f"{point}=1*sleep(1)")

        def kill() -> None:
            _until(lambda: self.met("head"))
            self.node.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        return thread

    def recover(self) -> None:
        """Return when both servers are there and one version is served."""
        for where in self.plans:
            self.arm(where, "")
        joined = self.head.log.count("node 1 has joined")
        if self.node.process is not None and self.node.process.poll() is not None:
            self.node.start()
            _until(lambda: self.head.log.count("node 1 has joined") > joined)
        self.head.wait_serving(_SERVING_S)

    def digests(self) -> list[dict[str, str]]:
        """Return what each of the two ranks computes from, by code that is not ours."""
        status, reply = self.vllm.request("/collective_rpc", {"method": "live_digests"})
        assert status == 200, reply
        found: list[dict[str, str]] = reply["results"]
        return found

    def verify(self) -> None:
        request = pb.VerifyVersionRequest(model="default")
        answer = self.head.stub.VerifyVersion(request, timeout=60)
        assert answer.verified
        assert [rank.rank for rank in answer.ranks] == ["0/0/0", "0/0/1"]


def _until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def site() -> Iterator[NodesSite]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    root = Path(tempfile.mkdtemp(prefix="nv-"))
    site = NodesSite(root)
    try:
        site.start()
        yield site
    finally:
        site.stop()
        shutil.rmtree(root)


@pytest.fixture(autouse=True)
def whole(site: NodesSite) -> Iterator[None]:
    """One verified version is served before every test, and nothing was violated after it."""
    site.recover()
    yield
    site.recover()
    site.verify()
    status = site.head.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
    assert sum(status.invariant_violations.values()) == 0


def test_both_nodes_take_a_version_and_go_back_as_one(site: NodesSite) -> None:
    before, answer = site.digests(), site.vllm.complete(_PROMPT).tokens
    report = site.apply(site.push("b"))
    assert [rank.rank for rank in report.ranks] == ["0/0/0", "0/0/1"]
    assert len({rank.content_digest for rank in report.ranks}) == 1
    site.verify()
    after = site.digests()
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert site.vllm.complete(_PROMPT).tokens != answer
    site.head.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60)
    assert site.digests() == before
    assert site.vllm.complete(_PROMPT).tokens == answer


#: The other points are tried with engines in memory, in integration/test_engine_nodes.py.
def _often(often: str, *seldom: str) -> list[Any]:
    return [often, *(pytest.param(point, marks=pytest.mark.battery) for point in seldom)]


@pytest.mark.parametrize("point", _often("node.staged", "node.stage", "node.chunk", "node.report"))
def test_a_node_that_dies_before_the_pause_changes_nothing(site: NodesSite, point: str) -> None:
    before = site.digests()
    version = site.push("b")
    site.arm("node", f"{point}=panic")
    refusal = site.refused(version)
    assert site.met("node")
    # Its connections close a moment before it has ended.
    assert site.node.wait() == -signal.SIGKILL
    assert refusal.reason is Reason.SERVER_AWAY
    assert "node 1" in refusal.message
    assert site.digests() == before


@pytest.mark.parametrize(
    "point", _often("apply.commit", "apply.pause", "apply.committed", "apply.resumed")
)
def test_a_node_that_dies_later_on_never_leaves_it_half_done(site: NodesSite, point: str) -> None:
    before = site.digests()
    version = site.push("b")
    killing = site.kill_at(point)
    try:
        site.apply(version)
    finally:
        killing.join()
    after = site.digests()
    assert all(one != other for one, other in zip(before, after, strict=True))
    site.recover()
    site.head.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60)
    assert site.digests() == before
