"""Which pushes are deltas, and what becomes of those that cannot be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.support.trained import Tensors, digest_of, model, step
from weightsync.errors import WeightSyncError
from weightsync.model.digest import content_digest, tensor_digest
from weightsync_client import (
    AbortedError,
    AsyncClient,
    Client,
    Fallback,
    InvalidError,
    NotFoundError,
    PushKind,
    Reason,
    RefusedError,
    UnavailableError,
)
from weightsync_client.snapshot import delta_shards, snapshot
from weightsync_client.snapshot.host_tensor import HostTensor


def test_the_second_push_is_a_delta(client: Client, servicer: Any) -> None:
    tensors = model()
    first = client.push(tensors)
    assert (first.kind, first.fallback_reason) == (PushKind.FULL, Fallback.FIRST)
    assert first.changed_fraction is None
    for number in range(2, 5):
        step(tensors, number)
        result = client.push(tensors)
        assert result.content_digest == digest_of(tensors)
        assert (result.version, result.kind, result.base_version) == (
            number,
            PushKind.DELTA,
            number - 1,
        )
        assert result.fallback_reason == ""
        assert result.changed_fraction == pytest.approx(0.01, rel=0.2)
        assert result.dense_bytes == first.sent_bytes
        assert result.sent_bytes < 0.05 * result.dense_bytes
    begun = [r for r in servicer.requests if type(r).__name__ == "BeginPushRequest"]
    assert [r.fallback_reason for r in begun] == ["first", "", "", ""]
    assert begun[1].base_content_digest == first.content_digest


def test_nothing_changed(client: Client) -> None:
    tensors = model()
    first = client.push(tensors)
    result = client.push(tensors)
    assert result.kind is PushKind.DELTA
    assert result.content_digest == first.content_digest
    assert result.changed_fraction == 0
    assert result.sent_bytes < 1000


def test_what_a_float_compare_would_miss_arrives(client: Client) -> None:
    tensors = model()
    client.push(tensors)
    weight = tensors["layers.1.weight"]
    weight[3], weight[4] = float("nan"), 0.0
    client.push(tensors)
    weight.view(torch.int16)[3] ^= 1  # Another NaN.
    weight[4] = -0.0
    result = client.push(tensors)
    assert result.content_digest == digest_of(tensors)
    assert result.changed_fraction == pytest.approx(2 / sum(t.numel() for t in tensors.values()))


def test_files_are_compared_too(client: Client, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {f"t{i}": rng.integers(0, 1 << 15, 70_000, np.uint16) for i in range(4)}
    values["empty"] = np.zeros((0, 3), np.uint16)
    for version in range(3):
        folder = tmp_path / str(version)
        folder.mkdir()
        # Other files than before: the shards of the two need not be alike.
        for part in range(version + 1):
            names = sorted(values)[part :: version + 1]
            save_file({name: values[name] for name in names}, folder / f"{part}.safetensors")
        result = client.push(folder)
        assert result.kind is (PushKind.DELTA if version else PushKind.FULL)
        values["t2"][:700] ^= 1
    assert result.changed_fraction == pytest.approx(700 / 280_000)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_cut_delta_goes_on_where_it_stopped(
    client: Client, servicer: Any, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    monkeypatch.setattr(delta_shards, "_GROUP_BYTES", 1)
    monkeypatch.setattr(delta_shards, "_GROUPS", 8)
    tensors = model(count=8, elements=200_000)
    client.push(tensors)
    step(tensors, 1, 0.2)
    servicer.received = 0
    servicer.cut_at = [1, 60_000, 200_000]
    result = client.push(tensors, chunk_bytes=10_000, streams=streams)
    assert result.kind is PushKind.DELTA
    assert result.content_digest == digest_of(tensors)
    assert len(servicer.uploads["push-1"].parcel) > 2
    assert servicer.cut_at == []


def test_a_server_that_forgot_the_push_gets_the_same_shards(client: Client, servicer: Any) -> None:
    tensors = model()
    client.push(tensors)
    step(tensors, 1)
    digest = digest_of(tensors)
    forgot: list[Any] = []

    def forget(method: str, _request: Any) -> None:
        if method == "CommitPush" and not forgot:
            forgot.append(servicer.uploads.pop("push-1"))
            # The shards are all there is: the trainer has gone on.
            step(tensors, 2)

    servicer.before = forget
    handle = client.push_async(tensors)
    result = handle.committed.result(20)
    assert handle.source_free.done()
    assert forgot
    assert (result.kind, result.content_digest) == (PushKind.DELTA, digest)
    result = client.push(tensors)
    assert (result.kind, result.content_digest) == (PushKind.DELTA, digest_of(tensors))


# Falling back.


def changed_layout(tensors: Tensors) -> Tensors:
    return {**tensors, "another": torch.zeros(3)}


def shuffled(tensors: Tensors) -> Tensors:
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
    return tensors


def everywhere(tensors: Tensors) -> Tensors:
    for tensor in tensors.values():
        tensor.view(torch.int16).bitwise_xor_(1)
    return tensors


def small_step(tensors: Tensors) -> Tensors:
    step(tensors, 9)
    return tensors


@pytest.mark.parametrize(
    ("change", "reason"),
    [(changed_layout, Fallback.LAYOUT_CHANGED), (shuffled, Fallback.TOO_DENSE)],
)
@pytest.mark.parametrize("elements", [60_000, 3_000_000])
def test_what_is_no_delta_is_pushed_in_full(
    client: Client,
    servicer: Any,
    change: Callable[[Tensors], Tensors],
    reason: Fallback,
    elements: int,
) -> None:
    tensors = model(elements=elements)
    client.push(tensors)
    step(tensors, 1)
    assert client.push(tensors).kind is PushKind.DELTA
    tensors = change(tensors)
    result = client.push(tensors)
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, reason)
    step({n: t for n, t in tensors.items() if n != "another"}, 2)
    result = client.push(tensors)
    assert (result.kind, result.base_version) == (PushKind.DELTA, 3)
    assert servicer.requests[-1] is not None
    reasons = [r.fallback_reason for r in servicer.requests if hasattr(r, "fallback_reason")]
    assert [r for r in reasons if r] == ["first", reason]


def test_what_would_take_longer_than_all_is_a_delta_only_if_asked_for(client: Client) -> None:
    tensors = {"w": torch.randn(12_000_000).to(torch.bfloat16)}
    client.push(tensors)
    # A fifth of the bytes, and work for every one of them, to save a copy in memory.
    result = client.push(everywhere(tensors), compress="never")
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.TOO_DENSE)
    result = client.push(everywhere(tensors), compress="never", delta="require")
    assert result.kind is PushKind.DELTA
    assert client.push(everywhere(tensors), compress="always").kind is PushKind.DELTA


def test_a_new_run_begins_in_full(client: Client) -> None:
    tensors = model()
    client.push(tensors, metadata={"run_id": "a"})
    assert client.push(tensors, metadata={"run_id": "a"}).kind is PushKind.DELTA
    result = client.push(tensors, metadata={"run_id": "b"})
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.NEW_RUN)
    result = client.push(tensors, metadata={"run_id": "b"})
    assert (result.kind, result.base_version) == (PushKind.DELTA, 3)


def test_a_server_without_the_base_gets_everything_once(client: Client, servicer: Any) -> None:
    tensors = model()
    client.push(tensors)
    servicer.uploads.clear()
    step(tensors, 1)
    result = client.push(tensors)
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.BASE_MISMATCH)
    assert result.content_digest == digest_of(tensors)
    step(tensors, 2)
    assert client.push(tensors).kind is PushKind.DELTA


def test_a_server_without_deltas_gets_everything(client: Client, servicer: Any) -> None:
    servicer.takes_deltas = False
    tensors = model()
    client.push(tensors)
    result = client.push(tensors)
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.REFUSED)


def _pushed_and_spoilt(client: Client) -> Tensors:
    """Push tensors, have a bit of the client's copy go bad, and return them a step later."""
    tensors = model()
    client.push(tensors)
    held = client._history.snapshot.current
    assert held is not None
    held.tensors["layers.0.weight"].window(77, 78)[0] ^= 4
    step(tensors, 1)
    return tensors


