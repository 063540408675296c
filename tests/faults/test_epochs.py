"""Who may write, on a real server: a stale writer changes nothing, and of two one commits."""

from __future__ import annotations

import json
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from safetensors.numpy import save

from tests.support.refusals import refusal
from tests.support.stock import push_messages
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

np = pytest.importorskip("numpy")

_CHUNK = 1 << 16
_RACES = 20


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return a folder for sockets and state; unix sockets allow 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="we-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[WeightSyncServer]:
    server = WeightSyncServer(folder / "run", folder / "state", flags=("--slots", "4"))
    server.start()
    yield server
    violations = server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).invariant_violations
    server.stop()
    assert not any(violations.values())


@pytest.fixture
def free(server: WeightSyncServer) -> int:
    """Return a version that nobody has pushed yet."""
    (model,) = server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
    return max(model.newest_version, 1) + 1


def _shard(seed: int) -> list[tuple[str, bytes]]:
    return [("one", save({"w": np.full((64, 1024), seed, np.float32)}))]


def _acquire(server: WeightSyncServer) -> int:
    return server.stub.AcquireEpoch(pb.AcquireEpochRequest(model="default"), timeout=5).epoch


def _push(server: WeightSyncServer, seed: int, version: int = 0, **begin: Any) -> Any:
    messages = push_messages(_shard(seed), version, **begin)
    return server.stub.PushWeights(messages, timeout=20).commit


def _versions(server: WeightSyncServer) -> dict[int, str]:
    answer = server.stub.ListVersions(pb.ListVersionsRequest(model="default"), timeout=5)
    return {
        info.version: info.content_digest
        for info in answer.versions
        if info.durability == pb.DURABILITY_COMMITTED
    }


class _Trainer:
    """A push on one stream whose messages go when a test says so."""

    def __init__(self, server: WeightSyncServer, seed: int, version: int, epoch: int) -> None:
        *messages, self._commit = push_messages(_shard(seed), version, epoch=epoch)
        self._messages = [part for message in messages for part in _parts(message)]
        self._waiting: queue.SimpleQueue[pb.PushWeightsRequest | None] = queue.SimpleQueue()
        self._call = server.stub.PushWeights.future(iter(self._waiting.get, None), timeout=30)

    def send(self, *kinds: str, most: int = 100) -> None:
        """Send what is left of these kinds of messages."""
        chosen = [m for m in self._messages if m.WhichOneof("message") in kinds][:most]
        for message in chosen:
            self._messages.remove(message)
            self._waiting.put(message)

    def commit(self) -> Any:
        self.send("layout", "chunk", "digests")
        self._waiting.put(self._commit)
        return self.end()

    def end(self) -> Any:
        self._waiting.put(None)
        return self._call.result()

    def refusal(self) -> tuple[grpc.StatusCode, Reason]:
        """Wait for the refusal without another message."""
        return refusal(self._call.result)


def _parts(message: pb.PushWeightsRequest) -> Iterator[pb.PushWeightsRequest]:
    if message.WhichOneof("message") != "chunk":
        yield message
        return
    chunk = message.chunk
    for at in range(0, len(chunk.data), _CHUNK):
        part = pb.PushWeightsRequest()
        part.chunk.shard, part.chunk.offset = chunk.shard, chunk.offset + at
        part.chunk.data = chunk.data[at : at + _CHUNK]
        yield part


def _received(server: WeightSyncServer, size: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        (model,) = server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
        if [push.received_bytes for push in model.pushes] == [size]:
            return
        time.sleep(0.01)
    raise AssertionError(f"{model.pushes}")


STALE = (grpc.StatusCode.FAILED_PRECONDITION, Reason.EPOCH_STALE)


def test_a_stale_writer_is_refused_at_begin(server: WeightSyncServer, free: int) -> None:
    first, second = _acquire(server), _acquire(server)
    assert second == first + 1
    assert refusal(lambda: _push(server, 1, free, epoch=first)) == STALE
    assert free not in _versions(server)
    assert _push(server, 1, free, epoch=second).version == free


def test_a_stale_writer_is_refused_at_the_next_chunk_of_an_open_stream(
    server: WeightSyncServer, free: int
) -> None:
    trainer = _Trainer(server, 1, free, _acquire(server))
    trainer.send("begin", "layout")
    trainer.send("chunk", most=2)
    _received(server, 2 * _CHUNK)
    second = _acquire(server)
    trainer.send("chunk", most=1)
    assert trainer.refusal() == STALE
    # Its slot and its number are free for the new writer.
    assert free not in _versions(server)
    assert _push(server, 2, free, epoch=second).version == free


def test_a_stale_writer_is_refused_at_the_commit(server: WeightSyncServer, free: int) -> None:
    begin = pb.BeginPushRequest(
        model="default", version=free, epoch=_acquire(server), shard_count=1
    )
    push_id = server.stub.BeginPush(begin, timeout=5).push_id
    _, *messages, _ = push_messages(_shard(1), free)
    join = pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))
    server.stub.PushWeights(iter([join, *messages]), timeout=20)
    second = _acquire(server)
    commit = pb.CommitPushRequest(push_id=push_id)
    assert refusal(lambda: server.stub.CommitPush(commit, timeout=20)) == STALE
    assert free not in _versions(server)
    assert _push(server, 2, free, epoch=second).version == free


def test_epochs_survive_a_crash(server: WeightSyncServer, free: int) -> None:
    first, second = _acquire(server), _acquire(server)
    server.kill()
    server.start()
    assert refusal(lambda: _push(server, 2, free, epoch=first)) == STALE
    assert _push(server, 2, free, epoch=second).version == free
    assert _acquire(server) == second + 1
    assert refusal(lambda: _push(server, 3, free + 1, epoch=second)) == STALE


