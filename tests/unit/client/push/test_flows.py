"""Iterables, which come once: deltas of them, and what becomes of a try that is given up midway."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.trained import Tensors, digest_of, model, step
from weightsync.errors import WeightSyncError
from weightsync_client import (
    AsyncClient,
    Client,
    ClientError,
    Fallback,
    PushKind,
    Reason,
    RefusedError,
)
from weightsync_client.snapshot import delta_shards, host_tensor, snapshot
from weightsync_client.snapshot.host_tensor import HostTensor
from weightsync_client.source.tensors import wrap


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every tensor or two make a shard."""
    monkeypatch.setattr(delta_shards, "_GROUP_BYTES", 1)
    monkeypatch.setattr(delta_shards, "_GROUPS", 8)


class Gathered:
    """Copies that nobody else holds, as a trainer makes them that gathers one by one."""

    def __init__(self, tensors: Tensors) -> None:
        self.alive = weakref.WeakSet[torch.Tensor]()
        self.most_alive = 0
        self._tensors = tensors

    def flow(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            gathered = tensor.clone()
            self.alive.add(gathered)
            self.most_alive = max(self.most_alive, len(self.alive))
            yield name, gathered
            del gathered


def flow(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    return Gathered(tensors).flow()


def full(client: Client, tensors: Tensors, reason: Fallback) -> None:
    """Push; check that everything was sent, that it is right, and that the next push is a delta."""
    result = client.push(flow(tensors))
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, reason)
    assert result.content_digest == digest_of(tensors)
    step(tensors, 77)
    after = client.push(flow(tensors))
    assert (after.kind, after.base_version) == (PushKind.DELTA, result.version)
    assert after.content_digest == digest_of(tensors)


def test_the_second_push_is_a_delta(client: Client) -> None:
    tensors = model(count=8)
    first = client.push(flow(tensors))
    assert (first.kind, first.fallback_reason) == (PushKind.FULL, Fallback.FIRST)
    for number in range(2, 5):
        step(tensors, number)
        result = client.push(flow(tensors))
        assert (result.kind, result.base_version) == (PushKind.DELTA, number - 1)
        assert result.fallback_reason == ""
        assert result.content_digest == digest_of(tensors)
        assert result.changed_fraction == pytest.approx(0.01, rel=0.2)
        assert result.dense_bytes == first.sent_bytes
        assert result.sent_bytes < 0.1 * result.dense_bytes


def test_state_dicts_and_iterables_follow_each_other(client: Client) -> None:
    tensors = model(count=5)
    client.push(tensors)
    forms: list[Callable[[Tensors], Any]] = [flow, dict, flow]
    for number, form in enumerate(forms):
        step(tensors, number)
        # The order may be another one every time.
        turned = dict(reversed(tensors.items())) if number % 2 else tensors
        result = client.push(form(turned))
        assert (result.kind, result.content_digest) == (PushKind.DELTA, digest_of(tensors))


def test_tensors_are_let_go_of_as_they_are_compared(client: Client) -> None:
    tensors = model(count=20)
    client.push(tensors)
    step(tensors, 1)
    gathered = Gathered(tensors)
    assert client.push(gathered.flow()).kind is PushKind.DELTA
    assert 1 <= gathered.most_alive <= 6
    gc.collect()
    assert len(gathered.alive) == 0


# Given up midway.


def spoil(client: Client) -> None:
    """Flip a bit of what the client holds."""
    held = client._history.snapshot.current
    assert held is not None
    held.tensors["layers.0.weight"].window(77, 78)[0] ^= 4


def shuffled(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))


def shuffled_at_the_end(tensors: Tensors) -> None:
    shuffled(dict(list(tensors.items())[3:]))


def other_shape(tensors: Tensors) -> None:
    tensors["layers.5.weight"] = tensors["layers.5.weight"][:-1].clone()


def one_more(tensors: Tensors) -> None:
    tensors["zz"] = torch.ones(1000, dtype=torch.bfloat16)


def one_less(tensors: Tensors) -> None:
    del tensors["layers.6.weight"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (shuffled, Fallback.TOO_DENSE),
        (shuffled_at_the_end, Fallback.TOO_DENSE),
        (other_shape, Fallback.LAYOUT_CHANGED),
        (one_more, Fallback.LAYOUT_CHANGED),
        (one_less, Fallback.LAYOUT_CHANGED),
    ],
)
@pytest.mark.parametrize("streams", [1, 3])
def test_what_was_read_already_is_sent_from_the_copy(
    client: Client,
    servicer: Any,
    change: Callable[[Tensors], None],
    reason: Fallback,
    streams: int,
) -> None:
    tensors = model(count=8)
    client.push(flow(tensors), streams=streams)
    step(tensors, 1)
    change(tensors)
    full(client, tensors, reason)
    assert servicer.uploads["push-1"].aborted