def test_a_copy_that_went_bad_heals_itself(client: Client) -> None:
    tensors = _pushed_and_spoilt(client)
    result = client.push(tensors)
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.REFUSED)
    step(tensors, 2)
    result = client.push(tensors)
    assert (result.kind, result.content_digest) == (PushKind.DELTA, digest_of(tensors))


def test_a_source_that_was_freed_is_not_read_again(client: Client) -> None:
    tensors = _pushed_and_spoilt(client)
    handle = client.push_async(tensors)
    with pytest.raises(InvalidError) as caught:
        handle.committed.result(20)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    result = client.push(tensors)
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.FIRST)


def test_without_room_for_a_copy_every_push_is_full(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "available_bytes", lambda: 300 << 20)
    tensors = model(count=1, elements=40 << 20)
    for _ in range(2):
        result = client.push(tensors)
        assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.NO_ROOM)
    assert client._history.snapshot.current is None
    tensors = model()
    client.push(tensors)
    assert client.push(tensors).kind is PushKind.DELTA


def test_without_room_for_shards_the_push_is_full(
    client: Client, monkeypatch: pytest.MonkeyPatch, servicer: Any
) -> None:
    tensors = model()
    client.push(tensors)
    monkeypatch.setattr(delta_shards, "room_for", lambda _size: False)
    result = client.push(tensors)
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.NO_ROOM)
    assert servicer.uploads["push-1"].aborted


