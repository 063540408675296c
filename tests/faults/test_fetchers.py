"""Fetchers that die, stand still or fail at each of their failpoints while work depends on them.

A push or an apply then has its whole effect, or is refused with a reason and has none; what is
served goes on, and nothing is left over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch

from tests.support.bounds import MODEL, one_shard, push_messages, within
from tests.support.census import Census, same_again, settled
from tests.support.memory_bridge import memory_bridge
from tests.support.processes import state
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason, WeightSyncError
from weightsync.failpoints import VARIABLE
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call
from weightsync_client import Client, Retry
from weightsync_client import WeightSyncError as ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from weightsync.testing import MemoryEngine

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
#: Bytes of the one tensor that the engine has.
SIZE = 100_000
#: What an error inside a fetcher may be told as; a push that it ended is told as aborted, and why.
CLEAN = {Reason.FETCHER_FAILED, Reason.FAULT, Reason.DATA_CORRUPT, Reason.PUSH_ABORTED}

#: Ends of the names of files that belong to no version.
LEFT = (".tmp", ".kept", "push.json", ".new")

PUSH = ("task", "digest", "keep", "kept", "reply")
APPLY = ("task", "load", "digest", "reply")
ADOPTION = ("load", "digest", "persist")
#: A fetcher dies, perhaps the one that takes over as well; it errs; it stands still for a moment.
DIES, ERRS, PAUSES = "panic", "1*error", "1*stop"
#: Those that `make test` meets; the others are in the battery, because each costs a second or two.
ALWAYS = {
    ("digest", DIES), ("kept", DIES), ("reply", DIES), ("keep", ERRS), ("digest", PAUSES),
    ("load", DIES), ("task", ERRS), ("load", ERRS), ("load", PAUSES), ("persist", DIES),
}  # fmt: skip


def _cases(points: tuple[str, ...], actions: tuple[str, ...] = (DIES, ERRS, PAUSES)) -> list[Any]:
    # A reply that is never sent is an error at `reply`: see the test of it.
    return [
        pytest.param(point, action, marks=() if (point, action) in ALWAYS else pytest.mark.battery)
        for point in points
        for action in actions
        if (point, action) != ("reply", ERRS)
    ]


def refusal(call: Callable[[], object]) -> WeightSyncError | None:
    """Return the refusal of a call, which every failure must be."""
    try:
        call()
    except grpc.RpcError as error:
        told = from_call(error)
        if told is None:
            raise
        return told
    return None


@dataclass
class Bench:
    """A server with an engine that serves, and what they must hold whatever the fetchers do."""

    server: WeightSyncServer
    engine: MemoryEngine
    plan: Path
    content: dict[int, bytes] = field(default_factory=dict)
    events_before: int = 0

    # What fails

    def arm(self, plan: str) -> None:
        Path(f"{self.plan}.hits").unlink(missing_ok=True)
        self.plan.write_text(plan)

    def disarm(self) -> None:
        """Let nothing fail any more, and whoever stands still go on."""
        self.plan.unlink(missing_ok=True)
        self.let_go_on()

    def let_go_on(self) -> None:
        for _, action, pid in self.hits():
            if action == "stop" and state(pid) == "T":
                os.kill(pid, signal.SIGCONT)

    def hits(self) -> list[tuple[str, str, int]]:
        path = Path(f"{self.plan}.hits")
        lines = path.read_text().splitlines() if path.exists() else []
        return [(name, action, int(pid)) for name, action, pid in map(str.split, lines)]

    def met_once(self, point: str) -> int:
        """Return the process that has met a failpoint first; nothing fails any more.

        Every process counts its hits from zero. Those that take over may have met it as well, but
        to take over from two a third must have been started.
        """
        end = time.monotonic() + 20
        while not (met := [pid for name, _, pid in self.hits() if name == f"fetcher.{point}"]):
            assert time.monotonic() < end, f"fetcher.{point} was not met"
            time.sleep(0.002)
        self.plan.unlink()
        return met[0]

    # What is done

    def push_small(self, seed: int) -> int:
        """Push another content of the engine's tensor; return its version."""
        shard = one_shard(SIZE, seed)
        version = self.server.stub.PushWeights(push_messages(shard), timeout=30).commit.version
        self.content[version] = shard.data[-SIZE:]
        return version

    def stored_only(self) -> int:
        """Return a new version that is in the store and not in memory."""
        seed = len(self.content)
        version, _ = self.push_small(seed), self.push_small(seed + 1)
        request = pb.GetVersionRequest(model=MODEL, version=version)
        found = self.server.stub.GetVersion(request, timeout=5).version
        assert found.residency == pb.RESIDENCY_ABSENT
        return version

    def apply(self, version: int) -> WeightSyncError | None:
        """Apply a version; return its refusal."""
        request = pb.ApplyVersionRequest(model=MODEL, version=version)
        return refusal(lambda: self.server.stub.ApplyVersion(request, timeout=100))

    # What must hold

    def serves(self, version: int) -> None:
        """Check that the engine serves one version, and proves it."""
        model = self.server.wait_serving(10)
        assert model.live_version == version
        assert self.engine.live["weight"] == self.content[version]
        request = pb.VerifyVersionRequest(model=MODEL)
        assert self.server.stub.VerifyVersion(request, timeout=10).verified

    def held(self) -> Census:
        """Return what the server holds besides versions, once it is at rest."""
        return settled(self._count)

    def _count(self) -> Census:
        census = Census.take(self.server)
        left = tuple(name for name in census.files if name.endswith(LEFT))
        return replace(census, files=left, versions=(), live=0)

    def whole_again(self, before: Census) -> None:
        """Check that every fetcher is back, nothing is left over and vLLM was never fenced."""
        status = self.server.stub.GetStatus
        within(10, lambda: status(pb.GetStatusRequest(), timeout=5).fetchers == 2)
        same_again(self._count, before)
        assert "fence" not in self.engine.events[self.events_before :]


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="wsk"))
    with _running(folder) as bench:
        bench.server.wait_serving()
        yield bench
    shutil.rmtree(folder)


