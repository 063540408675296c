"""A whole server side without gRPC around an engine of this process, and ways to upset it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.unit.server.world import MODEL, Shard, World, make_shard, world
from weightsync.engine import CacheUse
from weightsync.testing import MemoryEngine, memory_logprobs
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import (
    Applier,
    ApplySettings,
    EngineApplier,
    EngineContext,
    EngineSet,
    EngineSupervisor,
    Journal,
    JournalFile,
    supervisor,
)
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import pytest

ENGINE = "engine"
#: Name, dtype and shape of the model's tensors.
KINDS = {"a": ("F32", (64,)), "b": ("BF16", (8, 4)), "c": ("U8", ())}


def tensors(seed: int) -> dict[str, bytes]:
    """Return the parameters of version `seed`."""
    return {"a": bytes([seed]) * 256, "b": bytes([seed, 1]) * 32, "c": bytes([seed])}


def shards(seed: int) -> list[Shard]:
    """Return version `seed` as a trainer pushes it."""
    return [make_shard(0, [(name, *KINDS[name], data) for name, data in tensors(seed).items()])]


def checkpoint(seed: int = 1) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return a MemoryEngine's tensors."""
    return {name: (*KINDS[name], data) for name, data in tensors(seed).items()}


def probes(seed: int, *, count: int = 3, wrong: int = -1) -> pb.Probes:
    """Return probes as the trainer of version `seed` computes them, those at `wrong` not."""
    found = pb.Probes()
    for index in range(count):
        tokens = [(7 * index + 3 * at) % 50 for at in range(12)]
        logprobs = memory_logprobs(tensors(seed), tokens)[1:]
        if index == wrong:
            logprobs = [one - 1 for one in logprobs]
        found.probes.add(tokens=tokens, logprobs=logprobs, start=2)
    return found


class Engine(MemoryEngine):
    """Misbehaves on request.

    Attributes:
        before: By the name of a call: what to do before it is carried out.
        after: By the name of a call: what becomes of its answer.
        calls: Names of all calls but health.
        wrong: Values that the next writes put into tensor `a` instead of what was prepared.
        served: The seeds of all that it began to serve, in order.
        cached: The seed of what it generated with since its caches were cleared; 0: with nothing.
        stale: What it began to serve on caches of something else: the seed, and that of the caches.
    """

    def __init__(self, socket: Path, seed: int = 1, ranks: int = 1) -> None:
        super().__init__(checkpoint(seed), socket, ranks, checks_layouts=True)
        self.before: dict[str, Callable[[], Any]] = {}
        self.after: dict[str, Callable[[Any], Any]] = {}
        self.calls: list[str] = []
        self.wrong: list[bytes] = []
        self.sleeping = False
        self.served: list[int] = []
        self.cached = 0
        self.stale: list[tuple[int, int]] = []

    async def _around(self, name: str, call: Any) -> Any:
        if name != "health":
            self.calls.append(name)
        try:
            if name in self.before:
                outcome = self.before[name]()
                if asyncio.iscoroutine(outcome):
                    await outcome
        except BaseException:
            call.close()
            raise
        answer = await call
        return self.after[name](answer) if name in self.after else answer

    async def hello(self) -> Any:
        return await self._around("hello", super().hello())

    async def health(self, newest: int | None = None) -> Any:
        health = await self._around("health", super().health(newest))
        if self.sleeping:
            object.__setattr__(health, "sleeping", True)
        return health

    async def pause(self, spec: Any, lease_s: float) -> Any:
        return await self._around("pause", self._pause(spec, lease_s))

    async def _pause(self, spec: Any, lease_s: float) -> Any:
        lease = await super().pause(spec, lease_s)
        if spec.cache is CacheUse.RECOMPUTE:
            self.cached = 0
        return lease

    async def resume(self, lease_id: str, version: int, content_digest: str) -> Any:
        return await self._around("resume", super().resume(lease_id, version, content_digest))

    def _serve(self, version: int) -> None:
        super()._serve(version)
        seed = self.live["a"][0]
        self.served.append(seed)
        if self.cached not in (0, seed):
            self.stale.append((seed, self.cached))
        self.cached = seed

    def restart(self, tensors: Any) -> None:
        super().restart(tensors)
        self.cached = 0

    async def switch(self, order: Any) -> Any:
        return await self._around("switch", super().switch(order))

    async def score(self, sequences: Any, lease_id: str, limit_s: float) -> Any:
        return await self._around("score", super().score(sequences, lease_id, limit_s))

    async def renew(self, lease_id: str, lease_s: float) -> Any:
        return await self._around("renew", super().renew(lease_id, lease_s))

    async def fence(self, reason: str) -> Any:
        return await self._around("fence", super().fence(reason))

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> Any:
        return await self._around("offer", super().offer_checkpoint(segment_socket, offer_id))

    async def call_workers(self, method: str, args: Any) -> Any:
        name = method.removeprefix("weightsync_")
        return await self._around(name, super().call_workers(method, args))

    def write(self, tensors: Any) -> None:
        super().write(tensors)
        if self.wrong:
            self.live["a"] = self.wrong.pop(0)

    @property
    def serves(self) -> int:
        """The seed of what it generates with; 0: it generates nothing."""
        if self._condition != "serving":
            return 0
        seed = self.live["a"][0]
        assert self.live == tensors(seed), "a mixture is served"
        return seed


