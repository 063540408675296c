"""The same-host hand-off between real processes: what it brings, and who errs in which way."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from tests.support.lending import Trainer, begun, close_all
from tests.support.weightsync_server import WeightSyncServer
from tests.unit.server.world import simple
from weightsync.delta.kernels import available
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.same_host import IpcPlacement, SameHostClient, WriteLease
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import (
    AbortedError,
    AsyncClient,
    Client,
    ClientError,
    Fallback,
    InvalidError,
    PushKind,
    Streamed,
    TransferPath,
)
from weightsync_client.push import policy
from weightsync_client.source import source, tensor_stream
from weightsync_client.source.shards import Shard
from weightsync_client.source.tensors import Scratch, SourceTensor, wrap
from weightsync_client.transport import copying, shm_writer
from weightsync_client.transport.copying import NativeCopier
from weightsync_client.transport.cuda_ipc import CudaIpcTransport
from weightsync_client.transport.protocol import Sent
from weightsync_client.transport.shm_transport import ShmTransport

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["memory://", ""], ids=["memory", "file"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WeightSyncServer]:
    folder = tmp_path_factory.mktemp("sh")
    listen = [f"unix:{folder}/r/server.sock", f"unix:{folder}/a.sock?role=read"]
    server = WeightSyncServer(
        folder / "r",
        folder / "s",
        store=request.param,
        flags=("--same-host", "--slots=3", f"--listen={json.dumps(listen)}"),
        start_s=120,
    )
    server.start()
    yield server
    assert server.stop() == 0
    assert "invariant" not in server.log


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def client(server: WeightSyncServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def weights(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    large = {f"t{i}": rng.integers(0, 255, (1000 + i, 700), np.uint8) for i in range(8)}
    return {**large, "small": np.full(1, seed, np.float32), "none": np.empty((0, 3), np.int64)}


def pulled(client: Client, version: int) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.data) for tensor in client.tensors(version)}


def same(client: Client, version: int, tensors: dict[str, Any]) -> bool:
    return pulled(client, version) == {name: array.tobytes() for name, array in tensors.items()}


def refusal(trainer: Trainer, index: int, **wrong: Any) -> Reason:
    with pytest.raises(WeightSyncError) as told:
        trainer.hand(index, **wrong)
    return told.value.reason


def finish(trainer: Trainer) -> None:
    trainer.hand(1)
    trainer.commit()


def listed(client: Client) -> set[int]:
    return {version.version for version in client.versions()}


def nothing_came(client: Client, before: set[int]) -> bool:
    """Whether a push that failed leaves the list, within a time: it is cleared away apart."""
    end = time.monotonic() + 20
    while not listed(client) <= before and time.monotonic() < end:
        time.sleep(0.02)
    return listed(client) <= before


def copied_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every hand-off say that the server copied all from GPUs; tests/gpu has the same."""
    send = ShmTransport.send

    def copied(self: ShmTransport, *facts: Any) -> Sent:
        sent = send(self, *facts)
        return replace(sent, by_server=sent.reason is None)

    monkeypatch.setattr(ShmTransport, "send", copied)


# What it brings.