# Choices of the caller.


def test_never_keeps_no_copy(client: Client) -> None:
    tensors = model()
    for _ in range(2):
        result = client.push(tensors, delta="never")
        assert (result.kind, result.fallback_reason) == (PushKind.FULL, "")
    assert client._history.snapshot.current is None


def test_require_refuses_a_push_in_full(client: Client, servicer: Any) -> None:
    tensors = model()
    with pytest.raises(RefusedError, match="holds no version") as caught:
        client.push(tensors, delta="require")
    assert caught.value.metadata == {"fallback_reason": "first"}
    with pytest.raises(RefusedError, match="holds no version"):
        client.push(iter(tensors.items()), delta="require")
    assert servicer.uploads == {}
    client.push(tensors)
    assert client.push(tensors, delta="require").kind is PushKind.DELTA


@pytest.mark.parametrize("option", ["delta", "compress"])
def test_unknown_choices_are_refused(client: Client, option: str) -> None:
    with pytest.raises(InvalidError, match=f"{option} is 'maybe'; use one of auto, "):
        client.push_async(model(), **{option: "maybe"})  # type: ignore[arg-type] # on purpose


def test_compress(client: Client) -> None:
    tensors = model(elements=200_000)
    client.push(tensors)
    sent = {}
    for number, choice in enumerate(("never", "always", "auto")):
        step(tensors, number, 0.05)
        sent[choice] = client.push(tensors, compress=choice).sent_bytes
    assert sent["always"] < 0.85 * sent["never"]
    # Loopback is never slow.
    assert sent["auto"] == pytest.approx(sent["never"], rel=0.05)


# Several pushes, and failures.


def test_pushes_take_turns_in_order(client: Client, servicer: Any) -> None:
    tensors = [model() for _ in range(6)]
    for number, each in enumerate(tensors):
        step(each, 1, 0.001 * number)
    gate = threading.Event()
    servicer.before = lambda method, _request: method != "CommitPush" or gate.wait(10)
    handles = [client.push_async(each) for each in tensors]
    time.sleep(0.2)
    assert servicer.calls.count("BeginPush") == 1
    gate.set()
    results = [handle.committed.result(20) for handle in handles]
    assert [r.version for r in results] == [1, 2, 3, 4, 5, 6]
    assert [r.base_version for r in results] == [0, 1, 2, 3, 4, 5]
    assert [r.content_digest for r in results] == [digest_of(each) for each in tensors]


def test_a_push_that_waits_its_turn_can_be_cancelled(client: Client, servicer: Any) -> None:
    gate = threading.Event()
    servicer.before = lambda method, _request: method != "CommitPush" or gate.wait(10)
    tensors = model()
    first, second, third = (client.push_async(tensors) for _ in range(3))
    time.sleep(0.1)
    second.cancel()
    with pytest.raises(AbortedError):
        second.committed.result(5)
    assert not first.committed.done()
    gate.set()
    assert first.committed.result(10).version == 1
    assert third.committed.result(10).kind is PushKind.DELTA


def test_a_failed_delta_leaves_the_base(client: Client, servicer: Any, status_error: Any) -> None:
    tensors = model()
    client.push(tensors)

    def refuse(method: str, _request: Any) -> None:
        if method == "CommitPush":
            raise WeightSyncError(Reason.DISK_EXHAUSTED, "the disk is full; free some")

    servicer.before = refuse
    step(tensors, 1)
    with pytest.raises(WeightSyncError, match="disk is full"):
        client.push(tensors)

    def away(_chunk: Any) -> None:
        raise status_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    servicer.before, servicer.chunk = lambda _method, _request: None, away
    step(tensors, 2)
    with pytest.raises(UnavailableError):
        client.push(tensors)
    servicer.chunk = lambda _chunk: None
    step(tensors, 3)
    result = client.push(tensors)
    assert (result.kind, result.base_version) == (PushKind.DELTA, 1)
    assert result.content_digest == digest_of(tensors)


