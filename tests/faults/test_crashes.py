"""A real server, killed at each of its failpoints while somebody works with it, then started again.

Whatever it was doing: every acknowledged version is there byte for byte, nothing else is, the push
that was under way goes on to its end, and nothing is left over.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from tests.support.bounds import within
from tests.support.weightsync_server import WeightSyncServer
from weightsync import failpoints
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client, Durability, Retry, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from weightsync_client import PushResult

pytestmark = pytest.mark.timeout(240)

RETRY = Retry(attempts=400, initial_s=0.05, max_s=0.3)

#: Met by every push, in the server's process, and what to skip first so that it is met midway.
PUSH = {
    "receive.begin": 0,
    "receive.record": 0,
    "receive.layout": 1,
    "receive.chunk": 18,
    "receive.header": 1,
    "receive.keep": 1,
    "receive.shard": 1,
    "stage.allocate": 0,
    "commit.seal": 0,
    "commit.store": 0,
    "commit.reply": 0,
    "store.manifest": 0,
    "store.record": 0,
    "store.recorded": 0,
    "file.write": 0,
    "file.fsync": 0,
    "file.rename": 0,
    "file.flush_directory": 0,
}
#: Met by every push, in a fetcher.
FETCHER = ("task", "digest", "keep", "kept", "reply")
#: Those that `make test` meets; the others are in the battery, because each costs two seconds.
ALWAYS = {
    "receive.keep",
    "commit.store",
    "commit.reply",
    "kept",
    "receive.resume",
    "stage.load",
    "store.deleted",
}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return three shards, of which the first is made durable in steps, in a layout of its own."""
    generator = torch.Generator().manual_seed(seed)
    # The first is large enough that it has not all come when its first bytes are made durable.
    sizes = {f"a{seed}": (56 + 8 * (seed % 3)) << 20, "b": 2 << 20, "c": 2 << 20}
    return {
        name: torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for name, size in sizes.items()
    }


@dataclass
class Victim:
    """A server that is killed again and again, and what it has acknowledged.

    Attributes:
        plan: Its failpoints.
        start_s: What its first start took, in seconds, when there was nothing to recover.
        acknowledged: Seed of the content by version.
    """

    server: WeightSyncServer
    plan: Path
    start_s: float
    acknowledged: dict[int, int] = field(default_factory=dict)
    fetchers: list[psutil.Process] = field(default_factory=list)
    used: int = 10

    def client(self) -> Client:
        return Client(self.server.address, model="default", retry=RETRY)

    @property
    def hits(self) -> list[str]:
        path = Path(f"{self.plan}.hits")
        return path.read_text().splitlines() if path.exists() else []

    def next_version(self) -> int:
        """Return a number that was not used yet."""
        self.used = max(self.used, *self.acknowledged) + 1
        return self.used

    def arm(self, plan: str) -> None:
        Path(f"{self.plan}.hits").unlink(missing_ok=True)
        assert self.server.process is not None
        self.fetchers = psutil.Process(self.server.process.pid).children(recursive=True)
        self.plan.write_text(plan)

    def disarm(self) -> None:
        self.plan.unlink(missing_ok=True)

    def met(self, name: str) -> None:
        """Return when a failpoint was met."""
        within(60, lambda: any(line.startswith(f"{name} ") for line in self.hits))

    def dead(self, name: str) -> None:
        """Return when the server has died at a failpoint."""
        assert self.server.process is not None
        assert self.server.process.wait(60) == -9
        assert self.hits[-1].startswith(f"{name} panic ")
        self.disarm()
        self.server.kill()

    def restart(self) -> float:
        """Return after how many seconds it answers."""
        begun = time.monotonic()
        self.server.start()
        seconds = time.monotonic() - begun
        _, alive = psutil.wait_procs(self.fetchers, 30)
        assert alive == []
        return seconds

    def check(self, under_way: int = 0) -> None:
        """Check that what was acknowledged is there, and nothing else but a push that goes on."""
        with self.client() as client:
            found = {info.version: info for info in client.versions()}
            for version, info in found.items():
                if info.durability is Durability.COMMITTED:
                    assert version in self.acknowledged or version == under_way
                else:
                    assert version == under_way
            for version in sorted(self.acknowledged)[-1:]:
                assert found[version].durability is Durability.COMMITTED
                self.equal(client, version)

    def equal(self, client: Client, version: int) -> None:
        expected = tensors(self.acknowledged[version])
        pulled = {tensor.name: tensor.torch() for tensor in client.tensors(version)}
        assert pulled.keys() == expected.keys()
        assert all(torch.equal(pulled[name], expected[name]) for name in expected)

    def finished(self, handle: Future[PushResult], seed: int) -> None:
        """Check that a push came to its end, and that nothing is left of it but its version."""
        result = handle.result(90)
        self.acknowledged[result.version] = seed
        with self.client() as client:
            self.equal(client, result.version)
            assert client.status().models[0].pushes == ()
        assert self.leftovers() == []

    def leftovers(self) -> list[str]:
        """Return the files that belong to no version."""
        names = (".tmp", ".kept", "push.json", ".new")
        files = (path for path in self.server.state_dir.rglob("*") if path.is_file())
        return [path.name for path in files if path.name.endswith(names)]