@pytest.mark.parametrize("level", ["plain", "avx2"])
def test_a_state_dict_arrives_whole_whatever_its_layout(
    server: WeightSyncServer, client: Client, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level not in {"plain", *available()}:
        pytest.skip(f"this machine has no {level} kernels")
    monkeypatch.setattr(copying, "_level", lambda: level)
    copied: list[int] = []
    update, enter = NativeCopier.update, shm_writer._mapped
    mapped: list[bool] = []

    def note(self: NativeCopier, piece: memoryview, target: memoryview) -> None:
        copied.append(len(piece))
        update(self, piece, target)

    @contextlib.contextmanager
    def watched(*given: Any) -> Iterator[memoryview | None]:
        with enter(*given) as target:
            mapped.append(target is not None)
            yield target

    monkeypatch.setattr(NativeCopier, "update", note)
    monkeypatch.setattr(shm_writer, "_mapped", watched)
    told: list[int] = []
    for seed, size in enumerate((1_000_000, 3_000_000, 1_000_000)):
        # The third time the server knows the layout.
        told.clear()
        result = client.push(
            weights(seed),
            delta="never",
            shard_bytes=size,
            on_progress=lambda sent, _: told.append(sent),
        )
        assert (result.way, result.way_reason) == (TransferPath.SAME_HOST, "")
        assert result.sent_bytes == result.size_bytes == max(told)
        assert client.get_version(result.version).trainer_verified
        assert same(client, result.version, weights(seed))
    # Where the kernel makes huge pages, shards of 2 MiB and more are mapped.
    assert bool(copied) is (any(mapped) and level != "plain")
    lines = [json.loads(line[line.index("{") :]) for line in server.log.splitlines() if "{" in line]
    ours = [line for line in lines if line.get("method") == "same_host"]
    assert {(line["role"], line["peer"].partition(" ")[0]) for line in ours} == {
        ("push", f"pid:{os.getpid()}")
    }


def test_what_the_server_copies_from_a_gpu_is_no_delta_while_it_keeps_it_in_memory(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no GPU here; tests/gpu has the same with one.
    copied_by_the_server(monkeypatch)
    results = [client.push(weights(70))]
    # What lies elsewhere is compared, although what came before was copied.
    results.append(client.push(weights(70)))
    monkeypatch.setattr(policy, "_on_gpus", lambda tensors: True)
    results += [client.push(weights(70)) for _ in range(2)]
    later = "" if results[0].durable else Fallback.COPIED
    assert [result.fallback_reason for result in results] == [Fallback.FIRST, "", later, later]


def test_without_room_for_a_copy_on_the_gpu_it_is_found_out_first_whether_one_is_needed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no GPU here, so that none has room.
    monkeypatch.setattr(policy, "_on_gpus", lambda tensors: True)
    first = client.push(weights(71))
    assert (first.fallback_reason, client._history.snapshot.current) == (Fallback.FIRST, None)
    # The server did not copy it.
    second = client.push(weights(71))
    assert second.fallback_reason is Fallback.FIRST
    assert client._history.snapshot.current is not None
    assert client.push(weights(71)).kind is PushKind.DELTA
    copied_by_the_server(monkeypatch)
    with Client(client._link.address) as other:
        results = [other.push(weights(71)) for _ in range(3)]
    later = [Fallback.FIRST, ""] if results[0].durable else [Fallback.COPIED] * 2
    assert [result.fallback_reason for result in results] == [Fallback.FIRST, *later]


def test_a_copy_that_there_was_is_never_left_behind_for_that(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = client.push(weights(72))
    assert client._history.snapshot.current is not None
    monkeypatch.setattr(policy, "_on_gpus", lambda tensors: True)
    # Every value differs, and the next version hardly does from this one.
    second = client.push(weights(73))
    assert (first.fallback_reason, second.fallback_reason) == (Fallback.FIRST, Fallback.TOO_DENSE)
    changed = weights(73)
    changed["t0"][0, 0] ^= 1
    assert client.push(changed).kind is PushKind.DELTA


def test_a_first_push_that_failed_has_tried_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_on_gpus", lambda tensors: True)
    highest = client.push(weights(74), delta="never").version
    with pytest.raises(ClientError, match="higher version"):
        client.push(weights(74), version=highest - 1)
    client.push(weights(74))
    assert client._history.snapshot.current is None


def test_files_and_the_next_delta_take_their_ways(client: Client, tmp_path: Path) -> None:
    first = client.push(weights(7))
    assert (first.way, first.way_reason) == (TransferPath.SAME_HOST, "")
    changed = weights(7)
    changed["t0"][0, 0] ^= 1
    second = client.push(changed)
    assert (second.way, second.way_reason) == (TransferPath.STREAM, Streamed.DELTA)
    assert same(client, second.version, changed)
    client.pull(tmp_path, first.version)
    third = client.push(tmp_path, delta="never")
    assert (third.way, third.content_digest) == (TransferPath.SAME_HOST, first.content_digest)


async def test_asyncio_takes_it_too(server: WeightSyncServer) -> None:
    async with AsyncClient(server.address) as client:
        assert (await client.push(weights(8), delta="never")).way is TransferPath.SAME_HOST


def test_what_cannot_go_so_is_sent_and_says_why(server: WeightSyncServer, client: Client) -> None:
    off = client.push(weights(1), delta="never", same_host="never")
    assert (off.way, off.way_reason) == (TransferPath.STREAM, Streamed.OFF)
    once = client.push(iter(weights(2).items()), delta="never")
    assert (once.way, once.way_reason) == (TransferPath.STREAM, Streamed.ITERABLE)
    path = server.run_dir / "trainers.sock"
    path.rename(path.with_suffix(".away"))
    try:
        away = client.push(weights(3), delta="never")
    finally:
        path.with_suffix(".away").rename(path)
    assert (away.way, away.way_reason) == (TransferPath.STREAM, Streamed.UNREACHABLE)
    assert same(client, away.version, weights(3))
    with pytest.raises(InvalidError, match="same_host"):
        client.push(weights(4), same_host="sometimes")


def test_shards_of_several_gpus_are_written_and_say_so(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The tensors only say that they lie on GPUs, one here and one there.
    def on_gpus(name: str, value: object) -> SourceTensor:
        tensor = wrap(name, value)
        return replace(tensor, device=torch.device("cuda", len(name) % 2), in_place=True)

    tensors = {"x" * (1 + number): value for number, value in enumerate(weights(9).values())}
    monkeypatch.setattr(tensor_stream, "wrap", on_gpus)
    monkeypatch.setattr(source, "queued_work", lambda _: lambda: None)
    monkeypatch.setattr(shm_writer, "_own_streams", lambda _: nullcontext())
    result = client.push(tensors, delta="never")
    assert (result.way, result.way_reason) == (TransferPath.SAME_HOST, Streamed.SEVERAL_GPUS)
    (line,) = [record.message for record in caplog.records if "several GPUs" in record.message]
    assert "(1)" in line
    assert "push the tensors of one GPU after those of the other" in line
    assert same(client, result.version, tensors)


def test_what_another_process_of_the_trainer_keeps_open_is_sent(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    close = SameHostClient.give_back

    def keep_one(borrower: SameHostClient, lent: WriteLease) -> None:
        if not kept:
            kept.append(os.dup(lent.fd))
        close(borrower, lent)

    monkeypatch.setattr(SameHostClient, "give_back", keep_one)
    result = client.push(weights(5), delta="never", shard_bytes=1_000_000)
    assert (result.way, result.way_reason) == (TransferPath.STREAM, Streamed.WRITER_LEFT)
    os.pwrite(kept[0], b"\xff" * 4096, 0)
    os.close(kept[0])
    assert same(client, result.version, weights(5))


def test_a_push_that_is_cancelled_on_the_way_leaves_nothing(client: Client) -> None:
    def hold(_sent: int, _total: int) -> None:
        begun.set()
        go_on.wait(60)

    begun, go_on = threading.Event(), threading.Event()
    handle = client.push_async(weights(6), delta="never", on_progress=hold)
    assert begun.wait(60)
    handle.cancel()
    go_on.set()
    with pytest.raises(AbortedError, match="cancelled"):
        handle.committed.result(60)
    handle.join()
    assert not client.status().models[0].pushes
    again = client.push(weights(6), delta="never")
    assert again.way is TransferPath.SAME_HOST
    assert same(client, again.version, weights(6))


def test_what_the_server_cannot_copy_from_a_gpu_is_written_on_the_same_connection(
    server: WeightSyncServer, client: Client
) -> None:
    # There is no GPU here, or none of this trainer's, as its own process finds out; the second time
    # it is asked at once.
    trainer = Trainer(server.stub, seed=80)
    for index in (0, 1):
        declined = trainer.borrower.collect(index, trainer.placed(index))
        assert "GPU memory cannot be opened here: " in declined
        trainer.hand(index)
    version = trainer.commit().version
    assert client.get_version(version).trainer_verified
    files = b"".join(shard.data for shard in trainer.shards)
    assert all(bytes(tensor.data) in files for tensor in client.tensors(version))


def test_tensors_on_a_gpu_that_the_server_cannot_reach_are_written(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def somewhere(_: CudaIpcTransport, shard: Shard) -> IpcPlacement:
        reader = shard.open(Scratch())
        header = b"".join(reader.read(0, shard.entry.data_start))
        reader.close()
        filled = [tensor for tensor in shard.tensors if tensor.end > tensor.begin]
        places = [(number, 0) for number in range(len(filled))]
        return IpcPlacement(
            bytes(16), header, [bytes([number] * 64) for number, _ in places], places
        )

    def collect(borrower: SameHostClient, shard: int, where: IpcPlacement) -> str:
        asked.append(ask(borrower, shard, where))
        return asked[-1]

    ask = SameHostClient.collect
    monkeypatch.setattr(CudaIpcTransport, "_placed", somewhere)
    monkeypatch.setattr(SameHostClient, "collect", collect)
    result = client.push(weights(81), delta="never", shard_bytes=2_000_000)
    assert (result.way, result.way_reason) == (TransferPath.SAME_HOST, Streamed.NOT_COPIED)
    assert client.get_version(result.version).trainer_verified
    assert same(client, result.version, weights(81))
    (declined,) = asked
    assert "GPU memory cannot be opened here: " in declined


# Trainers that err.


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "collect"},
        {"op": "collect", "shard": "0"},
        {"op": "collect", "shard": 9},
        {"op": "collect", "shard": 0},
        {"op": "collect", "shard": 0, "device": 7},
        {"op": "collect", "shard": 0, "header": "00" * (1 << 20)},
        {"op": "collect", "shard": 0, "handles": ["00" * 64] * 100_000},
        {"op": "collect", "shard": 0, "places": [[0, 0]] * 1_000_000},
        {"op": "collect", "shard": 0, "places": [[0, -1], [0, 0]]},
        {"op": "collected", "shard": 0},
        {"op": "collected", "shard": 9},
    ],
)
def test_a_request_to_copy_that_makes_no_sense_is_refused_in_a_sentence(
    server: WeightSyncServer, wrong: dict[str, Any]
) -> None:
    key = os.urandom(8).hex()
    trainer = Trainer(server.stub, seed=82, key=key)
    where = trainer.placed(0)
    told = {
        "device": where.device.hex(),
        "header": where.header.hex(),
        "handles": [handle.hex() for handle in where.handles],
        "places": where.places,
    }
    with pytest.raises(WeightSyncError) as refused:
        trainer.borrower._ask({**told, "header": "00", **wrong})
    assert refused.value.reason is Reason.REQUEST_INVALID
    assert len(refused.value.message) > 20
    # Nothing has changed: the push goes on, and the next connection gets the shard.
    again = Trainer(server.stub, seed=82, key=key)
    again.hand(0)
    again.hand(1)
    assert again.commit().content_digest == again.content
    assert "closed the connection of a trainer" not in server.log


def test_what_is_no_document_ends_its_connection_only(server: WeightSyncServer) -> None:
    key = os.urandom(8).hex()
    trainer = Trainer(server.stub, seed=83, key=key)
    for garbage in (b"\xff\xff\xff\x7f", b"\2\0\0\0[]", b"\4\0\0\0{\xff}}"):
        trainer.borrower._socket.sendall(garbage)
        with pytest.raises(OSError, match=r"ended|Broken|reset"):
            trainer.borrower.alive()
        trainer = Trainer(server.stub, seed=83, key=key)
    trainer.hand(0)
    trainer.hand(1)
    assert trainer.commit().content_digest == trainer.content


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"data": b"\x10"}, Reason.SHARD_INVALID),
        ({"digests": [b"\0" * 16, b"\0" * 16]}, Reason.DIGEST_MISMATCH),
        ({"digests": [b"\0" * 16] * 3}, Reason.REQUEST_INVALID),
    ],
    ids=["header", "digest", "digests"],
)
def test_wrong_bytes_are_no_version(
    server: WeightSyncServer, client: Client, wrong: dict[str, Any], reason: Reason
) -> None:
    before = listed(client)
    trainer = Trainer(server.stub, seed=20)
    if reason is Reason.DIGEST_MISMATCH:
        # The server's own digest is computed after the answer.
        trainer.hand(0, **wrong)
        with pytest.raises((WeightSyncError, grpc.RpcError), match=r"'s0\.a' of shard 0 arrived"):
            finish(trainer)
    else:
        assert refusal(trainer, 0, **wrong) is reason
    if reason is Reason.REQUEST_INVALID:
        server.stub.AbortPush(pb.AbortPushRequest(push_id=trainer.reply.push_id), timeout=60)
    assert nothing_came(client, before)
    assert same(client, client.push(weights(21), delta="never").version, weights(21))


