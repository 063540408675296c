"""Several writers bring some tensors of a version: all others stay those of one base."""

from __future__ import annotations

import asyncio
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.deltas.pushing import history, push_delta, until
from tests.unit.server.push.boxes import Writer, push_all, sharded, version
from tests.unit.server.world import Shard, World, content, make_shard, world
from weightsync.delta import parse_shard
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.store.local.local_store import LocalStore
from weightsync_server.store.store_records import PushRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

#: What the writers bring; s0.t1 is the same in both versions.
NAMES = ("s0.t0", "s0.t1", "s1.t1", "s1.t3")


@pytest.fixture(name="box_world")
async def _box_world(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, slots=3, limits={"writer_timeout_s": 1.5}) as made:
        yield made


def tensor_bytes(shard: Shard) -> dict[str, tuple[str, str, tuple[int, ...], bytes]]:
    start = 8 + shard.header_size
    return {
        e.name: (e.name, e.dtype, e.shape, shard.data[start + e.begin : start + e.end])
        for e in shard.entries
    }


def changed(base: Sequence[Shard], names: Sequence[str], seed: int) -> list[Shard]:
    """Return a version in which these tensors are new, all but the second of them."""
    other = {k: v for shard in version(seed) for k, v in tensor_bytes(shard).items()}
    fresh = {name: other[name] for at, name in enumerate(names) if at != 1}
    return [
        make_shard(shard.index, [fresh.get(name, old) for name, old in tensor_bytes(shard).items()])
        for shard in base
    ]


def part_of(shards: Sequence[Shard], names: Sequence[str] = NAMES) -> list[Shard]:
    """Return these tensors alone, in two shards of their own."""
    each = {k: v for shard in shards for k, v in tensor_bytes(shard).items()}
    half = len(names) // 2
    groups = [names[:half], names[half:]] if half else [names]
    return [make_shard(at, [each[n] for n in group]) for at, group in enumerate(groups)]


async def push_part(
    here: World, writers: Sequence[Writer], fields: Sequence[dict[str, Any]] | None = None
) -> list[Any]:
    """Have all of them push; return the answers and errors."""

    async def one(writer: Writer, more: dict[str, Any]) -> Any:
        await writer.begin(here, partial=True, **more)
        await writer.stream(here)
        return await writer.commit(here)

    each = fields or [{}] * len(writers)
    return await asyncio.gather(*map(one, writers, each), return_exceptions=True)


def live(here: World, number: int) -> None:
    here.model.serving.engine("engine").set_live(number)


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("count", [2, 4])
async def test_what_nobody_declares_stays(
    box_world: World, tmp_path: Path, count: int, along: int
) -> None:
    old = version()
    new = changed(old, NAMES, 7)
    await push_all(box_world, sharded(old, count, along=along, key="run/0"))
    live(box_world, 1)
    writers = sharded(part_of(new), count, along=along)
    answers = await push_part(box_world, writers)
    # It is the version that a push of all tensors would have made.
    assert {answer.content_digest for answer in answers} == {content(new)}, answers
    assert box_world.read(2) == [shard.data for shard in new]
    record = box_world.model.table.get(2)
    assert record.base is box_world.model.table.get(1)
    assert record.commit is not None
    assert record.commit.trainer_verified
    # What is kept is the delta, without what is the same.
    expect = {e.name: (e.dtype, e.shape) for shard in new for e in shard.entries}
    files = [path.read_bytes() for path in (tmp_path / "store").rglob("*delta*") if path.is_file()]
    shards = [data for data in files if b"wsd1.manifest" in data[:200] and data[:1] != b"{"]
    names = {name for data in shards for name in parse_shard(data, expect).changes}
    assert names == set(NAMES) - {"s0.t1"}


async def test_it_outlives_the_server_and_has_versions_based_on_it(tmp_path: Path) -> None:
    old = version()
    new = changed(old, NAMES, 7)
    newest = changed(new, ("s1.t0", "s1.t1"), 8)
    async with world(tmp_path) as here:
        await here.push(old)
        await push_part(here, sharded(part_of(new), 2), [{"base_version": 1}] * 2)
    async with world(tmp_path) as here:
        assert here.model.table.get(2).content_digest == content(new)
        writers = sharded(part_of(newest, ("s1.t0", "s1.t1")), 3, key="run/2")
        named = [{"base_version": 2, "base_content_digest": content(new)}] * 3
        (digest,) = {answer.content_digest for answer in await push_part(here, writers, named)}
        assert digest == content(newest)
        assert [record.version for record in here.model.table.get(3).chain] == [3, 2, 1]
        assert here.read(3) == [shard.data for shard in newest]