def _break_off(client: Client, servicer: Any, status_error: Any) -> Tensors:
    """Push version 1, then have a delta to version 2 fail whose key is step-1; return that."""
    tensors = model(elements=200_000)
    client.push(tensors)
    step(tensors, 1, 0.2)

    def away(chunk: Any) -> None:
        if chunk.offset > 20_000:
            raise status_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    servicer.chunk = away
    with pytest.raises(UnavailableError):
        client.push(tensors, idempotency_key="step-1", chunk_bytes=10_000)
    assert servicer.uploads["push-1"].progress()
    servicer.chunk = lambda _chunk: None
    return tensors


def test_a_key_of_a_delta_that_failed_serves_a_push_in_full(
    client: Client, servicer: Any, status_error: Any, retry: Any
) -> None:
    tensors = _break_off(client, servicer, status_error)
    with Client(client._link.address, retry=retry) as restarted:
        result = restarted.push(tensors, idempotency_key="step-1")
        assert (result.kind, result.content_digest) == (PushKind.FULL, digest_of(tensors))
        assert restarted.push(tensors, idempotency_key="step-1").version == result.version
    # The first client finds its version committed, and its copy still is of version 1.
    assert client.push(tensors, idempotency_key="step-1").version == result.version
    held = client._history.snapshot.current
    assert held is not None
    assert held.version == 1


def test_a_key_of_a_delta_that_failed_serves_the_same_delta(
    client: Client, servicer: Any, status_error: Any
) -> None:
    tensors = _break_off(client, servicer, status_error)
    result = client.push(tensors, idempotency_key="step-1")
    assert (result.kind, result.content_digest) == (PushKind.DELTA, digest_of(tensors))


def test_the_source_is_free_before_the_link_has_taken_it(client: Client, servicer: Any) -> None:
    tensors = model()
    client.push(tensors)
    step(tensors, 1)
    digest = digest_of(tensors)
    gate = threading.Event()
    servicer.chunk = lambda _chunk: gate.wait(10)
    handle = client.push_async(tensors)
    handle.source_free.result(10)
    step(tensors, 2)
    assert not handle.committed.done()
    gate.set()
    assert handle.committed.result(10).content_digest == digest


def test_a_fault_after_the_commit_costs_a_push_in_full(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = model()
    client.push(tensors)
    step(tensors, 1)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(HostTensor, "advance", fail)
        assert client.push(tensors).kind is PushKind.DELTA
    assert client.push(tensors).fallback_reason is Fallback.FIRST
    assert client.push(tensors).kind is PushKind.DELTA


def test_a_lost_version_ends_no_second_push(client: Client, servicer: Any) -> None:
    def forget(method: str, _request: Any) -> None:
        if method == "CommitPush":
            servicer.uploads.clear()

    servicer.before = forget
    with pytest.raises(NotFoundError):
        client.push_async(model()).committed.result(10)
    assert client._history.snapshot.current is None


async def test_asyncio(running: Any, retry: Any) -> None:
    tensors = model()
    async with AsyncClient(running.address, retry=retry) as client:
        await client.push(tensors)
        step(tensors, 1)
        result = await client.push(tensors)
    assert (result.kind, result.content_digest) == (PushKind.DELTA, digest_of(tensors))


def test_mixed_dtypes_strided_and_empty_tensors(client: Client) -> None:
    base = torch.randn(300, 700)
    tensors: dict[str, Any] = {
        "strided": base.T,
        "slice": base[:, 3:600],
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(2.5),
        "f8": torch.randn(50_000).to(torch.float8_e4m3fn),
        "bool": torch.zeros(40_000, dtype=torch.bool),
        "f64": np.linspace(0, 1, 40_000),
        "c64": np.ones(9_000, np.complex64),
    }

    def digest() -> str:
        def plain(value: Any) -> tuple[str, tuple[int, ...], bytes]:
            if isinstance(value, torch.Tensor):
                flat = value.contiguous().reshape(-1).view(torch.uint8)
                names = {torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.bool: "BOOL"}
                return names[value.dtype], tuple(value.shape), flat.numpy().tobytes()
            return {"f": "F64", "c": "C64"}[value.dtype.kind], value.shape, value.tobytes()

        rows = {name: plain(value) for name, value in tensors.items()}
        return content_digest((n, d, s, tensor_digest(b)) for n, (d, s, b) in rows.items())

    def changes() -> Iterator[None]:
        yield
        base[5, 60] += 1
        yield
        tensors["scalar"].fill_(3)
        tensors["f8"].view(torch.uint8)[17] ^= 1
        tensors["bool"][::1000] = True
        yield
        tensors["f64"][::500] = 7
        tensors["c64"][3] = 1j
        yield

    kinds = []
    for _ in changes():
        result = client.push(tensors)
        assert result.content_digest == digest()
        kinds.append(result.kind)
    assert kinds == [PushKind.FULL] + 3 * [PushKind.DELTA]