def test_a_descriptor_that_a_child_closes_in_a_moment_is_waited_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = SameHostClient.give_back

    def keep_for_a_moment(borrower: SameHostClient, lent: WriteLease) -> None:
        threading.Timer(0.2, os.close, (os.dup(lent.fd),)).start()
        close(borrower, lent)

    monkeypatch.setattr(SameHostClient, "give_back", keep_for_a_moment)
    result = client.push(weights(6), delta="never")
    assert (result.way, result.way_reason) == (TransferPath.SAME_HOST, "")
    assert same(client, result.version, weights(6))


@pytest.mark.parametrize("how", ["mapping", "descriptor"])
def test_whoever_keeps_the_memory_open_gets_no_version_and_spoils_none(
    server: WeightSyncServer, client: Client, how: str
) -> None:
    before = listed(client)
    trainer = Trainer(server.stub, seed=30)
    lent = trainer.borrower.take_lease(0)
    trainer.write(lent, trainer.shards[0].data)
    kept = mmap.mmap(lent.fd, 4096) if how == "mapping" else os.dup(lent.fd)
    trainer.borrower.give_back(lent)
    with pytest.raises(WeightSyncError) as told:
        trainer.borrower.written(0, trainer.shards[0].digests)
    assert told.value.reason is Reason.WRITER_LEFT
    assert told.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert nothing_came(client, before)
    with pytest.raises(grpc.RpcError):
        trainer.commit()
    results = [client.push(weights(seed), delta="never") for seed in (31, 32, 33)]
    if isinstance(kept, int):
        os.pwrite(kept, b"\xff" * 4096, 0)
        os.close(kept)
    else:
        kept[:] = b"\xff" * 4096
        kept.close()
    for seed, result in zip((31, 32, 33), results, strict=True):
        assert same(client, result.version, weights(seed))


