"""What a begin opens, joins and refuses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.threads import stand_still
from tests.unit.server.deltas.pushing import until
from tests.unit.server.world import MODEL, World, begin, content, one_stream, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.attach.in_place import delete_uncounted
from weightsync_server.catalog.in_place_push import InPlacePush
from weightsync_server.catalog.record import VersionRecord

if TYPE_CHECKING:
    from pathlib import Path

CODE = grpc.StatusCode


DELTA = pb.PUSH_KIND_DELTA


async def refused(here: World, reason: Reason, who: str = "", **fields: Any) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.begin(begin(**fields), 0, who)
    assert caught.value.reason is reason, caught.value.message
    return caught.value


def _delay_discard(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Event, asyncio.Event]:
    """Have the store wait to forget a version; return what says that it was asked, and lets it."""
    discard, asked, gone = here.model.store.discard, asyncio.Event(), asyncio.Event()

    async def wait(model: str, version: int) -> None:
        asked.set()
        await gone.wait()
        await discard(model, version)

    monkeypatch.setattr(here.model.store, "discard", wait)
    return asked, gone


async def test_unknown_model_lists_the_configured_ones(here: World) -> None:
    error = await refused(here, Reason.MODEL_UNKNOWN, model="other")
    assert error.code is CODE.NOT_FOUND
    assert error.message.endswith(f"configured: {MODEL}")


@pytest.mark.parametrize(
    ("fields", "reason", "word"),
    [
        ({"kind": 9}, Reason.NOT_SUPPORTED, "PUSH_KIND_FULL"),
        ({"kind": DELTA}, Reason.REQUEST_INVALID, "base_content_digest"),
        ({"kind": DELTA, "base_content_digest": "x"}, Reason.REQUEST_INVALID, "hexadecimal"),
        ({"kind": DELTA, "base_content_digest": "0" * 32}, Reason.BASE_MISMATCH, "in full"),
        (
            {"kind": DELTA, "base_content_digest": "0" * 32, "layout_digest": "0" * 32},
            Reason.REQUEST_INVALID,
            "layout_digest",
        ),
        (
            {"kind": DELTA, "base_content_digest": "0" * 32, "fallback_reason": "first"},
            Reason.REQUEST_INVALID,
            "fallback_reason",
        ),
        ({"fallback_reason": "x" * 65}, Reason.REQUEST_INVALID, "fallback_reason"),
        ({"base_content_digest": "0" * 32}, Reason.REQUEST_INVALID, "delta"),
        ({"version": 1 << 53}, Reason.REQUEST_INVALID, "largest"),
        ({"client_run": "a\nb"}, Reason.REQUEST_INVALID, "client_run"),
        ({"idempotency_key": "k" * 129}, Reason.REQUEST_INVALID, "idempotency_key"),
        ({"layout_digest": "md5:12"}, Reason.REQUEST_INVALID, "layout_digest"),
        ({"shard_count": 5000}, Reason.REQUEST_INVALID, "shards"),
        ({"metadata": {str(i): "" for i in range(65)}}, Reason.REQUEST_INVALID, "65 entries"),
        ({"metadata": {"k": "v" * (16 << 10)}}, Reason.REQUEST_INVALID, "metadata"),
        ({"version": 1_000_001}, Reason.VERSION_JUMP, "max_version_jump"),
        ({"epoch": 3}, Reason.EPOCH_STALE, "AcquireEpoch"),
        ({"total_bytes": 2 << 30}, Reason.MEMORY_EXHAUSTED, str(1 << 30)),
    ],
)
async def test_bad_begins_leave_nothing(
    here: World, fields: dict[str, Any], reason: Reason, word: str
) -> None:
    error = await refused(here, reason, **fields)
    assert word in error.message
    assert here.model.table.list() == []
    assert here.pushes.status() == []
    assert here.budget.reserved == 0
    assert await here.push(simple()) == 1


async def test_numbers_only_rise(here: World) -> None:
    await here.push(simple(1), version=5)
    error = await refused(here, Reason.VERSION_NOT_ABOVE, version=4)
    assert error.code is CODE.FAILED_PRECONDITION
    assert error.metadata == {"newest_version": "5"}
    assert await here.push(simple(2)) == 6
    # A deleted number is never used again.
    await here.model.collector.delete(6)
    await refused(here, Reason.VERSION_NOT_ABOVE, version=6)
    assert await here.push(simple(3)) == 7


async def test_a_version_that_is_being_dropped_is_no_checkpoint_of_an_engine(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await here.model.table.add_in_place(InPlacePush("secret"))
    asked, gone = _delay_discard(here, monkeypatch)
    error = WeightSyncError(Reason.APPLY_RESTORED, "the trainer sent no heartbeat")
    dropping = asyncio.create_task(here.pushes.give_up(record, error))
    await asked.wait()
    await refused(here, Reason.VERSION_NOT_ABOVE, version=record.version)
    with pytest.raises(WeightSyncError, match="is being dropped, for its push failed"):
        await here.pushes.open(begin(version=record.version), 0, backfill=True)
    gone.set()
    await dropping
    assert here.model.table.find(record.version) is None


@pytest.mark.parametrize(
    ("who", "key", "taken"),
    [("trainer", "name", True), ("stranger", "name", False), ("trainer", "other", False)],
)
async def test_by_what_others_know_one_caller_alone_brings_what_was_written(
    here: World, who: str, key: str, *, taken: bool
) -> None:
    """As a trainer of an older release pushes."""
    record = await here.model.table.add_in_place(InPlacePush("name", "trainer"))
    fields = {"version": record.version, "idempotency_key": key}
    # Also where it has begun: then it would be joined.
    for _ in range(2):
        if taken:
            await here.pushes.begin(begin(**fields), None, who)
        else:
            await refused(here, Reason.PUSH_ABORTED, who, **fields)
            await here.pushes.begin(begin(**fields | {"idempotency_key": "name"}), None, "trainer")


async def test_what_is_given_up_twice_ends_no_push_of_another(here: World) -> None:
    record = await here.model.table.add_in_place(InPlacePush("secret"))
    theirs = await here.pushes.begin(begin(version=record.version + 1), None)
    error = WeightSyncError(Reason.APPLY_RESTORED, "the trainer sent no heartbeat")
    for _ in range(2):
        await here.pushes.give_up(record, error)
    assert here.pushes.find(theirs.push_id).state.error is None
    assert here.model.table.find(record.version) is None


async def test_what_is_given_up_once_it_is_committed_stays_committed(here: World) -> None:
    record = await here.model.table.add_in_place(InPlacePush("secret"))
    assert record.in_place is not None
    record.in_place.decide()
    await here.push(simple(1), version=record.version, idempotency_key="secret")
    assert record.commit is not None
    error = WeightSyncError(Reason.APPLY_RESTORED, "a rank holds something else")
    for _ in range(2):
        await here.pushes.give_up(record, error)
    assert record.durability == pb.DURABILITY_COMMITTED
    assert here.model.table.find(record.version) is record
    for _ in range(2):
        await delete_uncounted(here.model, record)
    assert here.model.table.find(record.version) is None


async def test_a_push_without_a_key_is_found_by_none(here: World) -> None:
    await here.pushes.begin(begin(version=1), None)
    assert here.pushes._index.with_key("") is None


async def test_a_number_that_comes_free_is_not_refused_for_good(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.push(simple(1))
    table = here.model.table
    asked, gone = _delay_discard(here, monkeypatch)
    # As of an engine's checkpoint that could not be committed.
    record = VersionRecord(MODEL, table.next_version())
    table.add(record)
    dropping = asyncio.create_task(here.model.orphans.drop(record))
    await asked.wait()
    error = await refused(here, Reason.PUSH_ABORTED, version=record.version)
    assert "is being dropped, for its push failed" in error.message
    gone.set()
    await dropping
    assert await here.push(simple(2), version=record.version) == record.version


async def test_same_version_same_content_is_fine_other_content_exists(tmp_path: Path) -> None:
    for store in ("", "memory://"):
        async with world(tmp_path, store=store) as here:
            await here.push(simple(1), version=3)
            again = await here.pushes.stream(one_stream(simple(1), version=3))
            assert again.commit.already
            with pytest.raises(WeightSyncError) as caught:
                await here.pushes.stream(one_stream(simple(2), version=3))
            assert caught.value.reason is Reason.VERSION_CONFLICT
            assert caught.value.code is CODE.ALREADY_EXISTS
            assert here.read(3) == [shard.data for shard in simple(1)]
            lease = await here.model.stager.stage(3, 5)
            await here.model.stager.verify(lease)
            lease.release()
            assert here.meters.pushes == {"committed": 1, "already": 1, "failed": 1}
            assert [slot.state for slot in here.model.slots.status()] == ["staged", "free"]
            assert await here.push(simple(4)) == 4


async def test_a_version_is_repeated_beside_the_live_one(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.push(simple(1))
        await here.push(simple(2))
        here.model.serving.engine("engine").set_live(1)
        # Both slots are taken: version 2 makes room for its own repetition and gets it back.
        again = await here.pushes.stream(one_stream(simple(2), version=2))
        assert again.commit.already
        assert here.read(2) == [shard.data for shard in simple(2)]
        opened = await here.pushes.begin(begin(version=2), 1)
        await here.model.collector.delete(2)
        shards = simple(2)
        await here.join(opened.push_id, [m for shard in shards for m in shard.all()])
        with pytest.raises(WeightSyncError) as caught:
            await here.pushes.commit(pb.CommitPushRequest(push_id=opened.push_id))
        assert caught.value.reason is Reason.VERSION_NOT_ABOVE
    async with world(tmp_path / "b", store="memory://") as here:
        await here.push(simple(1))
        await here.push(simple(2))
        here.model.serving.engine("engine").set_live(1)
        await refused(here, Reason.NO_SLOT, version=2)
        assert here.read(2) == [shard.data for shard in simple(2)]


async def test_a_key_joins_the_open_push_and_finds_the_committed_one(here: World) -> None:
    shards = simple(1)
    first = await here.pushes.begin(begin(idempotency_key="k"), 1)
    await here.join(first.push_id, [*shards[0].layout(), *shards[0].chunks(100)[:3]])
    second = await here.pushes.begin(begin(idempotency_key="k", version=1), 1)
    assert second.push_id == first.push_id
    assert [(s.shard, s.received_bytes) for s in second.shards] == [(0, 300)]
    await refused(here, Reason.VERSION_CONFLICT, idempotency_key="k", version=2)
    # The whole stream again, under the key: bytes that are here are skipped.
    response = await here.pushes.stream(one_stream(shards, version=0, idempotency_key="k"))
    assert response.received_bytes == sum(len(shard.data) for shard in shards) - 300
    third = await here.pushes.begin(begin(idempotency_key="k"), 1)
    assert third.committed.version == 1
    assert third.committed.already
    whole = await here.pushes.stream(one_stream(shards, version=1, idempotency_key="k"))
    assert whole.commit.already
    assert here.meters.pushes == {"committed": 1}


async def test_two_pushes_of_a_version_at_once(here: World) -> None:
    outcomes = await asyncio.gather(
        *(here.pushes.begin(begin(version=1), 1) for _ in range(2)), return_exceptions=True
    )
    opened = [o for o in outcomes if isinstance(o, pb.BeginPushResponse)]
    errors = [o for o in outcomes if isinstance(o, WeightSyncError)]
    assert len(opened) == len(errors) == 1
    assert errors[0].code is CODE.ABORTED
    assert errors[0].metadata == {"push_id": opened[0].push_id}


async def test_joining_by_key_while_the_first_waits_for_a_slot(here: World) -> None:
    others = [await here.pushes.begin(begin(), 1) for _ in range(2)]
    waiting = [
        asyncio.create_task(here.pushes.begin(begin(idempotency_key="k"), 5)) for _ in range(2)
    ]
    await asyncio.sleep(0.01)
    await here.pushes.abort(pb.AbortPushRequest(push_id=others[0].push_id))
    first, second = await asyncio.gather(*waiting)
    assert first.push_id == second.push_id


async def test_a_begin_that_another_call_joined_outlives_its_own_call(here: World) -> None:
    others = [await here.pushes.begin(begin(), 1) for _ in range(2)]
    first, second = (
        asyncio.create_task(here.pushes.begin(begin(idempotency_key="k"), None)) for _ in range(2)
    )
    await stand_still()
    first.cancel()
    await asyncio.wait([first])
    await here.pushes.abort(pb.AbortPushRequest(push_id=others[0].push_id))
    assert (await second).version == 3
    assert here.meters.pushes == {"aborted": 1}


async def test_a_begin_ends_with_the_last_call_that_waits_for_it(here: World) -> None:
    others = [await here.pushes.begin(begin(), 1) for _ in range(2)]
    calls = [
        asyncio.create_task(here.pushes.begin(begin(idempotency_key="k"), None)) for _ in range(2)
    ]
    await stand_still()
    push = here.pushes.find(here.pushes.status()[-1].push_id)
    for call in calls:
        assert push.state.error is None
        call.cancel()
        await asyncio.wait([call])
    await push.lifecycle.closed()
    await here.pushes.abort(pb.AbortPushRequest(push_id=others[0].push_id))
    assert [slot.state for slot in here.model.slots.status()] == ["free", "receiving"]
    assert here.model.table.find(3) is None


async def test_a_stream_that_joins_while_the_push_waits_for_a_slot(here: World) -> None:
    others = [await here.pushes.begin(begin(), 1) for _ in range(2)]
    shards = simple()
    waiting = asyncio.create_task(here.pushes.stream(one_stream(shards, commit=None)))
    while len(here.pushes.status()) == len(others):  # noqa: ASYNC110 - a push tells nobody
        await asyncio.sleep(0.01)
    push = here.pushes.status()[-1].push_id
    joined = asyncio.create_task(here.join(push, []))
    early = asyncio.create_task(here.join(push, shards[0].layout()))
    await asyncio.sleep(0.01)
    assert not joined.done()
    await here.pushes.abort(pb.AbortPushRequest(push_id=others[0].push_id))
    await asyncio.gather(waiting, joined, early)
    response = await here.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert response.content_digest == content(shards)


async def test_no_free_slot_says_which_are_taken_and_when_to_retry(here: World) -> None:
    opened = [await here.pushes.begin(begin(), 1) for _ in range(2)]
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.begin(begin(), 0.2)
    error = caught.value
    assert error.reason is Reason.NO_SLOT
    assert error.code is CODE.RESOURCE_EXHAUSTED
    assert error.retry_after_s
    assert "slot 1: version 2 receiving" in error.message
    waiting = asyncio.create_task(here.pushes.begin(begin(), 5))
    await asyncio.sleep(0.01)
    await here.pushes.abort(pb.AbortPushRequest(push_id=opened[0].push_id))
    assert (await waiting).version == 3
    # Whoever gives up waiting leaves nothing.
    quitter = asyncio.create_task(here.pushes.begin(begin(), 5))
    await asyncio.sleep(0.01)
    quitter.cancel()
    await asyncio.wait([quitter])
    await here.pushes.abort(pb.AbortPushRequest(push_id=opened[1].push_id))
    assert [slot.state for slot in here.model.slots.status()] == ["receiving", "free"]


async def test_too_many_pushes(tmp_path: Path) -> None:
    async with world(tmp_path, slots=4, limits={"max_pushes": 2}) as here:
        for _ in range(2):
            await here.pushes.begin(begin(), 1)
        error = await refused(here, Reason.LIMIT_EXCEEDED)
        assert error.retry_after_s


async def test_too_many_pushes_of_callers_that_have_their_share(tmp_path: Path) -> None:
    async with world(tmp_path, slots=4, limits={"max_pushes": 2}) as here:
        for name in ("one", "two"):
            await here.pushes.begin(begin(), 1, name)
        error = await refused(here, Reason.LIMIT_EXCEEDED, "three")
        assert "2 pushes are open" in error.message


async def test_a_newer_writer_ends_older_pushes_at_once(here: World) -> None:
    assert await here.model.epochs.acquire("a") == 1
    old = await here.pushes.begin(begin(epoch=1), 1)
    shard = simple()[0]
    await here.join(old.push_id, shard.layout())
    opened, resume = asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=old.push_id))
        yield shard.chunks(10)[0]
        opened.set()
        await resume.wait()
        yield shard.chunks(10)[1]

    stream = asyncio.create_task(here.pushes.stream(slow()))
    await opened.wait()
    # An ingest process tells of it a little later.
    await until(lambda: here.pushes.find(old.push_id).state.shards[0].received == 10)
    assert await here.model.epochs.acquire("b") == 2
    resume.set()
    for call in (
        stream,
        here.pushes.commit(pb.CommitPushRequest(push_id=old.push_id)),
        here.pushes.begin(begin(epoch=1), 1),
    ):
        with pytest.raises(WeightSyncError) as caught:
            await call
        assert caught.value.reason is Reason.EPOCH_STALE
        assert caught.value.code is CODE.FAILED_PRECONDITION
    assert here.meters.received == 10
    state = here.pushes.get(pb.GetPushRequest(push_id=old.push_id))
    assert state.durability == pb.DURABILITY_FAILED
    assert [slot.state for slot in here.model.slots.status()] == ["free", "free"]
    assert await here.push(simple(), epoch=2) == 1
    assert here.model.table.get(1).epoch == 2


async def test_a_writer_that_waits_for_a_slot_is_refused_when_it_becomes_stale(
    here: World,
) -> None:
    for _ in range(2):
        await here.pushes.begin(begin(), 1)
    waiting = asyncio.create_task(here.pushes.begin(begin(), 30))
    await asyncio.sleep(0.01)
    await here.model.epochs.acquire("b")
    with pytest.raises(WeightSyncError) as caught:
        await waiting
    assert caught.value.reason is Reason.EPOCH_STALE
    await until(
        lambda: [slot.state for slot in here.model.slots.status()] == ["free", "free"],
    )


async def test_a_known_layout_is_not_sent_again(here: World) -> None:
    await here.push(simple(1))
    digest = here.model.table.get(1).to_info().layout_digest
    response = await here.pushes.begin(begin(layout_digest=digest), 1)
    assert response.layout_known
    assert [s.received_bytes for s in response.shards] == [0, 0]
    shards = simple(2)
    await here.join(response.push_id, [m for s in shards for m in (*s.chunks(), *s.given())])
    await here.pushes.commit(pb.CommitPushRequest(push_id=response.push_id))
    assert here.read(2) == [shard.data for shard in shards]
    assert here.model.table.get(2).to_info().layout_digest == digest
    # A header that lies is caught, known or not.
    third = await here.pushes.begin(begin(layout_digest=digest), 1)
    lie = bytearray(shards[0].data)
    lie[20] ^= 1
    shards[0].data = bytes(lie)
    with pytest.raises(WeightSyncError) as caught:
        await here.join(third.push_id, shards[0].chunks())
    assert caught.value.reason is Reason.SHARD_INVALID
    unknown = await here.pushes.begin(begin(layout_digest="0" * 32), 1)
    assert not unknown.layout_known
    error = await refused(here, Reason.REQUEST_INVALID, layout_digest=digest, shard_count=7)
    assert "2 shards" in error.message


async def test_a_known_layout_is_known_after_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.push(simple(1))
        digest = here.model.table.get(1).to_info().layout_digest
    async with world(tmp_path) as here:
        response = await here.pushes.begin(begin(layout_digest=digest), 1)
        assert response.layout_known


async def test_nothing_begins_while_the_server_shuts_down(here: World) -> None:
    opened = await here.pushes.begin(begin(), 1)
    await here.pushes.close()
    await refused(here, Reason.SHUTTING_DOWN)
    assert here.pushes.get(pb.GetPushRequest(push_id=opened.push_id)).error


async def test_a_key_finds_what_exists_and_nothing_else(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"remembered": 1}) as here:
        for seed, key in enumerate("ab"):
            await here.push(simple(seed), idempotency_key=key)
        # Repeats version 2, whose own key is another one.
        await here.push(simple(1), version=2, idempotency_key="c")
        for key, version in (("a", 1), ("b", 2), ("c", 2)):
            found = await here.pushes.begin(begin(idempotency_key=key), 1)
            assert (found.committed.version, found.committed.already) == (version, True)
        await here.model.collector.delete(1)
        await here.model.collector.delete(2)
        for key in "cab":
            begun = await here.pushes.begin(begin(idempotency_key=key), 1)
            assert not begun.HasField("committed")
            await here.pushes.abort(pb.AbortPushRequest(push_id=begun.push_id))
