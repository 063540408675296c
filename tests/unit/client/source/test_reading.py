from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import (
    Client,
    DataError,
    InvalidError,
    NotFoundError,
    Reason,
    Retry,
    Timeouts,
)


def arrays(seed: int, count: int = 5) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {f"t{i}": rng.standard_normal(1000).astype(np.float32) for i in range(count)}


# Pulling.


def test_pull_writes_what_was_pushed(client: Client, tmp_path: Path) -> None:
    tensors = arrays(3)
    client.push(tensors, shard_bytes=8000)
    client.apply()
    seen: list[tuple[int, int]] = []
    result = client.pull(tmp_path / "new" / "out", on_progress=lambda *a: seen.append(a))
    assert [Path(f).name for f in result.files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    loaded = {}
    for file in result.files:
        loaded.update(load_file(file))
    assert all(np.array_equal(loaded[n], t) for n, t in tensors.items())
    assert result.size_bytes == seen[-1][0] == seen[-1][1]
    # It can be pushed again as it is, index and all.
    assert client.push(tmp_path / "new" / "out", version=1).already
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["out"]
    assert (tmp_path / "new" / "out").stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_pull_takes_up_a_cut_stream(
    client: Client, servicer: Any, tmp_path: Path, code: grpc.StatusCode
) -> None:
    client.push(arrays(3))
    servicer.cut_code = code
    servicer.cut_at = [3000, 3000, 9000]
    result = client.pull(tmp_path / "out", 1)
    with safe_open(result.files[0], "np") as file:
        assert np.array_equal(file.get_tensor("t2"), arrays(3)["t2"])
    offsets = [r.offset for r in servicer.requests if isinstance(r, pb.PullWeightsRequest)]
    assert offsets == [0, 3000, 3000, 9000]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "tensor 't4' arrived without its digest"),
        (lambda data: data[:-8], "tensor 't4' arrived without its digest"),
        (lambda data: data + b"\0", "longer than its tensors"),
        (lambda data: data.replace(b"F32", b"I32"), "header declares"),
        (lambda data: data[:5], "header"),
    ],
)
def test_pull_proves_every_tensor(
    client: Client, servicer: Any, tmp_path: Path, change: Any, sentence: str
) -> None:
    client.push(arrays(3))
    servicer.rewrite = change
    with pytest.raises((DataError, InvalidError), match=sentence):
        client.pull(tmp_path / "out", 1)
    assert list(tmp_path.iterdir()) == []


def test_pull_wants_an_empty_folder(client: Client, tmp_path: Path) -> None:
    client.push(arrays(0))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidError, match="not an empty folder"):
        client.pull(tmp_path, 1)
    (tmp_path / "file").unlink()
    assert len(client.pull(tmp_path, 1).files) == 1
    with pytest.raises(InvalidError, match="cannot be written"):
        client.pull("/proc/nowhere/out", 1)


def test_tensors_come_one_by_one(client: Client, servicer: Any) -> None:
    client.push(arrays(1, 8), shard_bytes=9000)
    pulled = client.tensors(1)
    assert np.array_equal(next(pulled).numpy(), arrays(1)["t0"])
    assert servicer.calls.count("PullWeights") == 1
    assert [t.name for t in pulled] == [f"t{i}" for i in range(1, 8)]
    assert servicer.calls.count("PullWeights") == 4
    with pytest.raises(NotFoundError):
        next(client.tensors(99))


# Watching.


def test_watch_tells_the_state_then_changes(client: Client) -> None:
    client.push(arrays(0))
    watch = client.watch()
    first = next(watch)
    assert (first.version.version, first.initial) == (1, True)
    client.push(arrays(1))
    second = next(watch)
    assert (second.version.version, second.initial, second.revision) == (2, False, 7)
    watch.close()


def test_watch_is_taken_up_again(client: Client, servicer: Any, status_error: Any) -> None:
    client.push(arrays(0))
    watch = client.watch()
    next(watch)
    while not servicer.watchers:
        time.sleep(0.01)
    servicer.watchers[0].put(status_error(grpc.StatusCode.UNAVAILABLE, "going away"))
    assert next(watch).initial
    assert servicer.calls.count("WatchVersions") == 2
    watch.close()


def test_watch_is_renewed_before_its_deadline_shows(running: Any, retry: Retry) -> None:
    with Client(running.address, timeouts=Timeouts(watch_s=0.2), retry=retry) as client:
        client.push(arrays(0))
        watch = client.watch()
        assert [next(watch).initial for _ in range(3)] == [True] * 3
        watch.close()


def test_close_ends_a_watch(running: Any, retry: Retry) -> None:
    client = Client(running.address, retry=retry)
    client.push(arrays(0))
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.extend(client.watch()))
    thread.start()
    while not seen and not running.servicer.watchers:
        time.sleep(0.01)
    time.sleep(0.1)
    client.close()
    thread.join(5)
    assert not thread.is_alive()


def test_watch_gives_up_on_a_refusal(client: Client, servicer: Any) -> None:
    def refuse(method: str, _request: Any) -> None:
        if method == "WatchVersions":
            raise WeightSyncError(Reason.MODEL_UNKNOWN, "no such model")

    servicer.before = refuse
    with pytest.raises(NotFoundError):
        next(client.watch())
