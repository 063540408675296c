"""The operating system refuses something, at each failpoint of a real server: a clean refusal.

It has a reason, it counts as no violation, nothing is half done, what was taken is given back, and
the same call succeeds when the system is well again. An apply ends with the old version or the new
one, whole, whatever it answers.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.bounds import MODEL, begin, one_shard, within
from tests.support.erring_site import SIZE, ErringSite, erring_site, weight
from weightsync.errors import Reason
from weightsync.failpoints import POINTS
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.errors import WeightSyncError

CODES = {
    "EIO": Reason.FAULT,
    "ENOSPC": Reason.DISK_EXHAUSTED,
    "EMFILE": Reason.DISK_EXHAUSTED,
    "ENOMEM": Reason.MEMORY_EXHAUSTED,
}

#: Where a push is refused, and what to skip first so that it is met midway.
PUSH = {
    "receive.begin": 0,
    "receive.record": 0,
    "receive.layout": 0,
    "receive.chunk": 0,
    "receive.header": 0,
    "receive.keep": 0,
    "receive.shard": 0,
    "commit.seal": 0,
    "commit.store": 0,
    "store.manifest": 0,
    "store.record": 0,
    "file.write": 1,
    "file.fsync": 1,
    "file.rename": 1,
    "file.flush_directory": 1,
    "fetcher.task": 0,
    "fetcher.digest": 0,
    "fetcher.keep": 0,
    "fetcher.kept": 0,
}
#: In a push that is written on the same host.
LEND = ("receive.collect", "receive.lend", "receive.written")
#: In a push of a delta.
DELTA = ("fetcher.inspect", "fetcher.copy", "delta.patch", "delta.patched")
#: In the background, so that nobody is told.
FOLD = ("delta.fold", "delta.folded")
#: Where nothing is refused: the version is there, or another fetcher does the task.
UNHINDERED = ("commit.reply", "store.recorded", "fetcher.reply")
#: Before anything stands still.
APPLY_REFUSED = (
    "apply.begin",
    "stage.verify",
    "apply.prepared",
    "apply.intent",
    "journal.write",
    "apply.pause",
)
#: In the pause, and whether the new version is live in the end.
APPLY_UNSURE = {"apply.commit": False, "apply.committed": True, "apply.resume": True}
#: Behind the pause: the answer tells what is.
APPLY_DONE = ("apply.resumed", "apply.done")
#: By how many of the ranks' writes fail before it is met.
RESTORE = {"apply.restore": 1, "apply.restored": 1, "apply.fence": 2}
LOAD = ("stage.load", "fetcher.load")
START = ("journal.read", "store.recover")
RESUME = ("receive.resume", "fetcher.restore")


def each(points: Any) -> pytest.MarkDecorator:
    """Every point with EIO, which `make test` meets, and every other number in the battery."""
    return pytest.mark.parametrize(
        ("point", "code"),
        [
            pytest.param(point, code, marks=() if code == "EIO" else pytest.mark.battery)
            for code in CODES
            for point in points
        ],
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[ErringSite]:
    with erring_site() as site:
        for version in range(2, 7):
            site.push(version)
        yield site


@pytest.fixture
def site(shared: ErringSite) -> Iterator[ErringSite]:
    yield shared
    shared.check()


def told(error: WeightSyncError | None, code: str, *others: Reason) -> None:
    assert error is not None
    assert error.reason in (CODES[code], *others), error
    assert len(error.message) > 20


def fails(point: str, code: str, skip: int = 0) -> str:
    return f"{point}={skip}>1*error({code})"


def refused_once(
    site: ErringSite,
    bring: Callable[[int], pb.CommitPushResponse],
    plan: str,
    point: str,
    code: str,
) -> None:
    """Bring a version while the system errs, and again when it does not."""
    version = site.next_version()
    site.arm(plan)
    error = site.outcome(lambda: bring(version))
    site.disarm(point)
    told(error, code)
    assert version not in site.versions()
    # Whether it is still open or has failed: the same call brings it.
    assert bring(version).durable
    assert site.pull(version) == one_shard(SIZE, version % 251).data


@each(PUSH)
def test_in_a_push(site: ErringSite, point: str, code: str) -> None:
    refused_once(site, site.push, fails(point, code, PUSH[point]), point, code)


@each(LEND)
def test_in_a_hand_off(site: ErringSite, point: str, code: str) -> None:
    refused_once(site, site.hand_over, fails(point, code), point, code)


@each(DELTA)
def test_in_a_delta(site: ErringSite, point: str, code: str) -> None:
    refused_once(site, site.push_delta, fails(point, code), point, code)


@each(FOLD)
def test_when_deltas_are_folded(site: ErringSite, point: str, code: str) -> None:
    site.push(site.next_version())
    site.arm(fails(point, code))
    for _ in range(6):
        site.push_delta(site.next_version())
        # In the background, unless the next push wants the slot.
        time.sleep(0.1)
    within(10, site.met)
    site.disarm(point)
    site.push_delta(site.next_version())

    def folded() -> bool:
        newest = site.versions()[max(site.pushed)]
        return newest.chain_length <= 3

    within(10, folded)
    for version in sorted(site.pushed)[-8:]:
        assert site.pull(version) == one_shard(SIZE, site.pushed[version]).data


@each(["stage.allocate"])
def test_when_memory_is_reserved(site: ErringSite, point: str, code: str) -> None:
    version = site.next_version()
    site.arm(fails(point, code))
    # So large that no spare segment fits.
    error = site.outcome(lambda: site.push(version, size=3 << 20))
    site.disarm(point)
    if code == "ENOMEM":
        # Spare segments were given up for it.
        assert error is None
    else:
        told(error, code)
        assert version not in site.versions()
    assert site.push(version).durable


@each(UNHINDERED)
def test_where_no_error_matters(site: ErringSite, point: str, code: str) -> None:
    version = site.next_version()
    site.arm(fails(point, code))
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(site.push, version)
        # A fetcher that cannot answer is replaced, not waited for; the next one can.
        within(10, site.met)
        site.disarm(point)
        assert pushing.result().durable
    assert time.monotonic() - begun < 10
    assert site.push(version).already


@each(["store.epoch", "store.marks", "store.delete"])
def test_in_a_small_change(site: ErringSite, point: str, code: str) -> None:
    old = min(site.pushed)
    changes: dict[str, Callable[[], object]] = {
        "store.epoch": lambda: site.stub.AcquireEpoch(pb.AcquireEpochRequest(model=MODEL)),
        "store.marks": lambda: site.stub.PinVersion(
            pb.PinVersionRequest(model=MODEL, version=old, pinned=True)
        ),
        "store.delete": lambda: site.stub.DeleteVersion(
            pb.DeleteVersionRequest(model=MODEL, version=old)
        ),
    }
    epoch = site.server.wait_serving().epoch
    site.arm(fails(point, code))
    error = site.outcome(changes[point])
    site.disarm(point)
    told(error, code)
    assert site.server.wait_serving().epoch == epoch
    assert not site.versions()[old].pinned
    assert site.pull(old) == one_shard(SIZE, site.pushed[old]).data
    assert site.outcome(changes[point]) is None
    if point == "store.delete":
        del site.pushed[old]
    else:
        site.stub.PinVersion(pb.PinVersionRequest(model=MODEL, version=old, pinned=False))


@each(["store.deleted"])
def test_when_files_of_a_deleted_version_stay(site: ErringSite, point: str, code: str) -> None:
    old = min(site.pushed)
    site.arm(fails(point, code))
    site.stub.DeleteVersion(pb.DeleteVersionRequest(model=MODEL, version=old))
    site.disarm(point)
    del site.pushed[old]
    assert old not in site.versions()
    request = pb.BeginPushRequest(model=MODEL, version=old)
    error = site.outcome(lambda: site.stub.BeginPush(request, timeout=5))
    assert error is not None
    assert error.reason is Reason.VERSION_NOT_ABOVE


@each(LOAD)
def test_while_a_version_is_read_back(site: ErringSite, point: str, code: str) -> None:
    for _ in range(4):
        site.push(site.next_version())
    absent = [v for v, i in site.versions().items() if i.residency == pb.RESIDENCY_ABSENT]
    old = min(set(absent) & site.pushed.keys())
    site.arm(fails(point, code))
    error = site.outcome(lambda: site.pull(old))
    site.disarm(point)
    # What cannot be read may be lost.
    told(error, code, Reason.DATA_CORRUPT)
    assert site.pull(old) == one_shard(SIZE, site.pushed[old]).data


def _applicable(site: ErringSite) -> tuple[int, int]:
    """Return the version that is live, and a new one."""
    live = site.server.wait_serving().live_version
    version = site.next_version()
    site.push(version)
    return live, version


def _becomes_live(site: ErringSite, version: int) -> None:
    within(20, lambda: site.server.wait_serving(20).live_version == version)
    assert site.engine.live["weight"] == weight(site.pushed.get(version, 0))


@each(APPLY_REFUSED)
def test_before_an_apply_pauses(site: ErringSite, point: str, code: str) -> None:
    live, version = _applicable(site)
    events = list(site.engine.events)
    site.arm(fails(point, code))
    error = site.outcome(lambda: site.apply(version))
    site.disarm(point)
    told(error, code, Reason.DISK_EXHAUSTED)
    assert "pause" not in site.engine.events[len(events) :]
    _becomes_live(site, live)
    assert site.apply(version).outcome == pb.APPLY_OUTCOME_APPLIED
    _becomes_live(site, version)


@each(APPLY_UNSURE)
def test_while_an_apply_pauses(site: ErringSite, point: str, code: str) -> None:
    live, version = _applicable(site)
    site.arm(fails(point, code))
    error = site.outcome(lambda: site.apply(version))
    site.disarm(point)
    assert error is not None
    assert error.reason is Reason.ENGINE_AWAY
    _becomes_live(site, version if APPLY_UNSURE[point] else live)
    assert site.outcome(lambda: site.apply(version)) is None
    _becomes_live(site, version)


@each(APPLY_DONE)
def test_when_an_apply_is_done(site: ErringSite, point: str, code: str) -> None:
    _, version = _applicable(site)
    site.arm(fails(point, code))
    assert site.apply(version).outcome == pb.APPLY_OUTCOME_APPLIED
    site.disarm(point)
    _becomes_live(site, version)


def test_what_the_journal_did_not_take_is_written_later(site: ErringSite) -> None:
    _, version = _applicable(site)
    # The first record tells what is wanted, the second what is live.
    site.arm(fails("journal.write", "ENOSPC", skip=1))
    assert site.apply(version).outcome == pb.APPLY_OUTCOME_APPLIED
    site.disarm("journal.write")
    journal = site.server.state_dir / "journal"
    within(10, lambda: b"DONE" in journal.read_bytes().splitlines()[-1])
    assert f'"version": {version}' in journal.read_text().splitlines()[-1]


@each(RESTORE)
def test_while_an_apply_is_undone(site: ErringSite, point: str, code: str) -> None:
    live, version = _applicable(site)
    writes = 0
    write = site.engine.write

    def fail(tensors: Any) -> None:
        nonlocal writes
        writes += 1
        if writes > RESTORE[point]:
            write(tensors)
        else:
            site.engine.live["weight"] = bytes(SIZE)

    site.arm(fails(point, code))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site.engine, "write", fail)
        error = site.outcome(lambda: site.apply(version))
        site.disarm(point)
        assert error is not None
        assert error.reason is Reason.ENGINE_AWAY
        _becomes_live(site, live)
    assert site.outcome(lambda: site.apply(version)) is None


@each(["apply.reconcile"])
def test_while_an_engine_is_reconciled(site: ErringSite, point: str, code: str) -> None:
    live = site.server.wait_serving().live_version
    site.arm(fails(point, code))
    site.engine.restart({"weight": weight(0)})
    status: list[str] = []

    def told_why() -> bool:
        (model,) = site.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
        status.append(model.engine.reason)
        return "reconciling the engine failed" in status[-1]

    within(10, told_why)
    site.disarm(point)
    _becomes_live(site, live)


@each(RESUME)
def test_while_a_push_goes_on_after_a_crash(site: ErringSite, point: str, code: str) -> None:
    version = site.next_version()
    shard = one_shard(20 << 20, version % 251)
    request = begin(version=version, idempotency_key=f"survivor-{version}", shard_count=1)
    push_id = site.stub.BeginPush(request, timeout=5).push_id
    join = pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))
    parts = [join, *shard.layout(), *shard.chunks()[:18]]
    site.stub.PushWeights(iter(parts), timeout=10)

    def kept() -> int:
        found = site.stub.GetPush(pb.GetPushRequest(push_id=push_id), timeout=5).shards
        return found[0].durable_bytes

    within(10, lambda: kept() > 0)
    site.kill()
    site.server.start()
    site.arm(fails(point, code))
    error = site.outcome(lambda: site.stub.BeginPush(request, timeout=10))
    within(5, site.met)
    site.disarm(point)
    # What was kept and cannot be read is sent again.
    assert (error is None) == (point == "fetcher.restore")
    if error is not None:
        told(error, code)
    assert site.stub.BeginPush(request, timeout=10).push_id == push_id
    rest = [join, *shard.layout(), *shard.chunks()]
    site.stub.PushWeights(iter(rest), timeout=10)
    assert site.stub.CommitPush(pb.CommitPushRequest(push_id=push_id), timeout=10).durable
    site.pushed[version] = version % 251
    assert site.pull(version) == shard.data
    # It fits no engine here, and must not be the newest for the others.
    site.stub.DeleteVersion(pb.DeleteVersionRequest(model=MODEL, version=version))
    del site.pushed[version]
    site.push(version + 1)


@each(START)
def test_when_a_server_starts(site: ErringSite, point: str, code: str) -> None:
    site.kill()
    before = len(site.server.log)
    site.arm(fails(point, code))
    with contextlib.suppress(RuntimeError):
        site.server.start()
    site.disarm(point)
    assert site.server.process is not None
    assert site.server.process.poll() == 1
    (line,) = [line for line in site.server.log[before:].splitlines() if "INFO" not in line]
    assert line.startswith("weightsync-server: opening the ")
    site.server.start()


@each(["fetcher.persist"])
def test_when_a_checkpoint_is_adopted(point: str, code: str) -> None:
    with erring_site(fails(point, code)) as fresh:
        fresh.disarm(point)
        assert fresh.server.wait_serving().live_version == 1
        fresh.check()


def test_every_failpoint_of_the_server_is_here() -> None:
    here = {
        *PUSH,
        *LEND,
        *DELTA,
        *FOLD,
        *UNHINDERED,
        *APPLY_REFUSED,
        *APPLY_UNSURE,
        *APPLY_DONE,
        *RESTORE,
        *LOAD,
        *START,
        *RESUME,
        "stage.allocate",
        "store.epoch",
        "store.marks",
        "store.delete",
        "store.deleted",
        "apply.reconcile",
        "fetcher.persist",
    }
    # Those of ingest processes are in test_ingest.py, of loaders in test_twin_vllm.py, of followers
    # in integration/test_followers.py, of nodes in integration/test_engine_nodes.py, of fleets in
    # test_fleet.py, of several engines in test_several_engines.py, of transactions in
    # test_in_place_kills.py, of gates in test_gate_restarts.py.
    elsewhere = (
        *("worker.", "loader.", "bridge.", "ingest.", "follow.", "node.", "fleet.", "host."),
        *("in_place.", "gate."),
    )
    assert here == {point for point in POINTS if not point.startswith(elsewhere)}
