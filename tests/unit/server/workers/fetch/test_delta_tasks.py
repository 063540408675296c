"""What real fetcher processes do with deltas."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.deltas import delta_of, every_dtype, layout_of, stepped
from tests.unit.server.deltas.pushing import until
from tests.unit.server.world import content
from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.manifest import Manifest, ShardEntry
from weightsync.shm.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.server.world import Shard


@pytest.fixture
def segment_of() -> Iterator[Callable[[bytes], Segment]]:
    """Return a function that puts bytes into a segment."""
    made = []

    def make(data: bytes) -> Segment:
        segment = Segment.create(len(data))
        segment.view[: len(data)] = data
        made.append(segment)
        return segment

    yield make
    for segment in made:
        segment.close()


def _maps(pid: int, what: str) -> bool:
    return what in Path(f"/proc/{pid}/maps").read_text()


def document(base: list[Shard]) -> bytes:
    manifest = Manifest(layout_of(base), tuple(d for shard in base for d in shard.digests))
    body = manifest.to_json()
    return len(body).to_bytes(8, "little") + body


def entry_of(shard: Shard) -> ShardEntry:
    return ShardEntry(shard.name, len(shard.data), shard.header_size)


@pytest.mark.parametrize("stored", [False, True])
async def test_a_base_becomes_the_new_version(
    stored: bool,
    segment_of: Callable[[bytes], Segment],
    pool_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    base = every_dtype()
    new = stepped(base, 1)
    pool = await pool_of(2)
    layout = segment_of(document(base))
    tensors = layout_of(base).tensors
    segments = [segment_of(bytes(len(shard.data))) for shard in base]
    for segment, shard in zip(segments, base, strict=True):
        await pool.copy(segment_of(shard.data), len(shard.data), segment)
        assert bytes(segment.view[: len(shard.data)]) == shard.data
    changed = 0
    for delta in delta_of(base, new, 3):
        source: Segment | str = segment_of(delta.data)
        if stored:
            path = tmp_path / str(delta.index)
            path.write_bytes(delta.data)
            source = str(path)
        told, changes = await pool.inspect(layout, entry_of(delta), source)
        assert (told.shard, told.base_content_digest) == (delta.index, content(base))
        assert told.layout_digest == layout_of(base).signature
        changed += len(changes)
        for change in changes:
            tensor = tensors[change.tensor]
            shard = new[tensor.shard]
            start = 8 + shard.header_size
            data = shard.data[start + tensor.begin : start + tensor.end]
            assert change.digest == tensor_digest(data)
        for index, segment in enumerate(segments):
            await pool.patch(segment, index, layout, entry_of(delta), source)
    assert changed > 60
    for segment, shard in zip(segments, new, strict=True):
        assert bytes(segment.view[: len(shard.data)]) == shard.data


async def test_fetchers_get_ready_before_the_first_delta(pool_of: Callable[..., Any]) -> None:
    pool = await pool_of(2)
    assert not any(_maps(pid, "numpy") for pid in pool.pids)
    pool.warm()

    assert len(pool.pids) == 2
    for pid in pool.pids:
        await until(partial(_maps, pid, "numpy"))


async def test_bad_bytes_are_refused_and_the_fetcher_lives_on(
    segment_of: Callable[[bytes], Segment], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    base = every_dtype()
    new = stepped(base, 1)
    (delta,) = delta_of(base, new, 1)
    pool = await pool_of(1)
    pids = pool.pids
    layout = segment_of(document(base))
    target = segment_of(base[0].data)
    for at in range(0, len(delta.data), 97):
        broken = bytearray(delta.data)
        broken[at] ^= 0x10
        source = segment_of(bytes(broken))
        for act in (
            pool.inspect(layout, entry_of(delta), source),
            pool.patch(target, 0, layout, entry_of(delta), source),
        ):
            with pytest.raises(WeightSyncError) as caught:
                await act
            assert caught.value.reason in (Reason.SHARD_INVALID, Reason.DIGEST_MISMATCH)
    path = tmp_path / "short"
    path.write_bytes(delta.data[:-1])
    with pytest.raises(WeightSyncError) as caught:
        await pool.inspect(layout, entry_of(delta), str(path))
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert bytes(target.view[: len(base[0].data)]) == base[0].data
    await pool.patch(target, 0, layout, entry_of(delta), segment_of(delta.data))
    assert bytes(target.view[: len(new[0].data)]) == new[0].data
    assert pool.pids == pids


async def test_a_patch_is_never_tried_twice(
    segment_of: Callable[[bytes], Segment],
    pool_of: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = tmp_path / "plan"
    monkeypatch.setenv(failpoints.VARIABLE, f"@{plan}")
    base = every_dtype()
    (delta,) = delta_of(base, stepped(base, 1), 1)
    pool = await pool_of(1)
    layout, target = segment_of(document(base)), segment_of(base[0].data)
    # The work is done, the answer is not given.
    plan.write_text("fetcher.reply=panic")
    with pytest.raises(WeightSyncError, match="ended 1 fetcher") as caught:
        await pool.patch(target, 0, layout, entry_of(delta), segment_of(delta.data))
    assert caught.value.reason is Reason.FETCHER_FAILED
    hits = (tmp_path / "plan.hits").read_text().splitlines()
    assert len(hits) == 1