@contextmanager
def uncollected() -> Iterator[None]:
    """Have nothing collected: trainers put that off, and weights are no small change."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def copied(client: Client) -> list[Any]:
    """Return the memory of the client's copy."""
    held = client._history.snapshot.current
    assert held is not None
    return [tensor.window(0, 1).base for tensor in held.tensors.values()]


@pytest.mark.parametrize("change", [shuffled, other_shape, one_more, one_less])
def test_what_is_given_up_is_let_go_of(client: Client, change: Callable[[Tensors], None]) -> None:
    tensors = model(count=20)
    client.push(flow(tensors))
    copies = list(map(weakref.ref, copied(client)))
    step(tensors, 1)
    change(tensors)
    gathered = Gathered(tensors)
    with uncollected():
        # A shard is one tensor, or as a delta two.
        result = client.push(gathered.flow(), shard_bytes=130_000)
        assert result.kind is PushKind.FULL
        assert (gathered.most_alive <= 3, len(gathered.alive)) == (True, 0)
        left = {id(copy()) for copy in copies} - {id(None)}
        assert left <= {id(copy) for copy in copied(client)}


def test_more_than_a_third_changed_on_a_fast_link(client: Client) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    client._history.link_speed.note(1 << 30, 0.1)
    step(tensors, 1, 0.4)
    full(client, tensors, Fallback.TOO_DENSE)


def test_no_room_for_the_shards_midway(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    step(tensors, 1)
    asked: list[int] = []

    def room_for(size: int) -> bool:
        asked.append(size)
        return len(asked) != 4

    monkeypatch.setattr(delta_shards, "room_for", room_for)
    full(client, tensors, Fallback.NO_ROOM)


def test_a_server_that_refuses_the_delta_in_the_end_gets_everything(
    client: Client, servicer: Any
) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    step(tensors, 1)
    refused: list[str] = []

    def refuse(method: str, _request: Any) -> None:
        if method == "CommitPush" and not refused:
            refused.append(method)
            raise WeightSyncError(Reason.DATA_CORRUPT, "the base went bad; push in full")

    servicer.before = refuse
    handle = client.push_async(flow(tensors))
    result = handle.committed.result(20)
    assert handle.source_free.done()
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.REFUSED)
    assert result.content_digest == digest_of(tensors)


def test_a_server_without_the_base_gets_everything(client: Client, servicer: Any) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    servicer.uploads.clear()
    step(tensors, 1)
    full(client, tensors, Fallback.BASE_MISMATCH)


def test_a_push_in_full_that_fails_after_a_mismatch_leaves_the_copy(
    client: Client, servicer: Any
) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    uploads = dict(servicer.uploads)
    servicer.uploads.clear()

    def refuse(_chunk: Any) -> None:
        raise WeightSyncError(Reason.DISK_EXHAUSTED, "the disk has 3 bytes left; free some")

    servicer.chunk = refuse
    with pytest.raises(ClientError, match="3 bytes left"):
        client.push(flow(tensors))
    servicer.chunk = lambda _chunk: None
    servicer.uploads.update(uploads)
    step(tensors, 1)
    result = client.push(flow(tensors))
    assert (result.kind, result.base_version) == (PushKind.DELTA, 1)


def test_a_copy_that_went_bad_before_heals_itself(client: Client) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    spoil(client)
    step(tensors, 1)
    full(client, tensors, Fallback.REFUSED)


def test_a_copy_that_went_bad_meanwhile_is_never_sent(client: Client, servicer: Any) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    step(tensors, 1)

    def refuse(method: str, _request: Any) -> None:
        if method == "CommitPush":
            spoil(client)
            raise WeightSyncError(Reason.DATA_CORRUPT, "the base went bad; push in full")

    servicer.before = refuse
    told = r"is damaged in 'layers\.0\.weight'; push again"
    with pytest.raises(ClientError, match=told) as caught:
        client.push(flow(tensors))
    assert caught.value.reason is Reason.DATA_CORRUPT
    servicer.before = lambda _method, _request: None
    full(client, tensors, Fallback.FIRST)


# Nothing is lost by what fails.


