from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save_file

from tests.support.trained import digest_of
from tests.unit.client.servicer import Servicer, start
from weightsync.errors import WeightSyncError
from weightsync_client import (
    AbortedError,
    Client,
    InvalidError,
    NotFoundError,
    Reason,
    RefusedError,
    Retry,
    UnavailableError,
)

MIB = 1 << 20


def state(seed: int = 0, count: int = 8, elements: int = 100_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.weight": torch.randn(elements, generator=generator).to(torch.bfloat16)
        for i in range(count)
    }


@pytest.mark.parametrize("who", ["another server", "no such service"])
def test_a_data_port_at_which_somebody_else_answers_is_left(
    client: Client, servicer: Any, who: str
) -> None:
    other = start(Servicer())
    if who == "no such service":
        other.server.stop(None)
        other.server = grpc.server(futures.ThreadPoolExecutor(2))
        other.address = f"127.0.0.1:{other.server.add_insecure_port('127.0.0.1:0')}"
        other.server.start()
    servicer.data_endpoints = [f":{other.address.rpartition(':')[2]}"]
    try:
        tensors = state()
        assert client.push(tensors, shard_bytes=500_000).content_digest == digest_of(tensors)
        assert servicer.calls.count("BeginPush") == 1
        assert "PushWeights" in servicer.calls
    finally:
        other.server.stop(None)


def test_state_dict_arrives_bit_for_bit(client: Client, servicer: Any) -> None:
    tensors = state()
    result = client.push(tensors, metadata={"step": "7"}, shard_bytes=500_000)
    assert result.version == 1
    assert result.content_digest == digest_of(tensors)
    assert result.tensor_count == 8
    assert result.sent_bytes == result.size_bytes > 1_600_000
    upload = servicer.uploads["push-0"]
    assert len(upload.shards) == 4
    assert upload.request.metadata == {"step": "7"}
    assert upload.request.total_bytes == result.size_bytes
    assert upload.request.shard_count == 4


@pytest.mark.parametrize("streams", [1, 3])
def test_files_are_sent_byte_for_byte(
    client: Client, servicer: Any, tmp_path: Path, streams: int
) -> None:
    files = []
    for i in range(5):
        path = tmp_path / f"part-{i}.safetensors"
        save_file({f"t{i}": np.arange(300_000, dtype=np.float32) + i}, path, {"format": "pt"})
        files.append(path.read_bytes())
    result = client.push(tmp_path, streams=streams)
    upload = servicer.uploads["push-0"]
    assert [bytes(upload.shards[i].data) for i in range(5)] == files
    assert result.size_bytes == sum(map(len, files))
    assert len(servicer.peers) == streams


