"""Deltas from begin to commit: what becomes of them, and which are refused."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.deltas import (
    as_shard,
    delta_begin,
    delta_of,
    delta_shard,
    every_dtype,
    layout_of,
    stepped,
)
from tests.support.processes import names
from tests.support.threads import held_threads, memfds, stand_still
from tests.unit.server.deltas.pushing import history, push_chain, push_delta, send
from tests.unit.server.world import World, begin, content, make_shard, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.server.world import Shard


@pytest.mark.parametrize("store", ["", "memory://"])
@pytest.mark.parametrize("slots", [2, 3])
async def test_a_chain_of_deltas_is_what_full_pushes_would_be(
    tmp_path: Path, store: str, slots: int
) -> None:
    contents = history(5)
    async with world(tmp_path, store=store, slots=slots) as here:
        await here.push(contents[0], 1)
        for version in range(2, 7):
            base, new = contents[version - 2], contents[version - 1]
            answer = await push_delta(here, base, new, version)
            assert (answer.version, answer.content_digest) == (version, content(new))
            assert here.read(version) == [shard.data for shard in new]
        await here.model.segments.unmapped()
        assert here.budget.reserved == here.model.slots.reserved_bytes


async def test_everything_is_told_of_a_delta(here: World, tmp_path: Path) -> None:
    first, second = history(1)
    await here.push(first, 1, metadata={"run_id": "a"})
    shards = delta_of(first, second)
    size = sum(len(shard.data) for shard in shards)
    answer = await push_delta(here, first, second, 2, metadata={"run_id": "a"})
    assert (answer.stored_bytes, answer.size_bytes) == (size, layout_of(second).size)
    assert (answer.durable, answer.already) == (True, False)
    info = here.model.table.get(2).to_info()
    assert (info.kind, info.base_version, info.chain_length) == (pb.PUSH_KIND_DELTA, 1, 1)
    assert (info.stored_bytes, info.trainer_verified) == (size, True)
    assert info.layout_digest == here.model.table.get(1).to_info().layout_digest
    full = here.model.table.get(1).to_info()
    assert (full.kind, full.base_version, full.chain_length) == (pb.PUSH_KIND_FULL, 0, 0)
    assert full.stored_bytes == full.size_bytes
    # What is kept is what was pushed, byte for byte.
    folder = tmp_path / "store" / "m" / "v2"
    expected = ["commit.json", "delta-0.safetensors", "delta-1.safetensors"]
    assert names(folder) == [*expected, "delta.json", "manifest.json"]
    for index, shard in enumerate(shards):
        assert (folder / f"delta-{index}.safetensors").read_bytes() == shard.data


async def test_changes_are_counted(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1, fallback_reason="first")
    await push_delta(here, first, second, 2)
    (counts,) = here.meters.deltas
    before = [np.frombuffer(s.data[8 + s.header_size :], np.uint8) for s in first]
    after = [np.frombuffer(s.data[8 + s.header_size :], np.uint8) for s in second]
    bytes_changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    elements = here.model.table.get(2).commit
    assert elements is not None
    # Elements are at most as many as bytes, and wide ones hold several bytes that changed.
    assert bytes_changed / 8 < elements.changed_elements <= bytes_changed
    assert counts.fraction == elements.changed_fraction > 0
    assert counts.dense_bytes == layout_of(second).size
    assert counts.delta_bytes == sum(len(shard.data) for shard in delta_of(first, second))
    # Three shards, each with tensors that are empty or frozen.
    assert counts.codings["unchanged"] >= 6
    assert sum(counts.codings.values()) == len(layout_of(first).tensors)
    assert here.meters.fallbacks == ["first"]
    assert len(here.meters.phases["patch"]) == 1


async def test_nothing_changed_is_a_version_too(here: World) -> None:
    first = every_dtype()
    await here.push(first, 1)
    answer = await push_delta(here, first, first, 2)
    assert answer.content_digest == content(first)
    assert here.read(2) == [shard.data for shard in first]
    assert here.model.table.get(2).to_info().changed_fraction == 0


async def test_nan_payloads_and_minus_zero_arrive_bit_for_bit(here: World) -> None:
    bits = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000000, 0xFF800000, 0x3F800000]
    base = [make_shard(0, [("x", "F32", (7,), struct.pack("<7I", *bits))])]
    turned = [0xFFC00001, 0x7FC12345, 0x7FBFFFFF, 0x00000000, 0x80000000, 0x7F800000, 0x3F800001]
    new = [make_shard(0, [("x", "F32", (7,), struct.pack("<7I", *turned))])]
    await here.push(base, 1)
    await push_delta(here, base, new, 2)
    assert here.read(2) == [new[0].data]


# The base


async def test_a_wrong_base_is_refused_with_what_is_held(here: World) -> None:
    first, second, third = history(2)
    await push_chain(here, [first, second])
    stranger = every_dtype(seed=99)
    with pytest.raises(WeightSyncError) as caught:
        await push_delta(here, stranger, third, 3)
    assert caught.value.reason is Reason.BASE_MISMATCH
    held = {"held_version": "2", "held_content_digest": content(second)}
    assert caught.value.metadata == held
    assert "in full" in caught.value.message
    assert here.model.table.find(3) is None


async def test_an_older_base_is_as_good(here: World) -> None:
    first, second = history(1)
    await push_chain(here, [first, second])
    other = stepped(first, 77)
    await push_delta(here, first, other, 3)
    assert here.read(3) == [shard.data for shard in other]
    assert here.model.table.get(3).to_info().base_version == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "good"),
    [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True)],
)
async def test_runs_are_not_mixed(here: World, ours: str, theirs: str, good: bool) -> None:
    first, second = history(1)
    await here.push(first, 1, metadata={"run_id": ours} if ours else {})
    metadata = {"run_id": theirs} if theirs else {}
    if good:
        await push_delta(here, first, second, 2, metadata=metadata)
        return
    with pytest.raises(WeightSyncError, match="is of run 'a'") as caught:
        await push_delta(here, first, second, 2, metadata=metadata)
    assert caught.value.reason is Reason.BASE_MISMATCH


async def test_a_damaged_base_is_refused(here: World) -> None:
    first, second, third = history(2)
    await push_chain(here, [first, second])
    here.model.table.get(1).damaged = "tensor 'x' has a different digest"
    with pytest.raises(WeightSyncError, match="version 1 is damaged") as caught:
        await push_delta(here, second, third, 3)
    assert caught.value.reason is Reason.BASE_MISMATCH


async def test_a_base_stays_while_a_delta_of_it_is_pushed(here: World) -> None:
    first = every_dtype()
    await here.push(first, 1)
    await here.push(every_dtype(5), 2)
    begun = await here.pushes.begin(begin(version=3, **delta_begin(first)), None)
    with pytest.raises(WeightSyncError, match="that is being pushed") as caught:
        await here.model.collector.delete(1)
    assert caught.value.reason is Reason.VERSION_IN_USE
    await here.pushes.abort(pb.AbortPushRequest(push_id=begun.push_id))
    await here.model.collector.delete(1)
    assert here.model.table.find(1) is None


async def test_a_base_cannot_be_deleted_before_what_is_based_on_it(here: World) -> None:
    await push_chain(here, history(2))
    for version, above in ((1, 2), (2, 3)):
        with pytest.raises(WeightSyncError, match=f"base of version {above}") as caught:
            await here.model.collector.delete(version)
        assert caught.value.reason is Reason.VERSION_IN_USE
    for version in (3, 2, 1):
        await here.model.collector.delete(version)
    assert here.model.table.list() == []


# The same version


@pytest.mark.parametrize("again", ["full", "delta"])
@pytest.mark.parametrize("store", ["", "memory://"])
async def test_the_same_content_in_another_form_is_the_same_version(
    tmp_path: Path, again: str, store: str
) -> None:
    first, second = history(1)
    async with world(tmp_path, store=store, slots=3) as here:
        await here.push(first, 1)
        if again == "full":
            one = await push_delta(here, first, second, 2)
            two = (await send(here, second, 2, content(second))).commit
        else:
            one = (await send(here, second, 2, content(second))).commit
            two = await push_delta(here, first, second, 2)
        assert (one.already, two.already) == (False, True)
        assert one.content_digest == two.content_digest
        assert here.read(2) == [shard.data for shard in second]
        with pytest.raises(WeightSyncError) as caught:
            await push_delta(here, first, stepped(first, 50), 2)
        assert caught.value.reason is Reason.VERSION_CONFLICT


# What is refused


async def _refused(here: World, shards: list[Shard], reason: Reason, **fields: Any) -> str:
    base = fields.pop("base")
    commit = fields.pop("commit")
    before = here.read(1)
    with pytest.raises(WeightSyncError) as caught:
        await send(here, shards, 2, commit, **delta_begin(base, **fields))
    assert caught.value.reason is reason, caught.value.message
    for push in list(here.pushes._open.values()):
        await here.pushes.abort(pb.AbortPushRequest(push_id=push.state.id))
    assert here.model.table.find(2) is None
    assert here.read(1) == before
    assert here.model.table.get(1).holds == 0
    await here.model.segments.unmapped()
    assert here.budget.reserved == here.model.slots.reserved_bytes
    # It changed nothing: the right delta goes through.
    new = stepped(base, 0)
    await push_delta(here, base, new, 2)
    assert here.read(2) == [shard.data for shard in new]
    return caught.value.message


def _flipped(shard: Shard, at: int) -> Shard:
    data = bytearray(shard.data)
    data[at] ^= 1
    return as_shard(shard.index, bytes(data))


def _manifest(shard: Shard) -> int:
    return 8 + shard.header_size + 50


BROKEN: dict[str, Callable[[Shard], Shard]] = {
    "a flipped bit in the positions or values": lambda s: _flipped(s, len(s.data) - 3),
    "a flipped bit in the manifest": lambda s: _flipped(s, _manifest(s)),
}


@pytest.mark.parametrize("breaks", BROKEN.values(), ids=BROKEN.keys())
async def test_a_corrupt_shard_is_refused(here: World, breaks: Callable[[Shard], Shard]) -> None:
    first, second = history(1)
    await here.push(first, 1)
    shards = delta_of(first, second)
    shards[1] = breaks(shards[1])
    await _refused(here, shards, Reason.DIGEST_MISMATCH, base=first, commit=content(second))


async def test_a_shard_that_is_no_delta_is_refused_before_its_bytes(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1)
    commit = content(second)
    text = await _refused(here, second, Reason.LAYOUT_INVALID, base=first, commit=commit)
    assert "wsd1" in text


async def test_other_bytes_under_the_names_of_a_delta_are_refused(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1)
    parts = ("manifest", "positions", "values")
    fake = make_shard(0, [(f"wsd1.{part}.00000", "U8", (9,), bytes(9)) for part in parts])
    await _refused(here, [fake], Reason.SHARD_INVALID, base=first, commit=content(second))


async def test_a_delta_of_another_base_or_layout_is_refused(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1)
    stranger = every_dtype(seed=3)
    text = await _refused(
        here, delta_of(stranger, second), Reason.SHARD_INVALID, base=first, commit=content(second)
    )
    assert content(stranger) in text
    await here.model.collector.delete(2)
    narrow = [make_shard(0, [("s0.BF16", "BF16", (600,), bytes(1200))])]
    wide = stepped(narrow, 1)
    items = [("s0.BF16", "BF16", (600,), _values(narrow[0]), _values(wide[0]))]
    shards = [delta_shard(items, first, layout=narrow)]
    with pytest.raises(WeightSyncError, match="layout"):
        await send(here, shards, 3, content(second), **delta_begin(first))


def _values(shard: Shard) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(shard.data[8 + shard.header_size :], np.uint8)


async def test_a_tensor_that_the_base_has_not_is_refused(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1)
    items = [("new", "U8", (4,), np.zeros(4, np.uint8), np.ones(4, np.uint8))]
    shards = [delta_shard(items, first)]
    text = await _refused(here, shards, Reason.LAYOUT_INVALID, base=first, commit=content(second))
    assert "'new'" in text


async def test_a_tensor_that_two_shards_change_is_refused(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1)
    one = delta_of(first, second, 1)[0]
    both = []
    for index in range(2):
        before, after = (_values(version[0])[:600] for version in (first, second))
        items = [("s0.BOOL", "BOOL", (600,), before, after)]
        both.append(delta_shard(items, first, index=index))
    assert one.index == 0
    text = await _refused(here, both, Reason.SHARD_INVALID, base=first, commit=content(second))
    assert "two shards" in text


async def test_the_commit_of_a_delta_names_the_new_content(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1)
    shards = delta_of(first, second)
    text = await _refused(here, shards, Reason.REQUEST_INVALID, base=first, commit="")
    assert "content_digest" in text


async def test_another_content_than_the_commit_tells_is_refused(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1)
    shards, other = delta_of(first, second), content(stepped(first, 9))
    await _refused(here, shards, Reason.DIGEST_MISMATCH, base=first, commit=other)


async def test_a_delta_that_does_not_make_what_it_tells_is_refused(here: World) -> None:
    first, second = history(1)
    await here.push(first, 1)
    # Encoded against other bytes than those of the base that it names.
    mistaken = stepped(first, 40)
    items = []
    for before, after in zip(mistaken, second, strict=True):
        start = 8 + before.header_size
        items += [
            (
                t.name, t.dtype, t.shape,
                np.frombuffer(before.data, np.uint8)[start + t.begin : start + t.end],
                np.frombuffer(after.data, np.uint8)[start + t.begin : start + t.end],
            )
            for t in before.entries
        ]  # fmt: skip
    shards = [delta_shard(items, first)]
    text = await _refused(here, shards, Reason.DIGEST_MISMATCH, base=first, commit=content(second))
    assert "does not reproduce its declared digest" in text


async def test_a_key_of_an_open_push_of_another_kind_is_refused(here: World) -> None:
    first = every_dtype()
    await here.push(first, 1)
    fields = delta_begin(first, idempotency_key="k", version=2)
    await here.pushes.begin(begin(**fields), None)
    with pytest.raises(WeightSyncError, match="another kind") as caught:
        await here.pushes.begin(begin(idempotency_key="k", version=2), None)
    assert caught.value.reason is Reason.VERSION_CONFLICT


# The end of a push while it is opened


@pytest.mark.parametrize("newer", [False, True], ids=["aborted", "of an older writer"])
async def test_a_slot_is_not_given_back_before_its_begin_has_ended(
    tmp_path: Path, newer: bool
) -> None:
    first = every_dtype()
    async with world(tmp_path, store="memory://") as here:
        await here.push(first, 1)
        await here.model.segments.unmapped()
        before = memfds()
        with held_threads() as held:
            fields = delta_begin(first, version=2)
            beginning = asyncio.create_task(here.pushes.begin(begin(**fields), None))
            # Its layout is being written for the fetchers.
            await held.begun.wait()
            push = here.pushes.find(here.pushes.status()[0].push_id)
            if newer:
                await here.model.epochs.acquire("newer")
                ending: asyncio.Future[Any] = asyncio.ensure_future(push.lifecycle.closed())
            else:
                request = pb.AbortPushRequest(push_id=push.state.id)
                ending = asyncio.ensure_future(here.pushes.abort(request))
            await stand_still()
            assert not ending.done()
            assert push.state.record.slot is not None
            held.go.set()
            with pytest.raises(WeightSyncError) as caught:
                await beginning
            await ending
        assert caught.value.reason is (Reason.EPOCH_STALE if newer else Reason.PUSH_ABORTED)
        assert [slot.state for slot in here.model.slots.status()] == ["staged", "free"]
        assert here.model.table.get(1).holds == 0
        await here.model.segments.unmapped()
        assert here.budget.reserved == here.model.slots.reserved_bytes
        assert memfds() == before