def test_an_iterable_that_fails_leaves_the_copy(client: Client) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    step(tensors, 1)
    closed: list[bool] = []

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from list(flow(tensors))[:5]
            raise ZeroDivisionError
        finally:
            closed.append(True)

    with pytest.raises(ZeroDivisionError):
        client.push(broken())
    assert closed
    result = client.push(flow(tensors))
    assert (result.kind, result.base_version) == (PushKind.DELTA, 1)
    assert result.content_digest == digest_of(tensors)


def test_what_was_committed_under_its_key_before_leaves_the_copy(client: Client) -> None:
    tensors = model(count=4)
    client.push(flow(tensors), idempotency_key="one")
    client.push(flow(tensors), metadata={"run_id": "a"})
    again = client.push(flow(tensors), idempotency_key="one", metadata={"run_id": "b"})
    assert again.version == 1
    step(tensors, 1)
    result = client.push(flow(tensors), metadata={"run_id": "a"})
    assert (result.kind, result.base_version) == (PushKind.DELTA, 2)


def test_a_name_that_comes_twice_is_refused(client: Client) -> None:
    tensors = model(count=3)
    client.push(flow(tensors))
    with pytest.raises(ClientError, match=r"'layers.0.weight' twice"):
        client.push([*flow(tensors), *flow(tensors)])
    assert client.push(flow(tensors)).kind is PushKind.DELTA


def test_require_refuses_and_leaves_the_copy(client: Client, servicer: Any) -> None:
    tensors = model(count=8)
    client.push(flow(tensors))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    shuffled(tensors)
    with pytest.raises(RefusedError, match="cannot be a delta") as caught:
        client.push(flow(tensors), delta="require")
    assert caught.value.metadata == {"fallback_reason": "too_dense"}
    assert servicer.uploads["push-1"].aborted
    result = client.push(flow(before), delta="require")
    assert (result.base_version, result.content_digest) == (1, digest_of(before))


def test_without_room_for_a_copy_nothing_is_kept(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = model(count=8)
    asked: list[int] = []

    def room_for(size: int) -> bool:
        asked.append(size)
        return len(asked) < 3

    monkeypatch.setattr(snapshot, "room_for", room_for)
    for number in range(2):
        asked.clear()
        result = client.push(flow(tensors), shard_bytes=300_000)
        assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.NO_ROOM), number
        assert result.content_digest == digest_of(tensors)
    assert client._history.snapshot.current is None


def test_memory_that_is_counted_and_not_there_costs_the_copy_only(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = model(count=8)
    made: list[str] = []

    def make(tensor: Any) -> HostTensor:
        made.append(tensor.name)
        if len(made) == 5:
            raise MemoryError
        return HostTensor(tensor)

    monkeypatch.setattr(host_tensor, "HostTensor", make)
    result = client.push(flow(tensors), shard_bytes=130_000)
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.NO_ROOM)
    assert result.content_digest == digest_of(tensors)
    assert client._history.snapshot.current is None


def test_all_memory_that_nobody_has_written_to_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def room_for(size: int) -> bool:
        asked.append(size)
        return True

    monkeypatch.setattr(snapshot, "room_for", room_for)
    taking = snapshot.StreamingCapture({})
    for number in range(3):
        taking.add([wrap(str(number), torch.zeros(1000, dtype=torch.uint8))])
    taking.keep("1", 0, memoryview(bytes(1000)))
    taking.keep("0", 500, memoryview(bytes(500)))
    taking.add([wrap("3", torch.zeros(10, dtype=torch.uint8))])
    assert asked == [1000, 2000, 3000, 1510]


@pytest.mark.parametrize("streams", [1, 3])
def test_a_cut_delta_goes_on_where_it_stopped(client: Client, servicer: Any, streams: int) -> None:
    tensors = model(count=8, elements=200_000)
    client.push(flow(tensors))
    step(tensors, 1, 0.2)
    servicer.received = 0
    servicer.cut_at = [1, 60_000, 200_000]
    result = client.push(flow(tensors), chunk_bytes=10_000, streams=streams)
    assert (result.kind, result.content_digest) == (PushKind.DELTA, digest_of(tensors))
    assert servicer.cut_at == []


async def test_asynchronous_iterables_become_deltas(running: Any) -> None:
    tensors = model(count=8)

    async def source() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for pair in flow(tensors):
            yield pair

    async with AsyncClient(running.address) as aio:
        await aio.push(source())
        step(tensors, 1)
        result = await aio.push(source())
        assert (result.kind, result.content_digest) == (PushKind.DELTA, digest_of(tensors))