def test_one_file(client: Client, servicer: Any, tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    save_file({"a": np.ones(3)}, path)
    client.push(str(path))
    assert bytes(servicer.uploads["push-0"].shards[0].data) == path.read_bytes()


def test_iterable_is_never_collected(client: Client, servicer: Any) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for i in range(20):
            tensor = torch.full((250_000,), i, dtype=torch.float32)
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"t{i}", tensor
            del tensor

    result = client.push(tensors(), shard_bytes=2_000_000)
    assert len(servicer.uploads["push-0"].shards) == 10
    # Each is copied as it comes; of its copies there are never more than the shards on their way.
    assert most == 1
    gc.collect()
    assert len(alive) == 0
    assert result.tensor_count == 20


def test_iterable_over_several_streams(client: Client, servicer: Any) -> None:
    tensors = state(count=12)
    result = client.push(iter(tensors.items()), streams=3, shard_bytes=400_000)
    assert result.content_digest == digest_of(tensors)
    assert len(servicer.peers) == 3


def test_iterable_runs_in_the_callers_thread(client: Client) -> None:
    threads = set()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            threads.add(threading.get_ident())
            yield f"t{i}", torch.ones(10)

    client.push(tensors(), shard_bytes=40)
    assert threads == {threading.get_ident()}


def test_a_slow_reader_holds_the_source_back(client: Client, servicer: Any) -> None:
    gate = threading.Event()
    servicer.chunk = lambda _chunk: gate.wait(10)
    sent = 0

    def progress(done: int, _total: int) -> None:
        nonlocal sent
        sent = done

    handle = client.push_async(
        {"w": torch.zeros(64 * MIB, dtype=torch.uint8)}, on_progress=progress
    )
    time.sleep(0.5)
    held = sent
    assert not handle.source_free.done()
    gate.set()
    handle.committed.result(20)
    # Windows and buffers of the link, not the tensor.
    assert 0 < held <= 24 * MIB
    assert sent > 64 * MIB


@pytest.mark.parametrize("cuts", [[1], [700_000, 900_000, 1_500_000]])
@pytest.mark.parametrize("kind", ["state", "path", "iterable"])
def test_a_cut_stream_goes_on_where_it_stopped(
    client: Client, servicer: Any, tmp_path: Path, cuts: list[int], kind: str
) -> None:
    tensors = state(count=6, elements=250_000)
    servicer.cut_at = list(cuts)
    source: Any = tensors
    if kind == "path":
        for name, tensor in tensors.items():
            save_file({name: tensor.view(torch.int16).numpy()}, tmp_path / f"{name}.safetensors")
        source = tmp_path
    elif kind == "iterable":
        source = iter(tensors.items())
    result = client.push(source, chunk_bytes=100_000, shard_bytes=1_000_000)
    if kind != "path":
        assert result.content_digest == digest_of(tensors)
    assert servicer.calls.count("GetPush") == len(cuts)
    assert servicer.calls.count("BeginPush") == 1
    # Only what was on its way is sent again.
    assert result.sent_bytes < result.size_bytes + len(cuts) * 3_000_000


def test_what_a_server_that_ends_cancels_is_taken_up(client: Client, servicer: Any) -> None:
    tensors = state(count=6, elements=250_000)
    servicer.cut_code = grpc.StatusCode.CANCELLED
    servicer.cut_at = [700_000]
    assert client.push(tensors, chunk_bytes=100_000).content_digest == digest_of(tensors)
    assert servicer.calls.count("BeginPush") == 1


def test_cuts_on_several_streams(client: Client, servicer: Any) -> None:
    tensors = state(count=16)
    servicer.cut_at = [300_000, 600_000, 1_000_000, 2_000_000]
    result = client.push(tensors, streams=4, chunk_bytes=50_000, shard_bytes=400_000)
    assert result.content_digest == digest_of(tensors)


def test_a_server_that_stays_away_is_given_up(
    client: Client, servicer: Any, status_error: Any
) -> None:
    def refuse(_chunk: Any) -> None:
        raise status_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    servicer.chunk = refuse
    with pytest.raises(UnavailableError, match=r"no answer from 127\.0\.0\.1:\d+ to the push"):
        client.push(state(count=1))
    # The slot is freed: nobody else knows this push's key.
    assert servicer.uploads["push-0"].aborted


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_push_with_a_key_is_taken_up_by_a_second_call(
    client: Client, servicer: Any, status_error: Any, code: grpc.StatusCode
) -> None:
    tensors = state(count=4, elements=1_000_000)

    def refuse(chunk: Any) -> None:
        if chunk.offset > 4_000_000:
            raise status_error(code, "Socket closed")

    servicer.chunk = refuse
    with pytest.raises((UnavailableError, AbortedError)):
        client.push(tensors, idempotency_key="step-9")
    servicer.chunk = lambda _chunk: None
    result = client.push(tensors, idempotency_key="step-9")
    assert result.content_digest == digest_of(tensors)
    assert result.sent_bytes < 4_500_000
    again = client.push(tensors, idempotency_key="step-9")
    assert again.version == result.version
    assert again.sent_bytes == 0


def as_files(tensors: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    bits = {name: tensor.view(torch.uint8).numpy() for name, tensor in tensors.items()}
    save_file(bits, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("delta", ["auto", "never"])
@pytest.mark.parametrize("form", ["state", "files", "iterable"])
def test_a_key_of_other_content_is_refused(
    client: Client, servicer: Any, tmp_path: Path, form: str, delta: str
) -> None:
    def source(name: str, seed: int) -> Any:
        tensors = state(seed)
        if form == "files":
            return as_files(tensors, tmp_path / name)
        return iter(tensors.items()) if form == "iterable" else tensors

    options: Any = {"delta": delta, "idempotency_key": "step-1", "shard_bytes": 500_000}
    first = client.push(source("first", 0), **options)
    with pytest.raises(RefusedError, match=r"'step-1' belongs to a push of other content") as told:
        client.push(source("other", 1), **options)
    assert (told.value.reason, told.value.metadata) == (Reason.VERSION_CONFLICT, {"version": "1"})
    again = client.push(source("again", 0), **options)
    assert (again.version, again.content_digest) == (1, first.content_digest)
    assert again.sent_bytes == 0
    # Neither was a push that somebody has to abort.
    assert "AbortPush" not in servicer.calls
    assert client.push(source("last", 1), delta=delta).version == 2


def test_other_content_under_a_key_is_seen_in_a_few_values(client: Client) -> None:
    tensors = state()
    client.push(tensors, idempotency_key="step-1")
    tensors["layers.3.weight"][7] += 1
    for source in (tensors, tensors.items()):
        with pytest.raises(RefusedError, match="choose another key"):
            client.push(source, idempotency_key="step-1")
    result = client.push(tensors)
    assert (result.version, result.content_digest) == (2, digest_of(tensors))


def test_aborted_with_an_offset_is_taken_up(client: Client, servicer: Any) -> None:
    tensors = state(count=2)
    refused: list[int] = []

    def refuse(chunk: Any) -> None:
        if chunk.offset and not refused:
            refused.append(chunk.offset)
            raise WeightSyncError(Reason.OFFSET_MISMATCH, "beyond", metadata={"offset": "0"})

    servicer.chunk = refuse
    assert client.push(tensors, chunk_bytes=10_000).content_digest == digest_of(tensors)
    assert refused


def test_a_stream_too_many_waits_as_told(client: Client, servicer: Any) -> None:
    refused: list[float] = []

    def refuse(_chunk: Any) -> None:
        if not refused:
            refused.append(time.monotonic())
            raise WeightSyncError(Reason.LIMIT_EXCEEDED, "too many streams", retry_after_s=0.3)
        refused.append(time.monotonic())

    servicer.chunk = refuse
    assert client.push(state(count=1)).version == 1
    assert refused[1] - refused[0] >= 0.3


@pytest.mark.parametrize(("initial_s", "told_s"), [(2.0, 0.01), (0.01, 0.3)])
@pytest.mark.parametrize("method", ["PushWeights", "CommitPush", "PullWeights"])
def test_a_pause_is_as_long_as_told_and_as_the_failures_ask_for(
    running: Any, servicer: Any, tmp_path: Path, method: str, initial_s: float, told_s: float
) -> None:
    times: list[float] = []

    def refuse(called: str) -> None:
        if called != method:
            return
        times.append(time.monotonic())
        if len(times) == 1:
            raise WeightSyncError(Reason.LIMIT_EXCEEDED, "busy", retry_after_s=told_s)

    servicer.before = lambda called, _request: refuse(called)
    servicer.chunk = lambda _chunk: refuse("PushWeights")
    with Client(running.address, retry=Retry(initial_s=initial_s)) as client:
        version = client.push(state(count=1, elements=100)).version
        client.pull(tmp_path / "pulled", version)
    # A pause has a tenth of its ceiling at least.
    assert times[1] - times[0] >= max(initial_s / 10, told_s)


def test_a_forgotten_push_begins_again_for_the_same_version(client: Client, servicer: Any) -> None:
    tensors = state(count=2)
    forgot: list[Any] = []

    def forget(method: str, _request: Any) -> None:
        if method == "CommitPush" and not forgot:
            forgot.append(servicer.uploads.pop("push-0"))

    servicer.before = forget
    result = client.push(tensors)
    assert forgot
    assert result.content_digest == digest_of(tensors)
    assert [r.version for r in servicer.requests if type(r).__name__ == "BeginPushRequest"] == [
        0,
        1,
    ]


@pytest.mark.parametrize("in_background", [True, False])
def test_a_forgotten_iterable_or_freed_source_is_not_sent_again(
    client: Client, servicer: Any, in_background: bool
) -> None:
    def forget(method: str, _request: Any) -> None:
        if method == "CommitPush":
            servicer.uploads.clear()

    servicer.before = forget

    def push() -> None:
        if in_background:
            client.push_async(state(count=1)).committed.result(10)
        else:
            client.push(iter(state(count=1).items()))

    with pytest.raises(NotFoundError) as caught:
        push()
    assert caught.value.reason is Reason.PUSH_UNKNOWN


def test_a_refusal_ends_the_push_and_frees_the_slot(client: Client, servicer: Any) -> None:
    def refuse(_chunk: Any) -> None:
        raise WeightSyncError(Reason.DISK_EXHAUSTED, "the disk has 3 bytes left; free some")

    servicer.chunk = refuse
    with pytest.raises(WeightSyncError, match="3 bytes left") as caught:
        client.push(state(count=1))
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    assert servicer.uploads["push-0"].aborted
    assert servicer.calls.count("PushWeights") == 1


def test_a_source_that_changes_while_it_is_sent_is_refused(client: Client, servicer: Any) -> None:
    tensors = state(count=1, elements=500_000)
    servicer.cut_at = [600_000]

    def change(chunk: Any) -> None:
        if chunk.offset > 400_000:
            tensors["layers.0.weight"].fill_(1)
            servicer.uploads["push-0"].shards[0].data[2000:] = b""

    servicer.chunk = change
    with pytest.raises(WeightSyncError) as caught:
        client.push(tensors, chunk_bytes=100_000)
    assert caught.value.reason in (Reason.DIGEST_MISMATCH, Reason.OFFSET_MISMATCH)


def test_an_error_of_the_source_is_raised_as_it_is(client: Client, servicer: Any) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1000)
        yield "b", torch.ones(1000)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.push(tensors(), shard_bytes=4000)
    assert servicer.uploads["push-0"].aborted


def test_an_error_of_the_progress_callback_ends_the_push(client: Client, servicer: Any) -> None:
    def progress(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.push(state(), on_progress=progress)
    assert servicer.uploads["push-0"].aborted


def test_the_same_content_again_is_fine_other_content_is_not(client: Client) -> None:
    first = client.push(state(1, count=1), version=5)
    again = client.push(state(1, count=1), version=5)
    assert (again.version, again.already) == (5, True)
    assert again.content_digest == first.content_digest
    with pytest.raises(RefusedError) as caught:
        client.push(state(2, count=1), version=5)
    assert caught.value.reason is Reason.VERSION_CONFLICT


def test_push_async_tells_when_the_source_is_free(client: Client, servicer: Any) -> None:
    gate = threading.Event()
    servicer.before = lambda method, _request: method != "CommitPush" or gate.wait(10)
    handle = client.push_async(state(count=1))
    handle.source_free.result(10)
    time.sleep(0.1)
    assert not handle.committed.done()
    gate.set()
    assert handle.committed.result(10).version == 1


def test_push_async_checks_before_it_returns(client: Client, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"holds the \.safetensors files"):
        client.push_async(tmp_path)


def test_a_cancelled_push_ends(client: Client, servicer: Any) -> None:
    gate = threading.Event()
    servicer.chunk = lambda _chunk: gate.wait(10)
    handle = client.push_async(state(count=8, elements=4_000_000))
    time.sleep(0.2)
    handle.cancel()
    with pytest.raises(AbortedError):
        handle.committed.result(10)
    gate.set()
    with pytest.raises(AbortedError):
        handle.source_free.result(0)
    assert servicer.uploads["push-0"].aborted


def test_close_waits_for_background_pushes(running: Any, retry: Retry) -> None:
    with Client(running.address, retry=retry) as client:
        handle = client.push_async(state())
    assert handle.committed.done()
    assert handle.committed.result().version == 1


def test_37000_small_tensors(client: Client, servicer: Any) -> None:
    block = np.arange(37_000, dtype=np.int32)
    tensors = {
        f"model.layers.{i}.some.quite.long.name.weight": block[i : i + 1] for i in range(37_000)
    }
    result = client.push(tensors)
    assert result.tensor_count == 37_000
    loaded = load(bytes(servicer.uploads["push-0"].shards[0].data))
    name = "model.layers.11.some.quite.long.name.weight"
    assert loaded[name].tolist() == [11]


def test_a_server_that_commits_other_content_is_told_on(
    client: Client, servicer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner: Callable[..., Any] = servicer._commit

    def lie(upload: Any, request: Any) -> Any:
        reply = inner(upload, request)
        reply.content_digest = "0" * 32
        return reply

    monkeypatch.setattr(servicer, "_commit", lie)
    with pytest.raises(WeightSyncError) as caught:
        client.push(state(count=1))
    assert caught.value.reason is Reason.DATA_CORRUPT
