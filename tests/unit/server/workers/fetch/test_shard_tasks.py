"""What fetchers do with shards, in real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import names
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.manifest import ShardEntry
from weightsync.shm.segments import Segment
from weightsync_server.workers.fetch import fetch_api, shard_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LAYOUTS = {
    "one": [("w", "BF16", (64, 64))],
    "one byte": [("w", "U8", (1,))],
    "0-dim": [("a", "F32", ()), ("b", "BF16", (3,)), ("c", "BOOL", ())],
    "empty": [("a", "F32", (0, 7)), ("b", "F32", (2,)), ("c", "I8", (0,)), ("d", "I8", (0,))],
    "no tensor": [],
    "every dtype": [(name, name, (4, 2)) for name in DTYPE_BITS],
    "37,000 tensors": [(f"layers.{i}.weight", "BF16", (i % 5, 3)) for i in range(37_000)],
}


@pytest.mark.parametrize("layout", _LAYOUTS.values(), ids=_LAYOUTS.keys())
async def test_digests_are_of_each_tensor(
    layout: list[Any], fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    segment, shard, digests = fill(layout)
    pool = await pool_of(1)
    assert await pool.digest(segment, shard) == digests


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("layout", _LAYOUTS.values(), ids=_LAYOUTS.keys())
def test_parts_together_are_the_whole(
    layout: list[Any], count: int, fill: Callable[..., Any]
) -> None:
    segment, shard, digests = fill(layout)
    parts = [
        shard_tasks.digest(segment.view, shard, (number, count), threading.Event())
        for number in range(count)
    ]
    assert b"".join(parts) == b"".join(digests)
    if len(layout) > 1000:
        assert all(parts), "each has some of many tensors"


async def test_a_large_shard_is_cut_among_fetchers_unless_others_wait(
    fill: Callable[..., Any], pool_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await pool_of(3)
    await asyncio.sleep(0.1)  # they begin to wait
    asked: list[Any] = []
    compute = pool._compute

    def note(op: str, *args: Any, **facts: Any) -> Any:
        asked.append(facts["part"])
        return compute(op, *args, **facts)

    monkeypatch.setattr(pool, "_compute", note)
    large, shard, digests = fill([(f"w{at}", "U8", (8 << 20,)) for at in range(8)])
    small, other, others = fill([("w", "U8", (8 << 20,)), ("v", "U8", (8,))])
    assert await pool.digest(large, shard) == digests
    assert asked == [(0, 3), (1, 3), (2, 3)]
    asked.clear()
    # The second one comes when all are busy, the third when parts of the second wait.
    found = await asyncio.gather(*(pool.digest(large, shard) for _ in range(3)))
    assert list(found) == [digests] * 3
    assert asked == [(0, 3), (1, 3), (2, 3), (0, 3), (1, 3), (2, 3), (0, 1)]
    asked.clear()
    assert await pool.digest(small, other) == others
    assert asked == [(0, 1)], "too small"


async def test_of_parts_all_have_ended_when_one_fails_or_nobody_wants_them() -> None:
    ended: list[str] = []

    async def part(name: str, seconds: float, error: Exception | None = None) -> bytes:
        try:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
        except asyncio.CancelledError:
            # As a task that a fetcher is still at.
            await asyncio.sleep(0.05)
            raise
        finally:
            ended.append(name)
        return name.encode()

    assert await fetch_api._together([part("a", 0.02), part("b", 0)]) == [b"a", b"b"]
    ended.clear()
    with pytest.raises(KeyError, match="no"):
        await fetch_api._together([part("a", 9), part("b", 0, KeyError("no")), part("c", 9)])
    assert sorted(ended) == ["a", "b", "c"]
    ended.clear()
    asked = asyncio.create_task(
        fetch_api._together([part("a", 9), part("b", 0.02, KeyError("no"))])
    )
    await asyncio.sleep(0.04)  # the other one is being cancelled
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert sorted(ended) == ["a", "b"]


async def test_many_tasks_at_once_get_their_own_answers(
    fill: Callable[..., Any], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    pool = await pool_of(2)
    filled = [fill([("w", "U8", (1000 + i,))]) for i in range(40)]
    found = await asyncio.gather(
        *(pool.digest(segment, shard) for segment, shard, _ in filled),
        *(
            pool.persist(s, shard.size, str(tmp_path / str(i)))
            for i, (s, shard, _) in enumerate(filled)
        ),
    )
    assert found[:40] == [digests for _, _, digests in filled]
    for i, (segment, shard, _) in enumerate(filled):
        assert (tmp_path / str(i)).read_bytes() == bytes(segment.view[: shard.size])


@pytest.mark.parametrize("size", [1, 4096, (40 << 20) + 3])
async def test_what_was_persisted_is_loaded_again(
    size: int, fill: Callable[..., Any], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    pool = await pool_of(2)
    segment, shard, digests = fill([("w", "U8", (size,))])
    target = tmp_path / "model" / "v1" / "0.safetensors"
    await pool.persist(segment, shard.size, str(target))
    assert names(target.parent) == [target.name]
    other = await asyncio.to_thread(Segment.create, shard.size)
    await pool.load(str(target), shard.size, other)
    assert await pool.digest(other, shard) == digests
    other.view[: shard.size] = bytes(shard.size)
    fd = os.open(target, os.O_RDONLY)
    os.lseek(fd, 7, os.SEEK_SET)
    await pool.load(fd, shard.size, other)
    assert os.lseek(fd, 0, os.SEEK_CUR) == 7
    os.close(fd)
    assert await pool.digest(other, shard) == digests
    other.close()


async def test_a_changed_segment_has_other_digests(
    fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    # The mapping is kept between the two tasks, and must still show the new bytes.
    pool = await pool_of(1)
    segment, shard, digests = fill([("a", "U8", (8,)), ("b", "U8", (8,))])
    assert await pool.digest(segment, shard) == digests
    segment.view[shard.size - 1] ^= 1
    found = await pool.digest(segment, shard)
    assert found[0] == digests[0]
    assert found[1] != digests[1]


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda s: s.view.__setitem__(0, s.view[0] ^ 1), Reason.SHARD_INVALID),
        (lambda s: s.view.__setitem__(8, ord("[")), Reason.SHARD_INVALID),
        (lambda s: s.view.__setitem__(slice(9, 12), b'"v"'), None),
        (lambda s: s.view.__setitem__(slice(19, 26), b'"U16"  '), Reason.SHARD_INVALID),
    ],
)
async def test_the_header_in_the_segment_is_checked(
    break_it: Callable[[Segment], None],
    reason: Reason | None,
    fill: Callable[..., Any],
    pool_of: Callable[..., Any],
) -> None:
    pool = await pool_of(1)
    segment, shard, digests = fill([("w", "U8", (8,))])
    break_it(segment)
    if reason is None:
        assert await pool.digest(segment, shard) == digests
        return
    with pytest.raises(WeightSyncError) as caught:
        await pool.digest(segment, shard)
    assert caught.value.reason == reason
    assert pool.alive == 1


async def test_a_shard_larger_than_its_segment_is_refused(
    fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    pool = await pool_of(1)
    segment, _, _ = fill([("w", "U8", (8,))])
    with pytest.raises(WeightSyncError) as caught:
        await pool.digest(segment, ShardEntry("x", segment.capacity + 1, 8))
    assert caught.value.reason == Reason.REQUEST_INVALID


@pytest.mark.parametrize("change", [-1, 1, -100_000, None])
async def test_a_file_of_another_length_is_corrupt(
    change: int | None, fill: Callable[..., Any], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    pool = await pool_of(1)
    segment, shard, _ = fill([("w", "U8", (100_000,))])
    target = tmp_path / "0.safetensors"
    if change is not None:
        await pool.persist(segment, shard.size, str(target))
        os.truncate(target, shard.size + change)
    with pytest.raises(WeightSyncError) as caught:
        await pool.load(str(target), shard.size, segment)
    assert caught.value.reason == Reason.DATA_CORRUPT
    assert pool.alive == 1


async def test_a_link_in_place_of_a_shard_is_not_followed(
    fill: Callable[..., Any], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    pool = await pool_of(1)
    segment, shard, _ = fill([("w", "U8", (8,))])
    await pool.persist(segment, shard.size, str(tmp_path / "real"))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(WeightSyncError) as caught:
        await pool.load(str(tmp_path / "link"), shard.size, segment)
    assert caught.value.reason == Reason.DATA_CORRUPT


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE])
async def test_a_full_disk_leaves_nothing_and_the_fetcher_goes_on(
    limit: int, fill: Callable[..., Any], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    pool = await pool_of(1)
    segment, shard, _ = fill([("w", "U8", (20 << 20,))])
    await pool.digest(segment, shard)
    (pid,) = pool.pids
    before = resource.prlimit(pid, limit)
    # 1 MiB of file, or no descriptor above standard error: none that a task brings.
    few = 1 << 20 if limit == resource.RLIMIT_FSIZE else 3
    resource.prlimit(pid, limit, (few, before[1]))
    with pytest.raises(WeightSyncError) as caught:
        await pool.persist(segment, shard.size, str(tmp_path / "0.safetensors"))
    assert caught.value.reason == Reason.DISK_EXHAUSTED
    if limit == resource.RLIMIT_FSIZE:
        assert "this process may write 1048576 bytes per file" in caught.value.message
    assert names(tmp_path) == []
    resource.prlimit(pid, limit, before)
    await pool.persist(segment, shard.size, str(tmp_path / "0.safetensors"))
    assert pool.pids == [pid]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "weightsync-test", str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


async def test_a_really_full_disk(
    small_disk: Path, fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    pool = await pool_of(1)
    segment, shard, _ = fill([("w", "U8", (9 << 20,))])
    with pytest.raises(WeightSyncError) as caught:
        await pool.persist(segment, shard.size, str(small_disk / "0.safetensors"))
    assert caught.value.reason == Reason.DISK_EXHAUSTED
    assert "free space" in caught.value.message
    assert names(small_disk) == []
    await pool.persist(segment, 4 << 20, str(small_disk / "0.safetensors"))


@pytest.mark.parametrize("name", ["fsync", "pwrite"])
def test_an_error_of_the_disk_fails_the_write(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    target = tmp_path / "0.safetensors"
    target.write_bytes(b"the old one")
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(WeightSyncError) as caught:
        shard_tasks.persist(memoryview(b"data"), str(target), f"{target}.tmp", threading.Event())
    assert caught.value.reason == Reason.FAULT
    assert names(tmp_path) == [target.name]
    assert target.read_bytes() == b"the old one"


def test_a_cancelled_task_stops_between_pieces(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(shard_tasks.Cancelled):
        shard_tasks.persist(memoryview(b"data"), str(tmp_path / "x"), str(tmp_path / "y"), stop)
    assert names(tmp_path) == []


def test_a_fetcher_starts_without_grpc_torch_or_asyncio() -> None:
    code = "import sys, weightsync_server.workers.fetch.fetch_main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"grpc", "torch", "vllm", "numpy", "asyncio", "google.protobuf"}
    assert not heavy & set(done.stdout.split())
