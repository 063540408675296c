"""Deltas and a real server: killed midway, with fetchers that die, with links that are cut.

Whatever happens: every acknowledged version comes back byte for byte as full shards, and the push
that was under way goes on to its end.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.bounds import within
from tests.support.deltas import delta_begin, delta_of, every_dtype, pulled, push_version, stepped
from tests.support.weightsync_server import WeightSyncServer
from tests.unit.server.world import content
from weightsync import failpoints
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.server.world import Shard

#: In the server's process; how often it is passed first, so that it is met in the delta.
SERVER = {
    "receive.begin": 0,
    "receive.record": 0,
    "receive.chunk": 2,
    "receive.keep": 0,
    "receive.shard": 1,
    "commit.seal": 0,
    "delta.patched": 1,
    "commit.store": 0,
    "store.manifest": 0,
    "store.record": 0,
    "store.recorded": 0,
    "commit.reply": 0,
}
FETCHER = ("fetcher.inspect", "fetcher.copy", "delta.patch", "fetcher.reply")
#: What `make test` meets; the rest is in the battery.
ALWAYS = {"receive.keep", "delta.patched", "commit.store", "delta.patch", "delta.folded"}


def _timed(point: str) -> Any:
    return pytest.param(point, marks=() if point in ALWAYS else pytest.mark.battery)


@dataclass
class Site:
    """A server with failpoints, and the versions that it acknowledged.

    Attributes:
        server: The server.
        plan: Its failpoints.
        contents: By version.
    """

    server: WeightSyncServer
    plan: Path
    contents: dict[int, list[Shard]] = field(default_factory=dict)

    def push(self, **begin: Any) -> int:
        """Push the next version as a delta, however often it must be tried; return its number."""
        newest = max(self.contents)
        base = self.contents[newest]
        new = stepped(base, newest)
        fields = delta_begin(base, version=newest + 1, idempotency_key=f"k{newest + 1}", **begin)
        for _ in range(100):
            try:
                push_version(self.server.stub, delta_of(base, new), content(new), **fields)
            except (grpc.RpcError, ValueError):
                # ValueError: the channels were closed with the server.
                within(20, self.answers)
            else:
                self.contents[newest + 1] = new
                return newest + 1
        raise AssertionError("the push did not come to its end")

    def answers(self) -> bool:
        with contextlib.suppress(grpc.RpcError, ValueError):
            self.server.stub.GetStatus(pb.GetStatusRequest(), timeout=1)
            return True
        return False

    def check(self) -> None:
        stub = self.server.stub
        found = stub.ListVersions(pb.ListVersionsRequest(model="default"), timeout=5).versions
        assert {info.version for info in found} <= set(self.contents)
        for info in found:
            expected = self.contents[info.version]
            assert info.durability == pb.DURABILITY_COMMITTED
            assert info.content_digest == content(expected)
            assert pulled(stub, info.version) == [shard.data for shard in expected]
        (model,) = stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
        assert list(model.pushes) == []

    def dead(self) -> None:
        """Wait until the server has died at its failpoint, and start it again."""
        assert self.server.process is not None
        assert self.server.process.wait(30) == -9
        self.plan.unlink()
        self.server.kill()
        self.server.start()

    def leftovers(self) -> list[str]:
        names = (".tmp", ".kept", "push.json")
        files = (path for path in self.server.state_dir.rglob("*") if path.is_file())
        return [path.name for path in files if path.name.endswith(names)]


@contextlib.contextmanager
def site(*flags: str) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="wsd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, f"@{folder / 'plan'}")
        server = WeightSyncServer(folder / "run", folder / "state", flags=flags).start()
        made = Site(server, folder / "plan", {2: every_dtype()})
        push_version(server.stub, made.contents[2], content(made.contents[2]), version=2)
        yield made
        made.plan.unlink(missing_ok=True)
        server.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    with site() as made:
        yield made


@pytest.fixture
def here(shared: Site) -> Iterator[Site]:
    yield shared
    shared.plan.unlink(missing_ok=True)


def test_five_deltas_and_restarts_between_them() -> None:
    with site("--retain-versions", "20") as here:
        for restart in (False, True, False, True, False):
            if restart:
                here.server.stop()
                here.server.start()
            here.push()
        here.check()
        assert max(here.contents) == 7
        assert here.leftovers() == []


@pytest.mark.parametrize("point", [_timed(point) for point in SERVER])
def test_killed_in_the_push_of_a_delta(here: Site, point: str) -> None:
    here.plan.write_text(f"{point}={SERVER[point]}>panic")
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(here.push)
        here.dead()
        pushing.result(60)
    here.check()
    assert here.leftovers() == []


@pytest.mark.parametrize("point", [_timed(point) for point in FETCHER])
def test_a_fetcher_dies_over_a_delta(here: Site, point: str) -> None:
    here.push()
    hits = Path(f"{here.plan}.hits")
    hits.unlink(missing_ok=True)
    here.plan.write_text(f"{point}=panic")
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(here.push)
        within(20, hits.exists)
        here.plan.unlink()
        pushing.result(60)
    here.check()
    within(20, lambda: here.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).fetchers == 2)


@pytest.mark.parametrize("point", [_timed(point) for point in ("delta.fold", "delta.folded")])
def test_killed_in_a_fold(point: str) -> None:
    with site("--delta-chain-length", "2", "--delta-chain-share", "100") as here:
        here.plan.write_text(f"{point}=panic")
        for _ in range(2):
            here.push()
        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(here.push)
            here.dead()
            pushing.result(60)
        here.check()
        folded = here.server.stub.GetVersion(pb.GetVersionRequest(model="default", version=5))
        assert (folded.version.chain_length == 0) == (point == "delta.folded")
        # Nothing of the other form is left.
        names = [path.name for path in here.server.state_dir.glob("store/default/v5/*")]
        assert ("0.safetensors" in names) != ("delta-0.safetensors" in names)
        for _ in range(4):
            here.push()
        here.check()


def test_a_cut_stream_goes_on(here: Site) -> None:
    newest = max(here.contents)
    base = here.contents[newest]
    new = stepped(base, 1)
    shards = delta_of(base, new)
    stub = here.server.stub
    fields = delta_begin(base, version=newest + 1, idempotency_key="cut", model="default")
    begun = stub.BeginPush(pb.BeginPushRequest(**fields), timeout=10)

    def half() -> Iterator[pb.PushWeightsRequest]:
        yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=begun.push_id))
        yield from shards[0].layout()
        yield from shards[0].chunks(1000)[:2]

    stub.PushWeights(half(), timeout=10)
    (progress,) = stub.GetPush(pb.GetPushRequest(push_id=begun.push_id), timeout=5).shards
    assert progress.received_bytes == 2000
    push_version(stub, shards, content(new), **fields)
    here.contents[newest + 1] = new
    here.check()