def test_an_epoch_file_that_is_lost_makes_no_old_writer_good(
    server: WeightSyncServer, folder: Path, free: int
) -> None:
    first, second = _acquire(server), _acquire(server)
    _push(server, 1, free, epoch=second)
    server.kill()
    (file,) = (folder / "state").rglob("epoch.json")
    file.unlink()
    server.start()
    assert refusal(lambda: _push(server, 2, free + 1, epoch=first)) == STALE
    assert _acquire(server) == second + 1


def test_of_two_trainers_with_one_version_exactly_one_commits(
    server: WeightSyncServer, free: int
) -> None:
    epoch = _acquire(server)
    for version in range(free, free + _RACES):
        outcomes: list[Any] = []
        start = threading.Barrier(2)

        def race(seed: int, version: int = version, outcomes: list[Any] = outcomes) -> None:
            start.wait()  # noqa: B023 - both threads end before the next turn
            try:
                outcomes.append(_push(server, seed, version, epoch=epoch).content_digest)
            except grpc.RpcError as error:
                outcomes.append(error.code())

        threads = [threading.Thread(target=race, args=(seed,)) for seed in (version, -version)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        digests = [outcome for outcome in outcomes if isinstance(outcome, str)]
        assert len(digests) == 1, outcomes
        (other,) = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        assert other in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.ABORTED)
        assert _versions(server)[version] == digests[0]


def test_a_commit_that_races_a_new_epoch_is_there_or_is_not(
    server: WeightSyncServer, free: int
) -> None:
    epoch, kept = _acquire(server), 0
    for turn in range(_RACES):
        version = free + turn
        trainer = _Trainer(server, version, version, epoch)
        trainer.send("begin", "layout", "chunk", "digests")
        acquired: list[int] = []

        def take(turn: int = turn, acquired: list[int] = acquired) -> None:
            # A little later each turn, so that each of the two is first now and then.
            time.sleep(turn / 500)
            acquired.append(_acquire(server))

        taking = threading.Thread(target=take)
        taking.start()
        try:
            trainer.commit()
            committed = True
            kept += 1
        except grpc.RpcError as error:
            told = from_call(error)
            assert told is not None
            assert told.reason is Reason.EPOCH_STALE
            committed = False
        taking.join(20)
        assert (version in _versions(server)) == committed
        epoch = acquired[0]
    assert kept, "the race was never won by the commit"


@pytest.mark.parametrize(
    ("version", "epoch", "code"),
    [
        (2**63 - 1, 0, grpc.StatusCode.INVALID_ARGUMENT),
        # What a negative number is on the wire.
        (2**64 - 1, 0, grpc.StatusCode.INVALID_ARGUMENT),
        (2**53 - 1, 0, grpc.StatusCode.OUT_OF_RANGE),
        (0, 2**63 - 1, grpc.StatusCode.INVALID_ARGUMENT),
        (0, 2**64 - 1, grpc.StatusCode.INVALID_ARGUMENT),
        (0, 2**53 - 1, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_nobody_can_wind_versions_or_epochs_forward(
    server: WeightSyncServer, free: int, version: int, epoch: int, code: grpc.StatusCode
) -> None:
    newest = _acquire(server)
    assert refusal(lambda: _push(server, 1, version, epoch=epoch))[0] is code
    assert _push(server, 1, free, epoch=newest).version == free
    assert _push(server, 2, epoch=newest).version == free + 1
    assert _acquire(server) == newest + 1


def test_a_second_server_on_one_state_exits_at_once(server: WeightSyncServer, folder: Path) -> None:
    second = WeightSyncServer(folder / "run2", folder / "state")
    with pytest.raises(RuntimeError, match="did not start"):
        second.start()
    assert second.process is not None
    assert second.process.wait(5) == 1
    assert _push(server, 1).version


def test_a_second_server_on_one_port_exits_at_once(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        second = WeightSyncServer(
            folder / "run3", folder / "state3", flags=("--listen", f'["{address}"]')
        )
        with pytest.raises(RuntimeError, match="did not start"):
            second.start()
        assert second.process is not None
        assert second.process.wait(5) == 1


def _run(server: WeightSyncServer, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightsync_client.cli", *args, "--address", server.address]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_two_runs_are_told_of_each_other_and_an_epoch_keeps_the_second_out(
    server: WeightSyncServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(3):
        (tmp_path / f"{seed}.safetensors").write_bytes(_shard(100 + seed)[0][1])
    with Client(server.address) as first:
        before = first.push(tmp_path / "0.safetensors").version
        other = _run(server, "push", f"{tmp_path}/1.safetensors", "--json")
        assert other.returncode == 0, other.stderr
        assert json.loads(other.stdout)["other_version"] == before
        mine = first.push(tmp_path / "2.safetensors")
        assert (mine.runs_alternate, mine.other_version) == (True, before + 1)
        assert "two trainers push: run " in server.log
        (warned,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert f"version {before + 1} is from another run, {mine.other_run}, between" in warned
        assert (
            "between versions of this run; stop one of them, or have the right one call" in warned
        )
        ours, theirs = first.status().models[0].client_runs[:2]
        assert ours.newest_version == before + 2
        assert mine.other_run == theirs.client_run
        first.acquire_epoch()
        newest = first.push(tmp_path / "0.safetensors").version
    for _ in ("before", "after a restart"):
        refused = _run(server, "push", f"{tmp_path}/1.safetensors")
        assert refused.returncode != 0
        assert f"run {ours.client_run} took epoch" in refused.stderr
        assert newest == max(_versions(server))
        server.stop()
        server.start()
    taken = _run(server, "epoch").stdout.strip()
    done = _run(server, "push", f"{tmp_path}/1.safetensors", "--epoch", taken)
    assert done.returncode == 0, done.stderr