def _server(folder: Path) -> WeightSyncServer:
    return WeightSyncServer(
        folder / "run",
        folder / "state",
        flags=("--slots", "2", "--retain-versions", "1000"),
        variables={VARIABLE: f"@{folder / 'plan'}"},
    )


@contextlib.contextmanager
def _running(folder: Path, plan: str = "") -> Iterator[Bench]:
    """Run a server with an engine whose checkpoint is version 1."""
    server = _server(folder)
    checkpoint = one_shard(SIZE, 0).data[-SIZE:]
    server.run_dir.mkdir()
    if plan:
        (folder / "plan").write_text(plan)
    with memory_bridge(server.run_dir, {"weight": ("U8", (SIZE,), checkpoint)}) as engine:
        server.start()
        try:
            yield Bench(server, engine, folder / "plan", {1: checkpoint})
        finally:
            code = server.stop()
        assert code == 0, server.log


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    shared.events_before = len(shared.engine.events)
    yield shared
    shared.disarm()


@pytest.fixture
def working() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _large(seed: int) -> dict[str, torch.Tensor]:
    """Return two shards, of which one is made durable in steps, in a layout of its own."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {f"a{seed}": 40 * MIB, "b": MIB}
    return {
        name: torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for name, size in sizes.items()
    }


def _push(bench: Bench, seed: int) -> ClientError | None:
    """Push and read back; return the refusal. It is asked again twice, as a trainer would."""
    retry = Retry(attempts=3, initial_s=0.05, max_s=0.2)
    with Client(bench.server.address, model=MODEL, retry=retry) as client:
        try:
            version = client.push(_large(seed), shard_bytes=4 * MIB).version
        except ClientError as error:
            return error
        pulled = {tensor.name: tensor.torch() for tensor in client.tensors(version)}
        assert all(torch.equal(pulled[name], data) for name, data in _large(seed).items())
        client.delete(version)
    return None


def _fail_once(bench: Bench, point: str, action: str, work: Future[Any]) -> None:
    """Return when a fetcher has failed as planned, and nothing fails any more."""
    pid = bench.met_once(point)
    if action == PAUSES:
        time.sleep(0.5)  # it is ended when it was silent for long, not before
        assert state(pid) == "T"
        assert not work.done()
        bench.let_go_on()


_seeds = iter(range(1000))


@pytest.mark.parametrize(("point", "action"), _cases(PUSH))
def test_in_a_push(bench: Bench, working: ThreadPoolExecutor, point: str, action: str) -> None:
    live = bench.server.wait_serving().live_version
    before = bench.held()
    seed = next(_seeds)
    bench.arm(f"fetcher.{point}={action}")
    pushing = working.submit(_push, bench, seed)
    _fail_once(bench, point, action, pushing)
    refused = pushing.result(100)
    if action != ERRS:
        assert refused is None
    elif refused is not None:
        assert refused.reason in CLEAN
        assert _push(bench, seed) is None
    bench.serves(live)
    bench.whole_again(before)


@pytest.mark.parametrize(("point", "action"), _cases(APPLY))
def test_in_an_apply_from_the_store(
    bench: Bench, working: ThreadPoolExecutor, point: str, action: str
) -> None:
    live = bench.server.wait_serving().live_version
    version = bench.stored_only()
    before = bench.held()
    bench.arm(f"fetcher.{point}={action}")
    applying = working.submit(bench.apply, version)
    _fail_once(bench, point, action, applying)
    refused = applying.result(100)
    if action != ERRS:
        assert refused is None
    elif refused is not None:
        assert refused.reason in CLEAN
        bench.serves(live)
        assert bench.apply(version) is None
    bench.serves(version)
    bench.whole_again(before)


def test_a_push_that_costs_every_fetcher_is_refused(bench: Bench) -> None:
    live = bench.server.wait_serving().live_version
    before = bench.held()
    bench.arm("fetcher.digest=panic")
    stub = bench.server.stub
    told = refusal(lambda: stub.PushWeights(push_messages(one_shard(SIZE, 200)), timeout=60))
    assert told is not None
    assert told.reason is Reason.FETCHER_FAILED
    assert "ended 3 fetcher processes" in told.message
    bench.disarm()
    for push in stub.GetStatus(pb.GetStatusRequest(), timeout=5).models[0].pushes:
        # It stays, so that the trainer may ask again.
        stub.AbortPush(pb.AbortPushRequest(push_id=push.push_id), timeout=5)
    bench.serves(live)
    bench.whole_again(before)


def test_an_apply_that_costs_every_fetcher_is_refused(bench: Bench) -> None:
    live = bench.server.wait_serving().live_version
    version = bench.stored_only()
    before = bench.held()
    bench.arm("fetcher.load=panic")
    refused = bench.apply(version)
    assert refused is not None
    assert refused.reason is Reason.FETCHER_FAILED
    bench.disarm()
    bench.serves(live)
    bench.whole_again(before)
    assert bench.apply(version) is None
    bench.serves(version)


def test_a_disk_that_is_full_for_a_fetcher_is_told(bench: Bench) -> None:
    before = bench.held()
    bench.arm("fetcher.keep=error(ENOSPC)")
    stub = bench.server.stub
    told = refusal(lambda: stub.PushWeights(push_messages(one_shard(SIZE, 201)), timeout=60))
    assert told is not None
    assert told.reason is Reason.DISK_EXHAUSTED
    bench.disarm()
    bench.whole_again(before)


@pytest.mark.battery
@pytest.mark.parametrize(
    ("point", "action", "least_s", "most_s"),
    [("digest", "stop", 20, 100), ("reply", "error", 0, 20)],
)
def test_one_that_never_answers_is_replaced(
    bench: Bench,
    working: ThreadPoolExecutor,
    point: str,
    action: str,
    least_s: float,
    most_s: float,
) -> None:
    # One gives no sign of life for 40 s, the other cannot answer and ends itself.
    live = bench.server.wait_serving().live_version
    before = bench.held()
    bench.arm(f"fetcher.{point}={action}")
    begun = time.monotonic()
    pushing = working.submit(_push, bench, next(_seeds))
    bench.met_once(point)
    assert pushing.result(120) is None
    assert least_s < time.monotonic() - begun < most_s
    bench.serves(live)
    bench.whole_again(before)


@pytest.mark.parametrize("action", [DIES, ERRS])
def test_while_a_push_is_taken_up_after_a_crash(
    bench: Bench, working: ThreadPoolExecutor, action: str
) -> None:
    live = bench.server.wait_serving().live_version
    before = bench.held()
    # One shard, so that its first bytes are durable when the next are to become so.
    tensors = {"a": torch.arange(18 * MIB, dtype=torch.int32).view(torch.uint8)}
    bench.arm("receive.keep=1>panic")
    retry = Retry(attempts=400, initial_s=0.05, max_s=0.3)
    with Client(bench.server.address, model=MODEL, retry=retry) as client:
        pushing = working.submit(client.push, tensors)
        assert bench.server.process is not None
        assert bench.server.process.wait(30) == -9
        bench.server.kill()
        bench.arm(f"fetcher.restore={action}")
        bench.server.start()
        bench.met_once("restore")
        result = pushing.result(60)
        (pulled,) = client.tensors(result.version)
        assert torch.equal(pulled.torch(), tensors["a"])
        client.delete(result.version)
    bench.serves(live)
    bench.whole_again(before)


@pytest.mark.parametrize(("point", "action"), _cases(ADOPTION, (DIES, ERRS)))
def test_while_the_checkpoint_is_adopted(point: str, action: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="wsk"))
    with _running(folder, f"fetcher.{point}={action}") as bench:
        bench.met_once(point)
        bench.serves(1)
    shutil.rmtree(folder)
