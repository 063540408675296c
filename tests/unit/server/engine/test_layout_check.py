"""Tensors that the engine does not take are refused when their layout comes, before their bytes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Engine, Plant, checkpoint, plant, shards, tensors, until
from tests.unit.server.world import begin, make_shard
from weightsync.engine import EngineState
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.name_sets import pack
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import supervisor
from weightsync_server.push import layout_parts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.unit.server.world import Shard
    from weightsync.model.manifest import TensorEntry

_UNCHECKED, _PASSED = pb.LAYOUT_CHECK_UNCHECKED, pb.LAYOUT_CHECK_PASSED


def _with(change: dict[str, Any]) -> Shard:
    kinds = checkpoint(2) | change
    return make_shard(0, [(name, *kind) for name, kind in kinds.items()])


async def _layout_refused(it: Plant, shard: Shard, *names: str) -> WeightSyncError:
    """Send a layout and no byte; return the refusal."""
    opened = await it.here.pushes.begin(begin(shard_count=1), 5)
    with pytest.raises(WeightSyncError) as caught:
        await it.here.join(opened.push_id, shard.layout())
    assert caught.value.reason is Reason.ENGINE_REFUSED, caught.value.message
    assert json.loads(caught.value.metadata["tensors"]) == list(names)
    progress = it.here.pushes.get(pb.GetPushRequest(push_id=opened.push_id))
    assert progress.durability == pb.DURABILITY_FAILED
    return caught.value


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"d": ("U8", (1,), b"x")}, "d"),
        ({"b": ("BF16", (4, 8), bytes(64))}, "b"),
        ({"b": ("F16", (8, 4), bytes(64))}, "b"),
    ],
)
async def test_it_is_refused_by_name_without_a_byte_or_a_pause(
    it: Plant, change: dict[str, Any], name: str
) -> None:
    before = list(it.engine.events)
    error = await _layout_refused(it, _with(change), name)
    assert name in error.message
    assert it.engine.events == before
    assert it.keeper.serving
    # The slot is free again.
    await it.push(2)
    assert (await it.apply(2)).version == 2


async def test_a_name_that_no_rank_has_a_place_for_is_refused(it: Plant) -> None:
    added = {"d": ("U8", (1,), b"x"), "e": ("U8", (1,), b"y")}

    def placed(*names: str, of: Any) -> Any:
        return lambda replies: [
            {"ok": True, "rank": reply["rank"], "unplaced": pack(names, of)} for reply in replies
        ]

    it.engine.after["check"] = placed("e", of=added)
    error = await _layout_refused(it, _with(added), "e")
    assert error.message.startswith(
        "leave out the tensors that the model does not have (e); every rank"
    )
    # One that some rank has a place for is taken.
    it.engine.after["check"] = placed(of=["f"])
    await it.here.push([_with({"f": ("U8", (1,), b"z")})], 2)
    assert it.here.model.table.get(2).layout_check == _PASSED


@pytest.mark.parametrize("by_each_rank", [True, False])
@pytest.mark.parametrize(
    ("added", "remedy", "hint"),
    [
        (["module.a", "module.b"], "remove the prefix 'module.' from the names: ", ""),
        (["module.a", "aa"], "", "; the nearest name to 'aa' that the engine knows is 'a'"),
        (["d"], "", ""),
    ],
)
async def test_what_was_probably_meant_is_told(
    it: Plant, added: list[str], remedy: str, hint: str, *, by_each_rank: bool
) -> None:
    """Whether each rank refuses a name, or the server one that no rank has a place for."""
    added = sorted(added)
    shard = _with(dict.fromkeys(added, ("U8", (1,), b"x")))
    if not by_each_rank:
        it.engine.after["check"] = lambda replies: [
            {"ok": True, "rank": reply["rank"], "unplaced": pack(frozenset(added), added)}
            for reply in replies
        ]
    error = await _layout_refused(it, shard, *added)
    refused = "rank 0/0/0 refused: push this model" if by_each_rank else "leave out the tensors"
    assert error.message.startswith(remedy + refused)
    assert error.message.endswith(hint)
    assert ", ".join(added) in error.message
    # Also when it is remembered.
    assert (await _layout_refused(it, shard, *added)).message == error.message


async def test_a_refusal_is_remembered(it: Plant) -> None:
    wrong = _with({"d": ("U8", (1,), b"x")})
    first = await _layout_refused(it, wrong, "d")
    again = await _layout_refused(it, wrong, "d")
    assert again.message == first.message
    assert it.engine.calls.count("check") == 1


async def test_what_is_known_is_not_asked_again(it: Plant) -> None:
    await it.push(2)
    assert "check" not in it.engine.calls
    assert it.here.model.table.get(2).to_info().layout_check == _PASSED


async def test_an_open_push_tells_whether_its_layout_was_checked(it: Plant) -> None:
    asks = it.here.model.accepted.asks
    for kept, label in ((dict(asks), _PASSED), ({}, _UNCHECKED)):
        it.here.model.accepted.asks = kept
        opened = await it.here.pushes.begin(begin(shard_count=1), 5)
        await it.here.join(opened.push_id, shards(2)[0].layout())
        (push,) = it.here.pushes.status()
        assert push.layout_check == label
        await it.here.pushes.abort(pb.AbortPushRequest(push_id=opened.push_id))


async def test_without_an_engine_it_is_accepted_and_labelled_until_it_was_prepared(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path / "segments.sock")
    engine._condition, engine._reason = EngineState.DEAD, "it is not there yet"
    async with plant(tmp_path, engine) as it:
        await it.until(pb.ENGINE_STATE_AWAY)
        await it.push(2)
        await it.here.push([_with({"d": ("U8", (1,), b"x")})], 3)
        model = it.here.model
        assert [model.table.get(v).to_info().layout_check for v in (2, 3)] == [_UNCHECKED] * 2
        engine.restart(tensors(1))
        await it.ready()
        # It has the layout of the engine's checkpoint.
        assert [model.table.get(v).to_info().layout_check for v in (2, 3)] == [_PASSED, _UNCHECKED]


async def test_an_engine_that_comes_is_asked_anew(it: Plant) -> None:
    wrong = _with({"d": ("U8", (1,), b"x")})
    await _layout_refused(it, wrong, "d")
    it.engine.restart(tensors(1))
    await until(lambda: it.keeper.status().engine_id == it.engine._engine_id)
    await it.ready()
    await _layout_refused(it, wrong, "d")
    assert it.engine.calls.count("check") == 2


@pytest.mark.parametrize("fault", [WeightSyncError(Reason.ENGINE_AWAY, "gone"), None])
async def test_an_engine_that_cannot_tell_stops_no_push(
    it: Plant, fault: WeightSyncError | None
) -> None:
    def fail() -> None:
        raise fault or WeightSyncError(Reason.ENGINE_ASLEEP, "it sleeps")

    it.engine.before["check"] = fail
    await it.here.push([_with({"d": ("U8", (1,), b"x")})], 2)
    assert it.here.model.table.get(2).layout_check == _UNCHECKED
    assert it.keeper.status().state == pb.ENGINE_STATE_SERVING


async def test_no_byte_is_taken_while_the_engine_is_asked(it: Plant) -> None:
    go = asyncio.Event()
    it.engine.before["check"] = go.wait
    shard = _with({"d": ("U8", (1,), b"x")})
    opened = await it.here.pushes.begin(begin(shard_count=1), 5)
    sending = asyncio.create_task(it.here.join(opened.push_id, shard.all()))
    await asyncio.sleep(0.05)
    (push,) = it.here.pushes.status()
    assert (push.declared_bytes, push.received_bytes) == (len(shard.data), 0)
    go.set()
    with pytest.raises(WeightSyncError, match="d is extra"):
        await sending


# A whole push that lacks tensors.


def _only(*names: str, index: int = 0) -> Shard:
    kinds = checkpoint(2)
    return make_shard(index, [(name, *kinds[name]) for name in names])


async def _begun(it: Plant, **fields: Any) -> str:
    return (await it.here.pushes.begin(begin(**fields), 5)).push_id


def _refused_lacking(error: WeightSyncError, *names: str) -> None:
    assert error.reason is Reason.ENGINE_REFUSED, error.message
    assert json.loads(error.metadata["tensors"]) == list(names)
    assert "is missing" in error.message


async def test_what_is_absent_is_named_when_all_shards_are_described(it: Plant) -> None:
    push = await _begun(it, shard_count=2)
    await it.here.join(push, _only("a").layout())
    with pytest.raises(WeightSyncError) as caught:
        await it.here.join(push, _only("b", index=1).layout())
    _refused_lacking(caught.value, "c")
    progress = it.here.pushes.get(pb.GetPushRequest(push_id=push))
    assert progress.durability == pb.DURABILITY_FAILED
    assert it.engine.calls.count("check") == 1
    await it.push(2)


async def test_a_layout_that_is_known_is_refused_as_well(it: Plant) -> None:
    """It was taken while no engine was there."""
    asks, engines = dict(it.here.model.accepted.asks), it.here.model.engine_layouts.engines
    it.here.model.accepted.asks.clear()
    engine = engines.pop(it.keeper.name)
    await it.here.push([_only("a", "b")], 2)
    it.here.model.accepted.asks |= asks
    engines[it.keeper.name] = engine
    digest = it.here.model.table.get(2).to_info().layout_digest
    with pytest.raises(WeightSyncError) as caught:
        await _joined_with(it, _only("a", "b"), digest)
    _refused_lacking(caught.value, "c")


async def _joined_with(it: Plant, shard: Shard, digest: str) -> None:
    await it.here.join(await _begun(it, layout_digest=digest), shard.chunks())


async def test_how_many_shards_there_are_may_be_told_by_the_commit(it: Plant) -> None:
    push = await _begun(it)
    await it.here.join(push, _only("a", "b").all())
    with pytest.raises(WeightSyncError) as caught:
        await it.here.pushes.commit(pb.CommitPushRequest(push_id=push))
    _refused_lacking(caught.value, "c")
    assert it.here.model.table.find(2) is None or it.here.model.table.get(2).commit is None


async def test_the_writers_of_a_whole_push_are_told_and_those_of_a_part_may_lack(it: Plant) -> None:
    shard = _only("a")
    facts: dict[str, Any] = {"writers": 2, "shard_count": 1, "total_bytes": len(shard.data)}
    facts["idempotency_key"] = "k"
    push = await _begun(it, **facts)
    await _begun(it, writer=1, **facts)
    with pytest.raises(WeightSyncError) as caught:
        await it.here.join(push, shard.layout())
    _refused_lacking(caught.value, "b", "c")
    facts |= {"partial": True, "base_version": 1, "idempotency_key": "l"}
    push = await _begun(it, **facts)
    await it.here.join(push, shard.layout())


async def test_what_the_engine_does_not_need_is_asked_about_once(it: Plant) -> None:
    """As of a head that is tied: its checkpoint has it, and its ranks load nothing of it."""
    it.engine.after["check"] = lambda replies: [
        {"ok": True, "rank": reply["rank"], "unplaced": pack((), ("a", "b"))} for reply in replies
    ]
    for number in (2, 3):
        await it.here.push([_only("a", "b")], number)
    assert it.engine.calls.count("check") == 1


async def test_an_engine_that_cannot_be_asked_refuses_nothing(it: Plant) -> None:
    it.engine.before["check"] = _failing
    await it.here.push([_only("a", "b")], 2)
    assert it.here.model.table.get(2).commit is not None


async def test_a_push_waits_once_for_an_engine_that_something_else_has(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_CHECK_S", 0.1)
    monkeypatch.setattr(layout_parts, "_PATIENCE_S", 0.1)
    asks = it.here.model.accepted.asks
    asked: list[int] = []
    takes = asks[it.keeper.name]

    async def counted(found: Sequence[TensorEntry]) -> bool:
        asked.append(len(found))
        return await takes(found)

    asks[it.keeper.name] = counted
    odd = [make_shard(at, [(f"x{at}", "U8", (1,), b"x")]) for at in range(6)]
    push = await _begun(it, shard_count=7)
    async with it.keeper.exclusive():
        for shard in odd:
            await it.here.join(push, shard.layout())
    assert asked == [1]
    (status,) = it.here.pushes.status()
    assert status.layout_check == _UNCHECKED


async def test_an_engine_is_asked_about_each_shard_also_where_another_is_away(it: Plant) -> None:
    asked: list[str] = []

    async def there(found: Sequence[TensorEntry]) -> bool:
        asked.extend(one.name for one in found)
        return True

    it.here.model.accepted.asks = {"gone": _gone, "there": there}
    push = await _begun(it, shard_count=3)
    for at in range(2):
        shard = make_shard(at, [(f"x{at}", "U8", (1,), b"x")])
        await it.here.join(push, shard.layout())
    assert asked == ["x0", "x1"]


async def _gone(_: Sequence[TensorEntry]) -> bool:
    return False


def _failing() -> None:
    raise WeightSyncError(Reason.ENGINE_AWAY, "it is away")