def _timed(point: str) -> Any:
    return pytest.param(point, marks=() if point in ALWAYS else pytest.mark.battery)


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    folder = Path(tempfile.mkdtemp(prefix="wsx"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, f"@{folder / 'plan'}")
        server = WeightSyncServer(folder / "run", folder / "state", start_s=60)
        begun = time.monotonic()
        server.start()
        victim = Victim(server, folder / "plan", time.monotonic() - begun)
        with victim.client() as client:
            victim.acknowledged[client.push(tensors(0)).version] = 0
        yield victim
        server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pushing() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def whole(victim: Victim) -> Iterator[Victim]:
    """Return the server, running and without a plan whatever the last test left."""
    victim.disarm()
    assert victim.server.process is not None
    if victim.server.process.poll() is not None:
        victim.server.start()
    yield victim
    victim.disarm()


@pytest.mark.parametrize("point", [_timed(point) for point in PUSH])
def test_killed_in_a_push(whole: Victim, pushing: ThreadPoolExecutor, point: str) -> None:
    if point == "stage.allocate":
        # Not met while there is warm memory from a push before.
        whole.server.kill()
        whole.restart()
    seed = len(whole.acknowledged)
    version = whole.next_version()
    whole.arm(f"{point}={PUSH[point]}>panic")
    with whole.client() as client:
        handle = pushing.submit(client.push, tensors(seed), shard_bytes=4 << 20, version=version)
        whole.dead(point)
        whole.restart()
        whole.check(under_way=version)
        whole.finished(handle, seed)
    assert max(whole.acknowledged) == version


@pytest.mark.alone
@pytest.mark.parametrize("point", ["receive.keep", "commit.store", "store.recorded"])
def test_it_answers_5_s_after_a_crash(
    whole: Victim, pushing: ThreadPoolExecutor, point: str
) -> None:
    seed = len(whole.acknowledged)
    version = whole.next_version()
    whole.arm(f"{point}={PUSH[point]}>panic")
    with whole.client() as client:
        handle = pushing.submit(client.push, tensors(seed), shard_bytes=4 << 20, version=version)
        whole.dead(point)
        assert whole.restart() < 5 + whole.start_s
        whole.finished(handle, seed)


def test_a_crash_costs_at_most_64_mib_of_a_shard(
    whole: Victim, pushing: ThreadPoolExecutor
) -> None:
    expected = {"big": torch.arange(40 << 20, dtype=torch.int32).view(torch.uint8)}
    whole.arm("receive.chunk=150>panic")
    with whole.client() as client:
        handle = pushing.submit(client.push, expected)
        whole.dead("receive.chunk")
        whole.restart()
        result = handle.result(90)
        # What the client had handed to the link and the server had not read counts as sent, too.
        assert result.sent_bytes - result.size_bytes <= (64 << 20) + (16 << 20)
        (pulled,) = client.tensors(result.version)
        assert torch.equal(pulled.torch(), expected["big"])
        # Not among what the other tests know; its number is not used again.
        client.delete(result.version)
        whole.used = result.version
    assert whole.leftovers() == []


@pytest.mark.parametrize("point", [_timed("receive.resume"), _timed("store.recover")])
def test_killed_again_while_it_recovers(
    whole: Victim, pushing: ThreadPoolExecutor, point: str
) -> None:
    seed = len(whole.acknowledged)
    version = whole.next_version()
    whole.arm("receive.keep=1>panic")
    with whole.client() as client:
        handle = pushing.submit(client.push, tensors(seed), shard_bytes=4 << 20, version=version)
        whole.dead("receive.keep")
        whole.plan.write_text(f"{point}=panic")
        with contextlib.suppress(RuntimeError):
            whole.server.start()
        whole.dead(point)
        whole.restart()
        whole.check(under_way=version)
        whole.finished(handle, seed)


@pytest.mark.parametrize("point", [_timed(point) for point in FETCHER])
def test_a_fetcher_dies_in_a_push(whole: Victim, pushing: ThreadPoolExecutor, point: str) -> None:
    seed = len(whole.acknowledged)
    whole.arm(f"fetcher.{point}=panic")
    with whole.client() as client:
        handle = pushing.submit(client.push, tensors(seed), shard_bytes=4 << 20)
        whole.met(f"fetcher.{point}")
        whole.disarm()
        whole.finished(handle, seed)
    status = whole.server.stub.GetStatus
    within(60, lambda: status(pb.GetStatusRequest(), timeout=20).fetchers == 2)


@pytest.mark.parametrize("point", [_timed("stage.load"), _timed("fetcher.load")])
def test_killed_while_a_version_is_read_back(
    whole: Victim, pushing: ThreadPoolExecutor, point: str
) -> None:
    whole.server.stop()
    whole.server.start()
    whole.arm(f"{point}=panic")
    with whole.client() as client:
        reading = pushing.submit(whole.equal, client, max(whole.acknowledged))
        if point == "stage.load":
            whole.dead(point)
            whole.restart()
        whole.met(point)
        whole.disarm()
        reading.result(90)
    whole.check()


def _forget(victim: Victim, version: int) -> None:
    victim.acknowledged.pop(version, None)


def _deleted(client: Client, version: int) -> None:
    client.delete(version)


def _pinned(client: Client, version: int) -> None:
    client.pin(version)
    client.pin(version, pinned=False)


def _acquired(client: Client, _: int) -> None:
    client.acquire_epoch("another")


CHANGES: dict[str, Callable[[Client, int], None]] = {
    "store.delete": _deleted,
    "store.deleted": _deleted,
    "store.marks": _pinned,
    "store.epoch": _acquired,
}


@pytest.mark.parametrize("point", [_timed(point) for point in CHANGES])
def test_killed_in_a_small_change(whole: Victim, point: str) -> None:
    with whole.client() as client:
        if len(whole.acknowledged) < 2:
            seed = len(whole.acknowledged)
            whole.acknowledged[client.push(tensors(seed)).version] = seed
        before = client.status().models[0].epoch
        # Retention has removed those that are older.
        oldest = min(info.version for info in client.versions())
    whole.arm(f"{point}=panic")
    with Client(whole.server.address, model="default", retry=Retry(attempts=1)) as client:
        with pytest.raises(WeightSyncError):
            CHANGES[point](client, oldest)
        whole.dead(point)
    whole.restart()
    with whole.client() as client:
        there = oldest in {info.version for info in client.versions()}
        # Before the record was removed it is whole, afterwards it is gone, and its files with it.
        assert there == (point != "store.deleted")
        if not there:
            _forget(whole, oldest)
            assert not list(whole.server.state_dir.glob(f"store/default/v{oldest}"))
        assert client.status().models[0].epoch == before
        assert not any(info.pinned for info in client.versions())
    whole.check()
