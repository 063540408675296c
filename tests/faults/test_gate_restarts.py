"""A real server that dies while the probes of a version are scored, and the next one.

Nobody is served by a version that its gate has not let go: the engine stands still until the next
server has read the journal.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.support.memory_bridge import memory_bridge
from tests.support.stock import push_messages
from tests.support.weightsync_server import WeightSyncServer
from weightsync import failpoints
from weightsync.model.layout import build_header
from weightsync.testing import memory_logprobs
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.testing import MemoryEngine

MODEL, SIZE = "default", 4096
#: Where the server dies, and what the next one has the engine serve.
POINTS = {"gate.score": 1, "gate.scored": 1, "gate.decide": 1, "gate.decided": 2}


def _shard(seed: int) -> bytes:
    header, _ = build_header([("a", "U8", (SIZE,))])
    return len(header).to_bytes(8, "little") + header + bytes([seed]) * SIZE


def _probes(seed: int) -> pb.Probes:
    tokens = list(range(20))
    logprobs = memory_logprobs({"a": bytes([seed]) * SIZE}, tokens)
    return pb.Probes(probes=[pb.Probe(tokens=tokens, logprobs=logprobs)])


class Site:
    def __init__(self, server: WeightSyncServer, engine: MemoryEngine, plan: Path) -> None:
        self.server, self.engine, self.plan = server, engine, plan

    def push(self, seed: int, probes: pb.Probes) -> None:
        *messages, last = push_messages([("s", _shard(seed))], seed)
        last.commit.probes.CopyFrom(probes)
        self.server.stub.PushWeights(iter([*messages, last]), timeout=20)

    def apply(
        self, version: int, key: str, when: pb.GateWhen.ValueType = pb.GATE_WHEN_UNSPECIFIED
    ) -> pb.ApplyReport:
        gate = pb.GateOptions(when=when)
        request = pb.ApplyVersionRequest(
            model=MODEL, version=version, idempotency_key=key, gate=gate
        )
        return self.server.stub.ApplyVersion(request, timeout=20).report

    @property
    def seed(self) -> int:
        """What the engine generates with, one whole version; 0: it stands still."""
        (seed,) = set(self.engine.live["a"])
        return seed if self.engine._condition == "serving" else 0


@pytest.fixture
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="wsg"))
    plan = folder / "plan"
    variables = {failpoints.VARIABLE: f"@{plan}", "WEIGHTSYNC_PAUSE_LEASE_S": "2"}
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


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point == "gate.scored" else pytest.mark.battery)
        for point in POINTS
    ],
)
def test_a_server_that_dies_while_it_scores_lets_nothing_go(site: Site, point: str) -> None:
    site.push(2, _probes(2))
    site.plan.write_text(f"{point}=panic")
    with pytest.raises(grpc.RpcError):
        site.apply(2, "k")
    process = site.server.process
    assert process is not None
    assert process.wait(20) == -9
    assert site.seed == 0
    # The lease of its pause runs out, and nothing is resumed.
    end = time.monotonic() + 20
    while "expire" not in site.engine.events:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert site.seed == 0
    site.plan.unlink()
    site.server.kill()
    site.server.start()
    site.server.wait_serving()
    assert site.seed == POINTS[point]
    # The call that lost its answer has one effect, with the first or of its own.
    report = site.apply(2, "k")
    assert (report.version, site.seed) == (2, 2)


def test_probes_outlive_the_server_and_a_bad_version_does_not_serve(site: Site) -> None:
    site.push(2, _probes(3))
    site.server.kill()
    site.server.start()
    site.server.wait_serving()
    request = pb.GetVersionRequest(model=MODEL, version=2)
    found = site.server.stub.GetVersion(request, timeout=5)
    assert (found.version.probe_count, found.probes) == (1, _probes(3))
    with pytest.raises(grpc.RpcError) as caught:
        site.apply(2, "k")
    assert caught.value.code() == grpc.StatusCode.ABORTED
    assert "version 2 answers its probes unlike its trainer" in (caught.value.details() or "")
    assert site.seed == 1
    found = site.server.stub.GetVersion(request, timeout=5)
    assert found.version.serving == pb.SERVING_REJECTED
    # It is answered again, and nothing is repeated.
    scores = site.engine.events.count("score")
    with contextlib.suppress(grpc.RpcError):
        site.apply(2, "k")
    assert site.engine.events.count("score") == scores


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point == "gate.refused" else pytest.mark.battery)
        for point in ("gate.refused", "apply.restore", "apply.restored")
    ],
)
def test_a_server_that_dies_over_what_it_refused_leaves_it_when_it_is_back(
    site: Site, point: str
) -> None:
    after = point == "gate.refused"
    site.push(2, _probes(3))
    site.plan.write_text(f"{point}=panic")
    when = pb.GATE_WHEN_AFTER if after else pb.GATE_WHEN_BEFORE
    with pytest.raises(grpc.RpcError):
        site.apply(2, "k", when)
    process = site.server.process
    assert process is not None
    assert process.wait(20) == -9
    assert site.seed == (2 if after else 0)
    site.plan.unlink()
    site.server.kill()
    site.server.start()
    site.server.wait_serving()
    assert site.seed == 1
    # Nothing is answered for the call that lost its server; it is refused, or scored once more.
    with pytest.raises(grpc.RpcError) as caught:
        site.apply(2, "k", when)
    assert caught.value.code() == grpc.StatusCode.ABORTED
    assert site.seed == 1
