"""What an engine received by itself: a version like any other, or none, and the trainer is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine import plant as plants
from tests.unit.server.engine.plant import Plant, checkpoint, plant, tensors, until
from weightsync.engine import WEIGHT_UPDATES, WaitingUpdate
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import build_header
from weightsync.shm.segment_socket import SegmentClient
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.extensions import update_committer
from weightsync_server.extensions.update_committer import UpdateCommitter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

_Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


class _Feed:
    """What a bridge is to the server; the files are the test's.

    Attributes:
        ended: Version and error of each update, in order.
        cut: Bytes that the files of the next updates lack at their ends.
        sends: Whether it sends files when it is asked to.
        answers: Whether it says so.
        faults: How many of the next answers fail as nobody expects.
    """

    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []
        self.cut = 0
        self.sends = True
        self.answers = True
        self.faults = 0
        self.watchers = 0
        self._waiting: asyncio.Queue[WaitingUpdate] = asyncio.Queue()
        self._parts: list[_Tensors] = []

    async def update(
        self, *parts: _Tensors, label: str = "", partial: bool = False
    ) -> tuple[int, str]:
        """Bring an update; return what became of it."""
        self._parts = list(parts)
        name = f"update-{len(self.ended)}"
        self._waiting.put_nowait(WaitingUpdate(name, "weightsync_nccl", label, partial))
        count = len(self.ended)
        await until(lambda: len(self.ended) > count)
        return self.ended[-1]

    async def watch(self) -> AsyncGenerator[WaitingUpdate, None]:
        self.watchers += 1
        try:
            while True:
                yield await self._waiting.get()
        finally:
            self.watchers -= 1

    async def offer(self, update_id: str, segment_socket: str, offer_id: str) -> list[str]:
        del update_id
        if not self.sends:
            raise WeightSyncError(Reason.ENGINE_REFUSED, "rank 0/0/0 has nothing")
        with contextlib.ExitStack() as stack:
            offered = []
            for index, part in enumerate(self._parts):
                header, _ = build_header((name, *kind[:2]) for name, kind in part.items())
                data = len(header).to_bytes(8, "little") + header
                data += b"".join(kind[2] for kind in part.values())
                fd = os.memfd_create("update")
                stack.callback(os.close, fd)
                os.write(fd, data[: len(data) - self.cut])
                offered.append((f"update-{index}", os.fstat(fd).st_size, fd))
            with SegmentClient(segment_socket) as client:
                await asyncio.to_thread(client.offer, offer_id, offered)
        if not self.answers:
            # They are there by then, and nobody has looked.
            await asyncio.sleep(0.1)
            raise WeightSyncError(Reason.ENGINE_AWAY, "the answer was lost")
        return [name for name, _, _ in offered]

    async def end(self, update_id: str, version: int, error: str) -> None:
        del update_id
        self.ended.append((version, error))
        if self.faults:
            self.faults -= 1
            raise ZeroDivisionError


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    plants.hurry(monkeypatch)


@pytest.fixture
def feed() -> _Feed:
    return _Feed()


@pytest.fixture
async def it(tmp_path: Path, feed: _Feed, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plant]:
    async with _site(tmp_path, feed, monkeypatch) as made:
        yield made


@contextlib.asynccontextmanager
async def _site(folder: Path, feed: _Feed, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plant]:
    monkeypatch.setattr(update_committer, "_LOOK_S", 0.02)
    async with plant(folder) as made:
        made.engine._abilities.add(WEIGHT_UPDATES)
        await made.ready()
        committer = UpdateCommitter(made.keeper, feed, made.applier)
        committer.start()
        await until(lambda: feed.watchers == 1)
        yield made
        await committer.stop()
        assert feed.watchers == 0


def _info(it: Plant, version: int) -> pb.VersionInfo:
    return it.here.model.table.get(version).to_info()


async def test_an_update_is_a_version_that_is_live(it: Plant, feed: _Feed) -> None:
    assert await feed.update(checkpoint(2), label="step 9") == (2, "")
    assert it.engine.serves == 2
    info = _info(it, 2)
    assert info.durability == pb.DURABILITY_COMMITTED
    assert dict(info.metadata) == {"transfer": "weightsync_nccl", "label": "step 9"}
    assert info.layout_check == pb.LAYOUT_CHECK_PASSED
    assert (await it.verify()).verified


async def test_a_member_of_a_fleet_commits_nothing_of_it(
    it: Plant, feed: _Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(it.applier, "_context", replace(it.applier._context, fleet="f"))
    version, error = await feed.update(checkpoint(2))
    assert version == 0
    assert error.startswith("use `weightsync fleet apply`")
    assert [record.version for record in it.here.model.table.list()] == [1]
    assert it.engine.serves == 1


async def test_parts_are_shards_of_one_version(it: Plant, feed: _Feed) -> None:
    parts = [{name: kind} for name, kind in checkpoint(2).items()]
    assert await feed.update(*parts) == (2, "")
    assert it.engine.serves == 2
    assert _info(it, 2).shard_count == len(parts)


async def test_what_a_partial_update_leaves_out_stays(it: Plant, feed: _Feed) -> None:
    names = sorted(checkpoint(2))
    changed = {names[0]: checkpoint(2)[names[0]]}
    version, error = await feed.update(changed)
    assert version == 0
    assert error
    assert await feed.update(changed, partial=True) == (3, "")
    assert it.engine.live == tensors(1) | {names[0]: tensors(2)[names[0]]}
    assert dict(_info(it, 3).metadata) == {"transfer": "weightsync_nccl", "base_version": "1"}
    assert (await it.verify()).verified
    whole = checkpoint(1) | changed
    assert await feed.update(whole) == (4, "")
    # Bit for bit what a push of all would be.
    assert _info(it, 4).content_digest == _info(it, 3).content_digest
    # All of it is no part: nothing is kept.
    assert await feed.update(checkpoint(2), partial=True) == (5, "")
    assert _info(it, 5).shard_count == 1


@pytest.mark.parametrize("serves", [1, 3])
async def test_a_partial_update_undoes_nothing_that_came_meanwhile(
    it: Plant, feed: _Feed, serves: int
) -> None:
    back = serves == 1
    await it.push(*((2,) if back else (2, 3)))
    await it.apply(2)
    name = min(checkpoint(4))
    receive = it.here.model.adoption.receive

    async def slowly(*args: Any) -> Any:
        record = await receive(*args)
        await (it.rollback() if back else it.apply(3))
        return record

    it.here.model.adoption.receive = slowly  # type: ignore[method-assign, assignment]
    version, error = await feed.update({name: checkpoint(4)[name]}, partial=True)
    assert version == 0
    assert f"send the update again: version {serves} is live" in error
    assert it.engine.serves == serves
    refused = 3 if back else 4
    assert _info(it, refused).serving == pb.SERVING_REJECTED
    it.here.model.adoption.receive = receive  # type: ignore[method-assign]
    assert await feed.update({name: checkpoint(4)[name]}, partial=True) == (refused + 1, "")
    assert it.engine.live == tensors(serves) | {name: tensors(4)[name]}


async def test_a_partial_update_brings_what_the_base_has_and_as_it_has_it(
    it: Plant, feed: _Feed
) -> None:
    name, (dtype, shape, data) = next(iter(checkpoint(2).items()))
    wrongs: list[_Tensors] = [
        {"other": (dtype, shape, data)},
        {name: (dtype, (len(data) // 4, 1), data)},
    ]
    for wrong in wrongs:
        version, error = await feed.update(wrong, partial=True)
        assert version == 0
        assert "send all tensors, or send these exactly as in the version that is served" in error
        assert it.engine.serves == 1


async def test_a_matrix_that_a_part_lacks_for_it_was_equal_is_named(
    tmp_path: Path, feed: _Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As of two that began with zeros, and that the engine has one by one.
    one = tensors
    monkeypatch.setitem(plants.KINDS, "d", plants.KINDS["b"])
    monkeypatch.setattr(plants, "tensors", lambda seed: {**one(seed), "d": one(seed)["b"]})
    async with _site(tmp_path, feed, monkeypatch) as it:
        new = checkpoint(2)
        version, error = await feed.update({"b": new["b"]}, partial=True)
        assert version == 0
        assert error.startswith('send "d" as well: ')
        assert "d is missing" in error
        assert [record.version for record in it.here.model.table.list()] == [1]
        both = {"b": new["b"], "d": checkpoint(3)["d"]}
        assert await feed.update(both, partial=True) == (2, "")
        # What is equal no more is kept.
        assert await feed.update({"b": checkpoint(4)["b"]}, partial=True) == (3, "")
        assert it.engine.live["d"] == one(3)["b"]


async def test_the_same_weights_once_more_are_another_version(it: Plant, feed: _Feed) -> None:
    for version in (2, 3):
        assert await feed.update(checkpoint(1)) == (version, "")
    assert await feed.update(checkpoint(2)) == (4, "")
    reply = await it.rollback()
    assert (reply.report.version, reply.rejected_version) == (3, 4)
    assert it.engine.serves == 1
    assert await feed.update(checkpoint(2)) == (5, "")


async def test_it_comes_between_pushes_and_in_their_epoch(it: Plant, feed: _Feed) -> None:
    epoch = await it.here.model.epochs.acquire("a trainer")
    assert await feed.update(checkpoint(2)) == (2, "")
    assert _info(it, 2).epoch == epoch


async def test_a_file_that_is_not_whole_is_no_version(it: Plant, feed: _Feed) -> None:
    feed.cut = 1
    version, error = await feed.update(checkpoint(2))
    assert version == 0
    assert "the update cannot be read" in error
    _nothing_changed(it)
    feed.cut = 0
    assert await feed.update(checkpoint(2)) == (2, "")


def _nothing_changed(it: Plant) -> None:
    assert it.engine.serves == 1
    assert [record.version for record in it.here.model.table.list()] == [1]
    assert it.leases() == {1: 1}


async def test_tensors_that_the_engine_does_not_take_are_no_version(it: Plant, feed: _Feed) -> None:
    version, error = await feed.update(checkpoint(2) | {"bb": ("U8", (1,), b"x")})
    assert version == 0
    assert "bb" in error
    _nothing_changed(it)


async def test_an_update_that_is_not_handed_over_is_no_version(it: Plant, feed: _Feed) -> None:
    feed.sends = False
    assert await feed.update(checkpoint(2)) == (0, "rank 0/0/0 has nothing")
    feed.sends = True
    assert "arrived without a tensor" in (await feed.update())[1]
    _nothing_changed(it)


async def test_a_part_of_a_model_is_neither_served_nor_the_newest(it: Plant, feed: _Feed) -> None:
    part = {name: kind for name, kind in checkpoint(2).items() if name != "b"}
    version, error = await feed.update(part)
    assert version == 0
    assert "b" in error
    assert it.engine.serves == 1
    assert _info(it, 2).serving == pb.SERVING_REJECTED
    assert (await it.apply()).version == 1


async def test_what_was_restored_is_told(it: Plant, feed: _Feed) -> None:
    it.engine.wrong = [bytes(256)]
    version, error = await feed.update(checkpoint(2))
    assert version == 0
    assert error
    assert it.engine.serves == 1
    assert _info(it, 2).serving == pb.SERVING_REJECTED
    assert await feed.update(checkpoint(3)) == (3, "")


async def test_a_fault_ends_the_update_and_not_the_watch(
    it: Plant, feed: _Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def faulty(*args: Any, **more: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(it.applier, "apply", faulty)
        assert "see its log" in (await feed.update(checkpoint(2)))[1]
    # What the trainer was refused is not what "newest" means.
    assert _info(it, 2).serving == pb.SERVING_REJECTED
    assert (await it.apply()).version == 1
    assert await feed.update(checkpoint(3)) == (3, "")
    assert it.engine.live == tensors(3)


async def test_a_watch_that_fails_is_begun_anew(it: Plant, feed: _Feed) -> None:
    feed.faults = 1
    assert (await feed.update(checkpoint(2)))[0] == 2
    await until(lambda: feed.watchers == 1 and not feed.faults)
    assert await feed.update(checkpoint(3)) == (3, "")


async def test_files_that_came_are_closed_when_the_call_fails(it: Plant, feed: _Feed) -> None:
    def memory() -> int:
        links = []
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(fd.readlink()))
        return sum("memfd:update" in link for link in links)

    feed.answers = False
    assert (await feed.update(checkpoint(2)))[0] == 0
    await until(lambda: memory() == 0)
    _nothing_changed(it)


async def test_an_engine_that_receives_nothing_is_not_watched(tmp_path: Path, feed: _Feed) -> None:
    async with plant(tmp_path) as made:
        await made.ready()
        for own in (feed, None):
            committer = UpdateCommitter(made.keeper, own, made.applier)
            committer.start()
            await asyncio.sleep(0.05)
            assert feed.watchers == 0
            await committer.stop()
