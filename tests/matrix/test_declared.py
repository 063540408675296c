"""Iterables that declare what they give, against a real server on this host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from tests.support.server_fixtures import RETRY
from tests.support.weightsync_server import WeightSyncServer, short_server
from weightsync.shm.same_host import SameHostClient
from weightsync_client import (
    Client,
    ClientError,
    Declared,
    PushKind,
    Reason,
    Streamed,
    TransferPath,
)
from weightsync_client.source import shards, tensor_stream
from weightsync_client.source.shards import Shard

COUNT, ROWS = 40, 500

Array = np.ndarray[Any, np.dtype[np.float32]]
Pairs = Iterator[tuple[str, Array]]


@pytest.fixture(scope="module", name="host_server")
def _host_server() -> Iterator[WeightSyncServer]:
    with short_server(flags=("--same-host",)) as server:
        yield server


@pytest.fixture
def client(host_server: WeightSyncServer) -> Iterator[Client]:
    with Client(host_server.address, retry=RETRY) as client:
        yield client


def tensors(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, ROWS, COUNT)
    return {
        f"layers.{at}.weight": random.random((size, 16), np.float32)
        for at, size in enumerate(sizes)
    }


class Trainer:
    """Makes one tensor after the other, all in the same memory."""

    def __init__(self, state: dict[str, Array]) -> None:
        self.state = state
        self.given = 0

    def pairs(self) -> Pairs:
        memory = np.empty(ROWS * 16, np.float32)
        for name, tensor in self.state.items():
            self.given += 1
            made = memory[: tensor.size].reshape(tensor.shape)
            made[...] = tensor
            yield name, made
            made[...] = np.nan

    def layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, "F32", tensor.shape) for name, tensor in self.state.items()]

    def declared(self) -> Declared:
        return Declared(self.pairs(), self.layout())


def test_the_next_is_a_delta(client: Client) -> None:
    state = tensors(5)
    client.push(Trainer(state).declared())
    state["layers.7.weight"][0, 0] += 1
    changed = client.push(Trainer(state).declared())
    assert changed.kind is PushKind.DELTA
    assert changed.sent_bytes < changed.size_bytes / 10
    assert client.push(state, delta="never").content_digest == changed.content_digest


def _wrong(kind: str) -> tuple[Trainer, Declared]:
    trainer = Trainer(tensors(8))
    layout = trainer.layout()
    if kind == "name":
        layout[9] = ("layers.9.bias", *layout[9][1:])
    elif kind == "shape":
        layout[9] = (layout[9][0], "F32", (1, 1))
    elif kind == "dtype":
        layout[9] = (layout[9][0], "I32", layout[9][2])
    elif kind == "too many":
        del layout[-1]
    elif kind == "too few":
        layout.append(("layers.40.weight", "F32", (2, 2)))
    return trainer, Declared(trainer.pairs(), layout)


@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("same_host", ["auto", "never"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("name", "gave 'layers.9.weight' .*declared was 'layers.9.bias'"),
        ("shape", r"gave 'layers.9.weight' .*declared was .* \[1, 1\]"),
        ("dtype", r"gave .*\(F32 .*declared was .*\(I32"),
        ("too many", "gave 'layers.39.weight' .* after all that were declared"),
        ("too few", "ended 1 tensors before its declaration, at 'layers.40.weight'"),
    ],
)
def test_what_was_not_declared_is_no_version(
    client: Client, kind: str, words: str, same_host: str, *, collective: bool
) -> None:
    before = client.status().models[0].newest_version
    trainer, source = _wrong(kind)
    with pytest.raises(ClientError, match=words) as caught:
        client.push(source, collective=collective, same_host=same_host, shard_bytes=30_000)
    assert caught.value.reason is Reason.LAYOUT_INVALID
    after = client.status().models[0]
    assert (after.newest_version, after.pushes) == (before, ())
    if collective:
        assert trainer.given == COUNT


def test_an_iterable_that_fails_is_no_version(client: Client) -> None:
    trainer = Trainer(tensors(9))

    def broken() -> Pairs:
        for at, pair in enumerate(trainer.pairs()):
            if at == 20:
                raise OSError("a rank is gone")
            yield pair

    with pytest.raises(OSError, match="a rank is gone"):
        client.push(Declared(broken(), trainer.layout()), shard_bytes=30_000)
    assert client.status().models[0].pushes == ()


def test_a_push_that_is_cancelled_reads_on_and_leaves_nothing(client: Client) -> None:
    trainer = Trainer(tensors(10))
    handle = client.push_async(
        trainer.declared(),
        collective=True,
        shard_bytes=9000,
        on_progress=lambda *_: handle.cancel(),
    )
    with pytest.raises(ClientError):
        handle.committed.result(30)
    assert trainer.given == COUNT
    assert client.status().models[0].pushes == ()


@pytest.mark.parametrize("shard_bytes", [1, 100_000, 256 << 20])
def test_what_was_declared_is_written_into_the_servers_memory(
    client: Client, shard_bytes: int
) -> None:
    state = tensors(shard_bytes)
    sent: list[tuple[int, int]] = []
    pushed = client.push(
        Trainer(state).declared(),
        delta="never",
        shard_bytes=shard_bytes,
        on_progress=lambda *done: sent.append(done),
    )
    assert (pushed.way, pushed.way_reason) == (TransferPath.SAME_HOST, "")
    # How much it is was known before.
    assert sent[-1][0] == sent[0][1] > 0
    whole = client.push(state, delta="never", shard_bytes=shard_bytes)
    assert whole.content_digest == pushed.content_digest


def test_a_delta_that_does_not_pay_is_written_all_the_same(client: Client) -> None:
    first, second = Trainer(tensors(6)), Trainer(tensors(6))
    client.push(first.declared())
    second.state = {name: tensor + 1 for name, tensor in second.state.items()}
    pushed = client.push(second.declared())
    assert (pushed.kind, pushed.way) == (PushKind.FULL, TransferPath.SAME_HOST)
    assert second.given == COUNT
    assert client.push(second.state, delta="never").content_digest == pushed.content_digest


def test_without_a_declaration_or_the_hand_off_it_is_streamed(client: Client) -> None:
    trainer = Trainer(tensors(7))
    streamed = client.push(trainer.pairs(), delta="never")
    assert (streamed.way, streamed.way_reason) == (TransferPath.STREAM, Streamed.ITERABLE)
    declared = client.push(trainer.declared(), delta="never", same_host="never", shard_bytes=9000)
    assert (declared.way, declared.way_reason) == (TransferPath.STREAM, Streamed.OFF)
    assert declared.content_digest == streamed.content_digest


def test_a_hand_off_that_cannot_be_reached_is_no_failure(
    host_server: WeightSyncServer, client: Client
) -> None:
    trainer = Trainer(tensors(11))
    path = host_server.run_dir / "trainers.sock"
    path.rename(path.with_suffix(".away"))
    try:
        pushed = client.push(trainer.declared(), delta="never", shard_bytes=30_000)
    finally:
        path.with_suffix(".away").rename(path)
    assert (pushed.way, pushed.way_reason) == (TransferPath.STREAM, Streamed.UNREACHABLE)
    whole = client.push(trainer.state, delta="never", shard_bytes=30_000)
    assert whole.content_digest == pushed.content_digest


@pytest.mark.parametrize("step", ["take_lease", "written"])
def test_a_hand_off_that_ends_on_the_way_is_no_failure(
    client: Client, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ordinary = getattr(SameHostClient, step)

    def cut(offers: SameHostClient, shard: int, *facts: Any) -> Any:
        if shard == 4:
            offers.close()
        return ordinary(offers, shard, *facts)

    monkeypatch.setattr(SameHostClient, step, cut)
    trainer = Trainer(tensors(12))
    pushed = client.push(trainer.declared(), delta="never", shard_bytes=30_000)
    assert (pushed.way, pushed.way_reason) == (TransferPath.SAME_HOST, Streamed.UNREACHABLE)
    assert trainer.given == COUNT
    whole = client.push(trainer.state, delta="never", shard_bytes=30_000)
    assert whole.content_digest == pushed.content_digest


def test_only_two_shards_are_in_memory(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[_Counted]] = []
    most = 0
    made = shards.tensor_shard

    def count() -> int:
        return sum(shard() is not None for shard in alive)

    def counted(*facts: Any) -> Shard:
        nonlocal most
        # The next is made when one waits to be written, and one is being written.
        if count() > 2:
            # Of those in a cycle; it takes long beside all that the other tests have imported.
            gc.collect()
        most = max(most, count())
        shard = _Counted(made(*facts))
        alive.append(weakref.ref(shard))
        return cast("Shard", shard)

    monkeypatch.setattr(tensor_stream, "tensor_shard", counted)
    trainer = Trainer(tensors(13))
    assert (
        client.push(trainer.declared(), delta="never", shard_bytes=30_000).way
        is TransferPath.SAME_HOST
    )
    assert len(alive) > 10
    assert most <= 2


class _Counted:
    """A shard that weak references may point to."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)