def engine_set(file: JournalFile, engines: dict[str, Engine], context: EngineContext) -> EngineSet:
    """Return several engines of one host, which are not started."""
    known = EngineSet(file)
    for name, engine in engines.items():
        supervisor = EngineSupervisor(engine, context, Journal(file, name), lambda: None)
        known.add(EngineApplier(supervisor))
    return known


def limits(**more: Any) -> ApplySettings:
    values = {"prepare_timeout_s": 5.0, "commit_timeout_s": 5.0, "pause_lease_s": 5.0} | more
    return ApplySettings(**values)


@dataclass
class Plant:
    """The parts of a server and its engine."""

    here: World
    engine: Engine
    keeper: EngineSupervisor
    applier: Applier
    journal: Journal
    metrics: Metrics
    serving: list[bool] = field(default_factory=list)

    async def push(self, *seeds: int) -> None:
        for seed in seeds:
            await self.here.push(shards(seed), seed)

    async def push_probed(self, seed: int, version: int = 0, **fields: Any) -> int:
        """Push a version with the probes of its trainer; see `probes` for what is wrong in them."""
        given = probes(seed, **fields)
        return await self.here.push(shards(seed), version or seed, probes=given)

    async def apply(self, version: int = 0, **fields: Any) -> pb.ApplyReport:
        request = pb.ApplyVersionRequest(model=MODEL, version=version, **fields)
        return (await self.applier.apply(request)).report

    async def rollback(self, **fields: Any) -> pb.RollbackResponse:
        return await self.applier.rollback(pb.RollbackRequest(model=MODEL, **fields))

    async def bring(self, *seeds: int) -> None:
        """Wait until the engine serves, push versions and apply one after the other."""
        await self.ready()
        await self.push(*seeds)
        for seed in seeds:
            await self.apply(seed)

    async def verify(self, version: int = 0) -> pb.VerifyVersionResponse:
        request = pb.VerifyVersionRequest(model=MODEL, version=version)
        return await self.applier.verify(request)

    async def until(self, state: int, timeout_s: float = 25) -> pb.EngineStatus:
        """Wait for a state of the engine as GetStatus tells it."""
        await until(lambda: self.keeper.status().state == state, timeout_s)
        return self.keeper.status()

    async def ready(self) -> pb.EngineStatus:
        """Wait until the engine serves a proved version."""
        return await self.until(pb.ENGINE_STATE_SERVING)

    def count(self, name: str, **labels: str) -> float:
        registry = self.metrics.registry
        value = registry.get_sample_value(name, {"model": MODEL} | labels)
        if value is None:
            value = registry.get_sample_value(name, {"model": MODEL, "engine": ENGINE} | labels)
        assert value is not None, name
        return value

    def outcomes(self) -> dict[str, float]:
        counts = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "weightsync_applies_total" and sample.value:
                    counts[sample.labels["outcome"]] = sample.value
        return counts

    def leases(self) -> dict[int, int]:
        """Return how often each resident version is leased."""
        slots = self.here.model.slots.slots
        return {slot.record.version: slot.leases for slot in slots if slot.record is not None}


async def until(true: Callable[[], bool], timeout_s: float = 25) -> None:
    """Wait until something is so."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


def cut_journal(folder: Path, count: int = 1) -> list[bytes]:
    """Cut a journal's last lines off, as if its server had died before; return them."""
    path = folder / "journal"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-count]))
    return lines[-count:]


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the engine often."""
    monkeypatch.setattr(supervisor, "_HEALTH_S", 0.02)
    monkeypatch.setattr(supervisor, "_RETRY_S", 0.05)


@contextlib.asynccontextmanager
async def plant(
    folder: Path,
    engine: Engine | None = None,
    *,
    store: str = "memory://",
    durable: bool = False,
    **more: Any,
) -> AsyncIterator[Plant]:
    """Start a server around an engine, which outlives it; so do `durable` versions."""
    store = f"file://{folder / 'store'}" if durable else store
    slots, retention = more.pop("slots", 3), more.pop("retention", None)
    async with world(folder, store=store, slots=slots, retention=retention) as here:
        engine = engine or Engine(folder / "segments.sock")
        lasting = here.model.store.url if here.model.store.durable else ""
        file = JournalFile(folder / "journal", lasting)
        journal = Journal(file, ENGINE)
        metrics = Metrics(MODEL)
        serving: list[bool] = []
        host = EngineContext(here.model, here.server, metrics, limits(**more))
        engines = EngineSet(file)
        held = EngineSupervisor(
            engine,
            host,
            journal,
            lambda: serving.append(held.serving),
        )
        engines.add(EngineApplier(held))
        applier = Applier(engines, host)
        engines.start()
        try:
            yield Plant(here, engine, held, applier, journal, metrics, serving)
        finally:
            await applier.drain()
            await engines.stop()
            file.close()