async def test_the_base_stays_while_it_is_needed(box_world: World) -> None:
    old = version()
    await box_world.push(old)
    base = box_world.model.table.get(1)
    first, second = sharded(part_of(changed(old, NAMES, 3)), 2)
    begun = await first.begin(box_world, partial=True, base_version=1)
    assert (begun.base_version, begun.base_content_digest) == (1, content(old))
    assert base.holds == 1
    # One that names none takes that of the others, whatever is live.
    begun = await second.begin(box_world, partial=True)
    assert (begun.base_version, begun.base_content_digest) == (1, content(old))
    reserved = box_world.model.slots.reserved_bytes
    await box_world.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
    assert base.holds == 0
    assert box_world.model.slots.reserved_bytes < reserved


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"base_version": 2}, "writer 1 keeps the other tensors of version 2, writer 0 those of"),
        ({"base_content_digest": "0" * 32}, "a version with content 0000"),
        (
            {"base_version": 1, "base_content_digest": "0" * 32},
            "writer 1 keeps the other tensors of version 1 with content 0000",
        ),
        ({"partial": False}, "writer 0 pushes some tensors, writer 1 all of them"),
    ],
)
async def test_who_names_another_base_fails_it_for_all(
    box_world: World, second: dict[str, Any], words: str
) -> None:
    old = version()
    await box_world.push(old)
    await box_world.push(changed(old, NAMES, 2))
    writers = sharded(part_of(changed(old, NAMES, 3)), 2)
    await writers[0].begin(box_world, partial=True, base_version=1)
    await writers[0].stream(box_world)
    waiting = asyncio.create_task(writers[0].commit(box_world))
    with pytest.raises(WeightSyncError, match=words) as caught:
        await writers[1].begin(box_world, **{"partial": True, **second})
    with pytest.raises(WeightSyncError, match=words) as heard:
        await waiting
    for error in (caught.value, heard.value):
        assert error.reason is Reason.LAYOUT_INVALID
        assert error.metadata["writer"] == "1"
    assert box_world.pushes.status() == []
    assert box_world.model.table.highest == 2
    assert box_world.model.table.get(1).holds == 0


async def test_without_a_base_nothing_is_opened(box_world: World) -> None:
    await box_world.push(version())
    first, _ = sharded(part_of(version()), 2)
    for fields, reason in (
        ({}, Reason.VERSION_UNKNOWN),
        ({"base_version": 9}, Reason.VERSION_UNKNOWN),
        ({"base_version": 1, "base_content_digest": "0" * 32}, Reason.BASE_MISMATCH),
        ({"base_content_digest": "0" * 32}, Reason.BASE_MISMATCH),
    ):
        with pytest.raises(WeightSyncError) as caught:
            await first.begin(box_world, partial=True, **fields)
        assert caught.value.reason is reason
    assert box_world.pushes.status() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"partial": True, "kind": pb.PUSH_KIND_DELTA, "base_content_digest": "0" * 32},
        {"partial": True, "writers": 1},
        {"base_version": 1},
        {"base_content_digest": "0" * 32},
        {"partial": True, "base_content_digest": "zz"},
    ],
)
async def test_begins_that_cannot_be_are_refused(box_world: World, fields: dict[str, Any]) -> None:
    first, _ = sharded(part_of(version()), 2)
    with pytest.raises(WeightSyncError) as caught:
        await first.begin(box_world, **fields)
    assert caught.value.reason is Reason.REQUEST_INVALID


async def refusals(here: World, writers: Sequence[Writer]) -> list[WeightSyncError]:
    results = await push_part(here, writers, [{"base_version": 1}] * len(writers))
    errors = [result for result in results if isinstance(result, WeightSyncError)]
    assert len(errors) == len(writers), results
    await until(lambda: here.pushes.status() == [])
    assert [record.version for record in here.model.table.list()] == [1]
    assert here.model.table.get(1).holds == 0
    return errors


async def test_a_tensor_that_comes_in_part_is_a_hole(box_world: World) -> None:
    await box_world.push(version())
    writers = sharded(part_of(version(3)), 3)
    del writers[2].held[0].sent[0]
    for error in await refusals(box_world, writers):
        assert error.reason is Reason.LAYOUT_INVALID
        assert "is not sent whole" in error.message


async def test_a_tensor_of_which_nobody_has_a_box_stays(box_world: World) -> None:
    old = version()
    await box_world.push(old)
    writers = sharded(part_of(version(3)), 3)
    absent = writers[0].held[0].shard.entries[0].name
    for writer in writers:
        held = writer.held[0]
        held.sent = [each for each in held.sent if each.tensor != 0]
    before = {k: v for shard in old for k, v in tensor_bytes(shard).items()}
    after = {k: v for shard in version(3) for k, v in tensor_bytes(shard).items()}
    whole = before | {name: after[name] for name in NAMES if name != absent}
    wanted = [make_shard(s.index, [whole[name] for name in tensor_bytes(s)]) for s in old]
    answers = await push_part(box_world, writers, [{"base_version": 1}] * 3)
    assert {answer.content_digest for answer in answers} == {content(wanted)}