def test_what_was_handed_over_is_lent_no_more(server: WeightSyncServer) -> None:
    trainer = Trainer(server.stub, seed=40)
    trainer.hand(0)
    trainer.hand(1)
    with pytest.raises(WeightSyncError) as told:
        trainer.borrower.take_lease(0)
    assert told.value.reason is Reason.OFFSET_MISMATCH
    assert trainer.commit().content_digest == trainer.content
    secret = trainer.reply.same_host_offer
    with pytest.raises(WeightSyncError, match="opens no push"):
        SameHostClient(secret.socket, secret.secret)


def test_a_shard_is_lent_to_one(server: WeightSyncServer) -> None:
    first = Trainer(server.stub, seed=50, key="two")
    lent = first.borrower.take_lease(0)
    second = Trainer(server.stub, seed=50, key="two")
    assert refusal(second, 0) is Reason.SHARD_BUSY
    join = pb.PushWeightsRequest(join=pb.JoinPush(push_id=first.reply.push_id))
    with pytest.raises(grpc.RpcError, match="another stream"):
        server.stub.PushWeights(iter([join, *first.shards[0].chunks()]), timeout=60)
    # Nobody is connected any more, but the memory is still open: also then nobody else may write.
    first.borrower.close()
    while True:
        with pytest.raises(grpc.RpcError) as told:
            server.stub.PushWeights(iter([join, *first.shards[0].chunks()]), timeout=60)
        if "can still write" in str(told.value):
            break
    os.close(lent.fd)
    messages = [m for shard in first.shards for m in [*shard.chunks(), *shard.given()]]
    server.stub.PushWeights(iter([join, *messages]), timeout=60)
    assert first.commit().content_digest == first.content


