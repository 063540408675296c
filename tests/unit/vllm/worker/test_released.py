"""What a rank lets go of, and what the server may believe of that."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.staging import Staging
from tests.unit.server.engine.plant import hurry, plant, until
from tests.unit.server.world import make_shard
from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker
from weightsync.testing import MemoryEngine
from weightsync.vllm.apply import host_ops
from weightsync.vllm.cuda.cuda_ops import CudaOps
from weightsync.vllm.cuda.cuda_runtime import Registrar
from weightsync.vllm.env import Amount
from weightsync.vllm.plan.int_views import joined_digest_of
from weightsync.vllm.worker import worker_methods as worker_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


class SlowRegistrar(Registrar):
    """Takes memory from a device only when the test lets it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), None)
        self.go, self.begun = threading.Event(), threading.Event()

    def register(self, name: str, view: memoryview) -> None:
        self._registered[name] = len(view)

    def unregister(self, name: str) -> None:
        self.begun.set()
        assert self.go.wait(10)
        del self._registered[name]


class Gate:
    """Holds the job that comes first to a digest until it is ended, or the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self._first = threading.Lock()

    def digest(self, tensor: Any, dtype: Any = None, stop: Any = bool, device: Any = None) -> bytes:
        if self._first.acquire(blocking=False):
            self.entered.set()
            while not stop() and not self.go.wait(0.001):
                pass
        return joined_digest_of(tensor, dtype, stop, device)


@pytest.fixture
def first(staging: Staging) -> Any:
    return staging.stage_files([save(toy_tensors(1))])


@pytest.fixture
def second(staging: Staging) -> Any:
    return staging.stage_files([save(toy_tensors(2))])


def _worker(staging: Any) -> Worker:
    return Worker(load_for_real(ToyModel(), toy_tensors(1)), staging)


def _inside(rank: Worker) -> Any:
    return rank._weightsync_rank  # type: ignore[attr-defined]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowRegistrar]:
    """Give the ranks of this test such a device."""
    device, registrar = CudaOps(torch.device("cpu"), Amount(0), 1.0), SlowRegistrar()
    device.registrar = registrar
    monkeypatch.setattr(worker_, "_device_ops", lambda *_: device)
    yield registrar
    registrar.go.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Gate]]:
    """Return what closes a gate before the next digest."""
    gates = []

    def close() -> Gate:
        gates.append(Gate())
        monkeypatch.setattr(host_ops, "joined_digest_of", gates[-1].digest)
        return gates[-1]

    yield close
    for made in gates:
        made.go.set()


async def _unmapped(rank: Worker, segments: list[str]) -> dict[str, Any]:
    """Ask as the server does until the rank tells that it maps nothing else."""
    reply: dict[str, Any] = {}

    def so() -> bool:
        nonlocal reply
        reply = rank.call("release", keep=["base"], segments=segments)
        return not reply["busy"] and set(reply["mapped"]) <= set(segments)

    await until(so, 10)
    return reply


async def test_a_device_that_is_slow_to_let_go_is_told_to_map_until_it_has(
    staging: Staging, first: Any, second: Any, slow: SlowRegistrar
) -> None:
    rank = _worker(staging)
    rank.adopt(first)
    third = staging.stage_files([save(toy_tensors(3))])
    for name, version in (("two", second), ("three", third)):
        rank.job("prepare", name, version)
    ids = [version.staged.segments[0] for version in (first, second, third)]
    reply = rank.call("release", keep=["base", "three"], segments=[ids[0], ids[2]])
    assert (reply["ok"], reply["mapped"]) == (True, sorted(ids))
    assert await asyncio.to_thread(slow.begun.wait, 10)
    # More is gone while the first is being taken from the device: that is not forgotten.
    reply = rank.call("release", keep=["base"], segments=ids[:1])
    assert reply["mapped"] == sorted(ids)
    assert rank.call("state")["segments"] == 3
    slow.go.set()
    reply = await _unmapped(rank, ids[:1])
    assert set(slow._registered) == set(reply["mapped"]) == {ids[0]}
    assert rank.job("verify", "base")["proved"] is True


async def test_beside_a_job_a_rank_promises_nothing(
    staging: Staging, first: Any, second: Any, gate: Callable[[], Gate]
) -> None:
    rank = _worker(staging)
    rank.adopt(first)
    held = gate()
    page, _ = staging.pages(["0/0/0"])
    document = second.document.id
    assert rank.call("prepare", apply_id="slow", document=document, page=page)["ok"]
    assert held.entered.wait(10)
    kept = list(first.staged.segments)
    reply = rank.call("release", keep=["base", "slow"], segments=kept)
    assert reply["busy"] == "slow"
    assert set(reply["mapped"]) == {*kept, *second.staged.segments}
    reply = await _unmapped(rank, kept)
    assert reply["prepared"] == ["base"]


async def test_a_job_may_take_back_its_own_while_it_is_released(
    staging: Staging, first: Any, second: Any
) -> None:
    class Late(dict[str, Any]):
        """The job takes its own away as soon as the names are read."""

        def __iter__(self) -> Iterator[str]:
            names = list(self.keys())
            self.pop("two", None)
            return iter(names)

    rank = _worker(staging)
    rank.adopt(first)
    rank.job("prepare", "two", second)
    inside = _inside(rank)
    inside._prepared = Late(inside._prepared)
    reply = rank.call("release", keep=["base"], segments=list(first.staged.segments))
    assert (reply["ok"], reply["error"]) == (True, "")
    assert reply["mapped"] == list(first.staged.segments)


class Rooted(MemoryEngine):
    """The in-memory engine with the worker methods of a real rank.

    Attributes:
        rank: It.
        hellos: How often a server said hello.
        asked: How often it asked for what is gone to be unmapped.
    """

    def __init__(self, rank: Worker, socket: Path) -> None:
        super().__init__(
            {name: (dtype, shape, data) for name, dtype, shape, data in _entries(1)}, socket
        )
        self.rank = rank
        self.hellos = self.asked = 0

    async def hello(self) -> Any:
        self.hellos += 1
        return await super().hello()

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        word = method.removeprefix("weightsync_")
        self.asked += "segments" in args
        reply = await asyncio.to_thread(self.rank.call, word, **args)
        self._content = self.rank.call("state")["content_digest"]
        return [{"rank": "0/0/0"} | reply]

    @property
    def mapped(self) -> set[str]:
        return set(_inside(self.rank)._segments.mappings._mapped)


def _entries(seed: int) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [
        (name, "F32", tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in toy_tensors(seed).items()
    ]


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Staging]:
    """What is left of a server that was there before."""
    stage = Staging(tmp_path / "segments.sock")
    yield stage
    stage.close()


async def test_a_prepare_for_a_dead_server_is_no_obstacle(
    tmp_path: Path, dead: Staging, gate: Callable[[], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    rank = _worker(dead)
    rank.adopt(dead.stage_files([save(toy_tensors(1))]))
    held = gate()
    second = dead.stage_files([save(toy_tensors(2))])
    page, _ = dead.pages(["0/0/0"])
    assert rank.call("prepare", apply_id="lost", document=second.document.id, page=page)["ok"]
    assert held.entered.wait(10)
    dead.server.close()
    engine = Rooted(rank, tmp_path / "segments.sock")
    async with plant(tmp_path, engine) as it:  # type: ignore[arg-type]
        await it.ready()
        assert engine.hellos == 1, "it was not sent away"


async def test_what_a_dead_server_had_is_unmapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: Staging
) -> None:
    hurry(monkeypatch)
    rank = _worker(dead)
    dead.server.close()
    engine = Rooted(rank, tmp_path / "segments.sock")
    store = f"file://{tmp_path / 'store'}"
    async with plant(tmp_path, engine, store=store) as it:  # type: ignore[arg-type]
        await it.ready()
        await it.here.push([make_shard(0, _entries(2))], 2)
        await it.apply(2)
        before = engine.mapped
        assert len(before) == 2
    async with plant(tmp_path, engine, store=store) as it:  # type: ignore[arg-type]
        await it.ready()
        await until(lambda: not engine.mapped & before)
        assert engine.mapped <= it.here.model.segments.exposed_to("engine")


async def test_what_a_device_has_not_let_go_of_counts_in_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: Staging, slow: SlowRegistrar
) -> None:
    hurry(monkeypatch)
    rank = _worker(dead)
    dead.server.close()
    engine = Rooted(rank, tmp_path / "segments.sock")
    async with plant(tmp_path, engine) as it:  # type: ignore[arg-type]
        await it.ready()
        keeper, budget = it.here.model.segments, it.here.model.segments.budget
        await until(lambda: budget.reserved == it.here.model.slots.reserved_bytes)
        segment = await keeper.create(1 << 16)
        keeper.expose([segment.id])
        views = await asyncio.to_thread(
            _inside(rank)._segments.mappings.map, dead.socket, [segment.id]
        )
        assert len(views) == 1
        del views
        keeper.retire(segment)
        assert await asyncio.to_thread(slow.begun.wait, 10)
        asked = engine.asked
        await until(lambda: engine.asked > asked + 2)
        assert segment.id in engine.mapped & keeper.retired
        slow.go.set()
        await until(lambda: not keeper.retired)
        assert segment.id not in engine.mapped
