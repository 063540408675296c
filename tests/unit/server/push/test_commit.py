"""What a commit waits for, compares, refuses and repeats; what an abort leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.unit.server.deltas.pushing import until
from tests.unit.server.world import (
    Threads,
    World,
    begin,
    content,
    one_stream,
    simple,
    world,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.in_place_push import InPlacePush

CODE = grpc.StatusCode


async def sent(here: World, shards: Any, **fields: Any) -> str:
    push = (await here.pushes.begin(begin(**fields), 1)).push_id
    await here.join(push, [message for shard in shards for message in shard.all()])
    return push


def ask(push: str, **fields: Any) -> pb.CommitPushRequest:
    return pb.CommitPushRequest(push_id=push, **fields)


async def arrived(here: World, push: str) -> None:
    """Wait until every shard is verified."""
    for _ in range(1000):
        state = here.pushes.get(pb.GetPushRequest(push_id=push))
        if all(shard.verified for shard in state.shards):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(state)


async def failed(here: World, shards: Any) -> WeightSyncError:
    """Push what fails, wherever it is noticed first."""
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.stream(one_stream(shards))
    return caught.value


async def refused(here: World, request: pb.CommitPushRequest) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.commit(request)
    return caught.value


def stored(here: World) -> list[str]:
    folder = Path(here.model.store.url.removeprefix("file://"))
    return sorted(path.name for path in folder.rglob("*.safetensors"))


async def test_a_commit_names_what_is_missing_and_the_push_stays_open(here: World) -> None:
    shards = simple(shards=13)
    push = (await here.pushes.begin(begin(shard_count=13), 1)).push_id
    assert "the layout and bytes of shard 0" in here.model.table.get(1).missing_text()
    error = await refused(here, ask(push))
    assert error.reason is Reason.PUSH_INCOMPLETE
    assert error.code is CODE.FAILED_PRECONDITION
    assert "shard 9" in error.message
    assert "shard 10" not in error.message
    assert "3 more" in error.message
    assert error.metadata == {"push_id": push}
    await here.join(push, [m for shard in shards[:12] for m in shard.all()])
    await here.join(push, [*shards[12].layout(), *shards[12].chunks(100)[:2]])
    error = await refused(here, ask(push))
    size = len(shards[12].data)
    assert f"shard 12 from byte 200 of {size} on" in error.message
    with pytest.raises(WeightSyncError) as caught:
        await here.model.stager.stage(1, 1)
    assert caught.value.reason is Reason.PUSH_INCOMPLETE
    assert caught.value.code is CODE.FAILED_PRECONDITION
    assert "shard 12 from byte 200" in caught.value.message
    await here.join(push, shards[12].chunks(start=200))
    response = await here.pushes.commit(ask(push, content_digest=content(shards)))
    assert response.tensor_count == 26
    assert response.size_bytes == sum(len(shard.data) for shard in shards)


@pytest.mark.parametrize(
    ("fields", "commit", "reason", "word"),
    [
        ({}, {"shard_count": 3}, Reason.PUSH_INCOMPLETE, "shard 2"),
        ({}, {"shard_count": 1}, Reason.REQUEST_INVALID, "shard 1"),
        ({"shard_count": 2}, {"shard_count": 3}, Reason.REQUEST_INVALID, "2 at the start"),
        ({}, {"shard_count": 1 << 31}, Reason.REQUEST_INVALID, "at most"),
        ({"total_bytes": 100_000}, {}, Reason.PUSH_INCOMPLETE, "total_bytes"),
        ({}, {"content_digest": "A" * 32}, Reason.REQUEST_INVALID, "hexadecimal"),
    ],
)
async def test_counts_that_do_not_fit(
    here: World, fields: dict[str, Any], commit: dict[str, Any], reason: Reason, word: str
) -> None:
    push = await sent(here, simple(), **fields)
    error = await refused(here, ask(push, **commit))
    assert error.reason is reason
    assert word in error.message
    if not fields.get("total_bytes"):
        assert (await here.pushes.commit(ask(push))).version == 1


async def test_a_commit_of_nothing(here: World) -> None:
    push = (await here.pushes.begin(begin(), 1)).push_id
    error = await refused(here, ask(push))
    assert error.reason is Reason.PUSH_INCOMPLETE
    assert "all shards" in error.message


async def test_a_wrong_content_digest_ends_the_push(here: World) -> None:
    push = await sent(here, simple())
    error = await refused(here, ask(push, content_digest="0" * 32))
    assert error.reason is Reason.DIGEST_MISMATCH
    assert error.code is CODE.INVALID_ARGUMENT
    assert content(simple()) in error.message
    # Asked again, it says the same; the slot is free and nothing is stored.
    assert (await refused(here, ask(push))).reason is Reason.DIGEST_MISMATCH
    assert here.model.table.list() == []
    assert stored(here) == []
    assert here.meters.pushes == {"failed": 1}


@pytest.mark.parametrize("early", [True, False])
async def test_a_flipped_bit_is_named(here: World, *, early: bool) -> None:
    shards = simple()
    true = shards[1].data
    shards[1].data = true[:-1] + bytes([true[-1] ^ 1])
    push = (await here.pushes.begin(begin(), 1)).push_id
    body = [m for s in shards for m in (*s.layout(), *s.chunks())]
    given = [m for s in shards for m in s.given()]
    if early:
        layouts = [m for s in shards for m in s.layout()]
        with pytest.raises(WeightSyncError) as caught:
            await here.join(
                push, [*layouts, *given, *body, pb.PushWeightsRequest(commit=ask(push))]
            )
    else:
        await here.join(push, body)
        await arrived(here, push)
        with pytest.raises(WeightSyncError) as caught:
            await here.join(push, given)
    error = caught.value
    assert error.reason is Reason.DIGEST_MISMATCH
    assert error.metadata == {"tensor": "s1.b", "shard": "1"}
    assert here.model.table.list() == []


async def test_without_digests_the_version_says_so(here: World) -> None:
    shards = simple()
    push = (await here.pushes.begin(begin(metadata={"step": "7"}), 1)).push_id
    await here.join(push, [m for s in shards for m in (*s.layout(), *s.chunks())])
    await here.join(push, shards[0].given())
    await here.pushes.commit(ask(push))
    info = here.model.table.get(1).to_info()
    assert not info.trainer_verified
    assert dict(info.metadata) == {"step": "7"}
    await here.push(simple(1))
    assert here.model.table.get(2).to_info().trainer_verified


async def test_commit_is_once_and_repeatable(here: World) -> None:
    push = await sent(here, simple())
    answers = await asyncio.gather(*(here.pushes.commit(ask(push)) for _ in range(3)))
    assert [a.already for a in answers] == [False] * 3
    again = await here.pushes.commit(ask(push, content_digest=content(simple())))
    assert again.already
    error = await refused(here, ask(push, content_digest="0" * 32))
    assert error.reason is Reason.VERSION_CONFLICT
    assert here.meters.pushes == {"committed": 1}
    progress = here.pushes.get(pb.GetPushRequest(push_id=push))
    assert progress.durability == pb.DURABILITY_COMMITTED
    assert all(shard.verified for shard in progress.shards)
    assert {"receive", "digest", "persist"} == here.meters.phases.keys()
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.abort(pb.AbortPushRequest(push_id=push))
    assert caught.value.code is CODE.FAILED_PRECONDITION


@pytest.mark.parametrize("counts", [True, False])
async def test_what_a_trainer_wrote_in_place_is_committed_once_it_is_proved(
    here: World, *, counts: bool
) -> None:
    asked = asyncio.Event()
    in_place = InPlacePush("secret", on_arrived=asked.set)
    record = await here.model.table.add_in_place(in_place)
    push = await sent(here, simple(1), version=record.version, idempotency_key="secret")
    commits = [asyncio.create_task(here.pushes.commit(ask(push))) for _ in range(2)]
    await asked.wait()
    await asyncio.sleep(0.05)
    assert (record.commit, record.to_info().content_digest) == (None, "")
    assert not any(commit.done() for commit in commits)
    if counts:
        in_place.decide()
        assert [answer.version for answer in await asyncio.gather(*commits)] == [record.version] * 2
        return
    error = WeightSyncError(Reason.APPLY_RESTORED, "a rank holds something else")
    await here.pushes.give_up(record, error)
    assert await asyncio.gather(*commits, return_exceptions=True) == [error] * 2
    assert here.model.table.find(record.version) is None


async def test_a_caller_that_leaves_does_not_stop_the_commit(tmp_path: Path) -> None:
    fetchers = Threads()
    fetchers.gate = asyncio.Event()
    async with world(tmp_path, fetchers=fetchers) as here:
        push = await sent(here, simple())
        call = asyncio.create_task(here.pushes.commit(ask(push)))
        await asyncio.sleep(0.05)
        assert not call.done(), "it waits until all is durable"
        call.cancel()
        await asyncio.wait([call])
        fetchers.gate.set()
        response = await here.pushes.commit(ask(push))
        assert response.version == 1
        assert here.model.table.get(1).durability == pb.DURABILITY_COMMITTED


async def test_an_abort_waits_and_leaves_nothing(tmp_path: Path) -> None:
    fetchers = Threads()
    async with world(tmp_path, fetchers=fetchers) as here:
        push = await sent(here, simple())
        await arrived(here, push)
        assert len(stored(here)) == 2
        for _ in range(2):
            await here.pushes.abort(pb.AbortPushRequest(push_id=push))
        assert stored(here) == []
        assert here.model.table.list() == []
        assert [slot.state for slot in here.model.slots.status()] == ["free", "free"]
        assert (await refused(here, ask(push))).code is CODE.ABORTED
        assert here.meters.pushes == {"aborted": 1}
        assert await here.push(simple(3), version=1) == 1


async def test_a_lost_fetcher_is_tried_again_by_the_next_commit(tmp_path: Path) -> None:
    fetchers = Threads()
    fetchers.errors = [WeightSyncError(Reason.FETCHER_FAILED, "lost three fetchers")]
    async with world(tmp_path, fetchers=fetchers) as here:
        push = await sent(here, simple())
        fetchers.errors.append(WeightSyncError(Reason.FETCHER_FAILED, "lost three fetchers"))
        error = await refused(here, ask(push))
        assert error.code is CODE.UNAVAILABLE
        assert (await here.pushes.commit(ask(push))).version == 1


async def test_a_full_disk_ends_the_push_and_nothing_else(tmp_path: Path) -> None:
    fetchers = Threads()
    async with world(tmp_path, fetchers=fetchers) as here:
        await here.push(simple(1))
        here.model.serving.engine("engine").set_live(1)
        fetchers.errors = [WeightSyncError(Reason.DISK_EXHAUSTED, "no space")]
        error = await failed(here, simple(2))
        assert error.code is CODE.RESOURCE_EXHAUSTED
        assert len(stored(here)) == 2
        assert here.model.table.get(1).to_info().serving == pb.SERVING_LIVE
        assert await here.push(simple(2)) == 2


async def test_an_error_in_the_server_ends_the_push(tmp_path: Path) -> None:
    fetchers = Threads()
    fetchers.errors = [ZeroDivisionError("secret")]
    async with world(tmp_path, fetchers=fetchers) as here:
        error = await failed(here, simple(2))
        assert error.reason is Reason.FAULT
        assert "secret" not in error.message
        assert here.pushes.status() == []


async def test_a_higher_version_that_commits_first_ends_the_lower_one(here: World) -> None:
    low = await sent(here, simple(1), version=1)
    high = await sent(here, simple(2), version=2)
    await here.pushes.commit(ask(high))
    error = await refused(here, ask(low))
    assert error.reason is Reason.VERSION_NOT_ABOVE
    assert [r.version for r in here.model.table.list()] == [2]
    assert len(stored(here)) == 2


async def test_a_commit_under_way_ends_before_a_new_writer_is_told(tmp_path: Path) -> None:
    fetchers = Threads()
    fetchers.gate = asyncio.Event()
    async with world(tmp_path, fetchers=fetchers) as here:
        push = await sent(here, simple())
        call = asyncio.create_task(here.pushes.commit(ask(push)))
        await asyncio.sleep(0.05)
        await here.model.epochs.acquire("new")
        fetchers.gate.set()
        with pytest.raises(WeightSyncError) as caught:
            await call
        assert caught.value.reason is Reason.EPOCH_STALE
        await until(lambda: not here.model.table.list() and not stored(here))


async def test_a_push_in_memory_says_that_it_is_not_durable(tmp_path: Path) -> None:
    async with world(tmp_path, store="memory://") as here:
        response = await here.pushes.stream(one_stream(simple()))
        assert not response.commit.durable
        for version in range(2, 6):
            assert await here.push(simple(version)) == version
        await until(lambda: [record.version for record in here.model.table.list()] == [5, 4])


async def test_segments_are_reused_and_ended_pushes_keep_little(here: World) -> None:
    await here.push(simple(1))
    await here.push(simple(2))
    before = {s.id for slot in here.model.slots.slots for s in slot.segments.values()}
    reserved = here.budget.reserved
    for seed in range(3, 8):
        await here.push(simple(seed))
    after = {s.id for slot in here.model.slots.slots for s in slot.segments.values()}
    assert after == before
    assert here.budget.reserved == reserved
    assert all(not push.state.shards for push in here.pushes._index._ended.values())


async def test_the_log_says_what_a_client_gave_a_push_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with world(tmp_path) as here:
        for reason in ("", "too much\nhas changed"):
            push = await sent(here, simple())
            await here.pushes.abort(pb.AbortPushRequest(push_id=push, reason=reason))
    assert [record.message for record in caplog.records if "ended" in record.message] == [
        "push of version 1 ended: its client aborted it",
        "push of version 1 ended: its client aborted it, saying 'too much\\nhas changed'",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}