def test_a_stranger_gets_nothing(server: WeightSyncServer) -> None:
    read = server.run_dir.parent / "a.sock"
    with grpc.insecure_channel(f"unix:{read}") as channel:
        from weightsync.v1 import weightsync_pb2_grpc

        with pytest.raises(grpc.RpcError) as told:
            begun(weightsync_pb2_grpc.WeightSyncStub(channel), simple())
    assert told.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(WeightSyncError) as refused:
        SameHostClient(server.run_dir / "trainers.sock", "guessed")
    assert refused.value.reason is Reason.PERMISSION_DENIED
    trainer = Trainer(server.stub, seed=60)
    offer = trainer.reply.same_host_offer
    with pytest.raises(WeightSyncError):
        SameHostClient(offer.socket, offer.secret)
    assert oct((server.run_dir / "trainers.sock").stat().st_mode)[-3:] == "660"
    server.stub.AbortPush(pb.AbortPushRequest(push_id=trainer.reply.push_id), timeout=60)


def process(server: WeightSyncServer, key: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.lent_trainer", server.address, key]
    child = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    return child


def test_a_trainer_that_is_killed_is_followed_by_another(server: WeightSyncServer) -> None:
    child = process(server, "killed")
    child.kill()
    child.communicate()
    trainer = Trainer(server.stub, key="killed")
    trainer.hand(0)
    trainer.hand(1)
    assert trainer.commit().content_digest == trainer.content


def test_a_trainer_that_is_frozen_spoils_nothing_when_it_wakes(
    server: WeightSyncServer, client: Client
) -> None:
    child = process(server, "frozen")
    child.send_signal(signal.SIGSTOP)
    (push,) = client.status().models[0].pushes
    client.abort(push.push_id)
    results = [client.push(weights(seed), delta="never") for seed in (71, 72, 73)]
    child.send_signal(signal.SIGCONT)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "again\n"
    for seed, result in zip((71, 72, 73), results, strict=True):
        assert same(client, result.version, weights(seed))
    child.kill()
    child.communicate()