async def test_what_the_base_has_not_is_refused(box_world: World) -> None:
    await box_world.push(version())
    (name, dtype, shape, data), *_ = tensor_bytes(version()[0]).values()
    for tensors, words in (
        ([("other", dtype, shape, data)], "'other'.*not at all"),
        ([(name, "F16", shape, data)], "is F16 .*, in version 1.*it is BF16"),
    ):
        writers = sharded([make_shard(0, tensors)], 2, key=words)
        for error in await refusals(box_world, writers):
            assert error.reason is Reason.LAYOUT_INVALID
            assert re.search(words, error.message)


async def test_bytes_that_are_not_what_a_writer_computed_are_refused(box_world: World) -> None:
    await box_world.push(version())
    writers = sharded(part_of(version(3)), 2)
    sent = writers[1].held[0].sent[0]
    digests = writers[1].held[0].digests()
    sent.data = bytes(len(sent.data))
    held = writers[1].held[0]
    for writer in writers:
        await writer.begin(box_world, partial=True, base_version=1)
    await writers[0].stream(box_world)
    waiting = asyncio.create_task(writers[0].commit(box_world))
    messages = [*held.shard.layout(), held.boxes(), *held.chunks(), digests]
    messages += list(writers[1].held[1].all())
    await asyncio.gather(writers[1].stream(box_world, messages), return_exceptions=True)
    with pytest.raises(WeightSyncError, match="arrived from writer 1"):
        await waiting
    assert [record.version for record in box_world.model.table.list()] == [1]


async def test_without_memory_for_the_delta_nothing_is_opened(tmp_path: Path) -> None:
    data = bytes(range(256)) * 1024
    async with world(tmp_path, slots=2, memory=900 << 10) as here:
        await here.push([make_shard(0, [("a", "F32", (len(data) // 4,), data)])])
        new = [make_shard(0, [("a", "F32", (len(data) // 4,), data[::-1])])]
        first, _ = sharded(new, 2)
        with pytest.raises(WeightSyncError) as caught:
            await first.begin(here, partial=True, base_version=1)
        assert caught.value.reason is Reason.MEMORY_EXHAUSTED
        assert here.model.table.get(1).holds == 0
        assert here.pushes.status() == []


async def half(here: World, writers: Sequence[Writer]) -> None:
    """Have two writers bring shard 0, and the first of them shard 1 as well."""
    first, second = writers
    for writer in writers:
        await writer.begin(here, partial=True, base_version=1)
    await first.stream(here)
    await second.stream(here, list(second.held[0].all()))
    push = here.pushes.find(first.push_id)
    await until(lambda: push.state.shards[0].verified)


async def test_another_server_on_the_store_leaves_it_alone(tmp_path: Path) -> None:
    old = version()
    new = changed(old, NAMES, 7)
    async with world(tmp_path, identity="one") as here:
        await here.push(old)
        first, second = sharded(part_of(new), 2)
        await half(here, [first, second])
        other = LocalStore(tmp_path / "store", "another")
        await other.open()
        with pytest.raises(WeightSyncError, match="through another server") as caught:
            await other.record_push(PushRecord("x" * 32, "m", 2, 0, ""))
        assert caught.value.reason is Reason.VERSION_CONFLICT
        await other.discard("m", 2)
        await second.stream(here, list(second.held[1].all()))
        answers = await asyncio.gather(first.commit(here), second.commit(here))
        assert {answer.content_digest for answer in answers} == {content(new)}
    async with world(tmp_path, identity="one") as here:
        assert here.model.table.get(2).content_digest == content(new)


async def test_after_a_crash_it_begins_again(tmp_path: Path) -> None:
    old = version()
    new = changed(old, NAMES, 7)
    writers = sharded(part_of(new), 2)
    crashed = tmp_path / "crashed"
    async with world(tmp_path, identity="one") as here:
        await here.push(old)
        await half(here, writers)
        await asyncio.to_thread(shutil.copytree, tmp_path / "store", crashed / "store")
        assert (crashed / "store" / "m" / "v2" / "push.json").exists()
    async with world(crashed, identity="one") as here:
        assert here.pushes.status() == []
        assert not (crashed / "store" / "m" / "v2").exists()
        answers = await push_part(here, writers, [{"base_version": 1}] * 2)
        assert {(answer.version, answer.content_digest) for answer in answers} == {
            (2, content(new))
        }


async def test_an_ended_push_keeps_nothing_of_what_it_was_made_of(tmp_path: Path) -> None:
    old, new = history(1)
    async with world(tmp_path, slots=3) as here:
        await here.push(old)
        await push_delta(here, old, new)
        await here.push(version())
        writers = sharded(part_of(changed(version(), NAMES, 7)), 2)
        await push_part(here, writers, [{"base_version": 3}] * 2)
        for number in (2, 4):
            push = here.pushes.find(here.model.table.get(number).push_id)
            assert push.state.delta is not None
            # Hundreds of them are remembered.
            facts = vars(push.state.delta).items()
            assert [name for name, value in facts if isinstance(value, dict) and value] == []
