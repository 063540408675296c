"""The copy that deltas are made against: always the last committed version, to the byte."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.client.servicer import Servicer, StatusError, start
from weightsync.errors import WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync_client import Client, ClientError, PushKind, Reason, Retry
from weightsync_client.errors import AbortedError
from weightsync_client.snapshot import snapshot

Arrays = dict[str, np.ndarray[Any, Any]]

CHANGES = ("step", "jump", "nothing", "shape")
ENDS = ("well", "commit refused", "link away", "cancelled", "corrupted", "base forgotten")


class Trainer:
    """Pushes to a server that fails as ordered, and remembers what was committed."""

    def __init__(self, servicer: Servicer, client: Client) -> None:
        self.servicer = servicer
        self.client = client
        self.rng = np.random.default_rng(0)
        self.arrays = {f"t{i}": self.noise(3000 + i) for i in range(3)}
        self.committed: Arrays | None = None

    def noise(self, size: int) -> np.ndarray[Any, Any]:
        return self.rng.integers(0, 1 << 16, size, np.uint16)

    def change(self, how: str) -> None:
        if how == "step":
            for array in self.arrays.values():
                array[self.rng.integers(0, len(array), 40)] += 1
        elif how == "jump":
            self.arrays = {name: self.noise(len(a)) for name, a in self.arrays.items()}
        elif how == "shape":
            self.arrays["t0"] = self.noise(len(self.arrays["t0"]) + 1)

    def push(self, end: str) -> PushKind | None:
        """Push once; returns how, or None if it failed."""
        arrays = {name: array.copy() for name, array in self.arrays.items()}
        self.order(end)
        try:
            handle = self.client.push_async(arrays)
            if end == "cancelled":
                self.reached.wait(10)
                handle.cancel()
                self.gate.set()
            result = handle.committed.result(20)
        except ClientError:
            return None
        finally:
            self.servicer.before = lambda _method, _request: None
            self.servicer.chunk = lambda _chunk: None
        self.committed = arrays
        return result.kind

    def order(self, end: str) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()

        def before(method: str, _request: Any) -> None:
            if end == "commit refused" and method == "CommitPush":
                raise WeightSyncError(Reason.DISK_EXHAUSTED, "the disk is full; free some")

        def chunk(_chunk: Any) -> None:
            if end == "link away":
                raise StatusError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if end == "corrupted":
                raise WeightSyncError(Reason.SHARD_INVALID, "not what it should be; push again")
            self.reached.set()
            if end == "cancelled":
                self.gate.wait(10)

        self.servicer.before, self.servicer.chunk = before, chunk
        if end == "base forgotten":
            self.servicer.uploads.clear()

    def check(self) -> None:
        held = self.client._history.snapshot.current
        if held is None:
            return
        assert self.committed is not None
        assert held.tensors.keys() == self.committed.keys()
        for name, tensor in held.tensors.items():
            data = tensor.window(0, 2 * self.committed[name].size)
            assert data.tobytes() == self.committed[name].tobytes()
            assert tensor.digest == tensor_digest(data.tobytes())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.sampled_from(ENDS)), max_size=8))
def test_the_copy_is_the_last_committed_version(turns: list[tuple[str, str]]) -> None:
    running = start(Servicer())
    retry = Retry(attempts=2, initial_s=0.001, max_s=0.002)
    try:
        with Client(running.address, retry=retry) as client:
            trainer = Trainer(running.servicer, client)
            for change, end in turns:
                trainer.change(change)
                trainer.push(end)
                trainer.check()
            trainer.change("nothing")
            assert trainer.push("well") is not None
            trainer.check()
            trainer.change("step")
            assert trainer.push("well") is PushKind.DELTA
            trainer.check()
    finally:
        running.stop()


@pytest.fixture
def trainer(servicer: Servicer, client: Client) -> Trainer:
    return Trainer(servicer, client)


@pytest.mark.parametrize("end", ["commit refused", "link away", "cancelled"])
@pytest.mark.parametrize("change", ["step", "jump", "shape"])
def test_a_push_that_failed_leaves_the_copy_and_its_memory(
    trainer: Trainer, end: str, change: str
) -> None:
    trainer.push("well")
    before = trainer.client._history.snapshot.current
    trainer.change(change)
    assert trainer.push(end) is None
    assert trainer.client._history.snapshot.current is before
    trainer.check()


def test_where_two_copies_do_not_fit_the_old_one_goes_first(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.push("well")
    answers = [False, True]
    monkeypatch.setattr(snapshot, "room_for", lambda _size: answers.pop(0))
    trainer.change("shape")
    assert trainer.push("commit refused") is None
    assert trainer.client._history.snapshot.current is None
    monkeypatch.undo()
    trainer.push("well")
    trainer.change("step")
    assert trainer.push("well") is PushKind.DELTA
    trainer.check()


def test_room_is_judged_with_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "available_bytes", lambda: 9 << 30)
    assert snapshot.room_for(8 << 30)
    assert not snapshot.room_for((8 << 30) + 1)
    monkeypatch.setattr(snapshot, "available_bytes", lambda: 257 << 20)
    assert snapshot.room_for(1 << 20)
    assert not snapshot.room_for(2 << 20)


def test_turns_are_given_up_by_those_who_fail() -> None:
    held, stop = snapshot.SnapshotStore(), threading.Event()
    tickets = [held.line_up() for _ in range(3)]
    stop.set()
    with pytest.raises(AbortedError), held.turn(tickets[0], stop):
        pytest.fail("it was stopped")
    with pytest.raises(ZeroDivisionError), held.turn(tickets[1], threading.Event()):
        raise ZeroDivisionError
    with held.turn(tickets[2], threading.Event()):
        pass
