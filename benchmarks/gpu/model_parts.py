"""Every kind of model: pushed, applied, and held against a fresh engine of what was pushed.

The part `models` runs `model` for each kind in a process of its own. Of each kind:

transform       what leads from a version's bytes to the live ones: plan, twin or both
push_s          the trainer, on the same GPU, pushes a version of which every value differs
load_s          from then until the loaders hold it; null where there is none
apply_s         the whole apply, with cache: keep, and of it pause_total_s from the request to pause
                until the engine runs
bitwise_equal   every tensor that the model and its draft compute from is that of a fresh engine of
                the same content, found and digested by other code than ours
vllm_pause_floor_s, vllm_start_s, live_bytes, cuda_graphs
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.checkpoint import roomy, write_checkpoint
from benchmarks.gpu.cleanup import scratch
from benchmarks.gpu.engine import Setup, Site, generating, plugins_on_path
from benchmarks.gpu.fresh import fresh_digests
from benchmarks.gpu.in_place import InPlaceTrainer
from benchmarks.gpu.kinds import KINDS, Kind
from benchmarks.gpu.link import TrainerLink, training
from benchmarks.gpu.loading import transform, until_loaded
from benchmarks.gpu.order import Order, child_line, needs_gpus, sockets
from benchmarks.gpu.ours import serving
from benchmarks.gpu.pause import measure_pauses
from benchmarks.gpu.results import Results
from benchmarks.gpu.spec import ModelSpec
from weightsync_client import Client

__all__ = ["FIGURES", "measure_kind", "measure_kinds", "unlike"]

#: Of each kind.
FIGURES = (
    "transform",
    "pause_total_s",
    "push_s",
    "load_s",
    "apply_s",
    "bitwise_equal",
    "vllm_pause_floor_s",
    "vllm_start_s",
    "live_bytes",
    "cuda_graphs",
)

_TRAINER_S = 60.0
#: Of one kind; a loader's time to start and to load.
_KIND_S, _LOAD_S = 110.0, 90.0
#: Beyond it, for vLLM to stop.
_OVERTIME_S = 50.0
_PUSHES, _PAUSES = 3, 3
#: Of vLLM's key-value cache. A fixed size: two engines start beside each other.
_CACHE = 4 << 30
_SHARE = 0.3


async def measure_kinds(order: Order, results: Results) -> None:
    """Run every kind for itself: one that fails leaves the others."""
    for name in order.kinds or KINDS:
        with results.attempt(name):
            budget = min(_KIND_S, results.left_s)
            flags = [*order.flags, "--kinds", name, "--budget-s", f"{budget:g}"]
            line = await child_line("model", flags, budget + _OVERTIME_S)
            results.facts |= {f"{name}.{key}": line.get(key) for key in FIGURES}
            results.errors += [f"{name}: {error}" for error in line["errors"]]


async def measure_kind(order: Order, results: Results) -> None:
    """Measure one kind."""
    if order.device == "cuda":
        needs_gpus(order, 1)
    (name,) = order.kinds
    kind = KINDS[name]
    spec = kind.spec(small=order.small)
    results.parameters |= {"kind": name, "requests": order.requests, "bytes": spec.nbytes}
    results.parameters |= {"tensors": len(spec.tensors), "parameters": spec.elements}
    with scratch(roomy(2 * spec.nbytes)) as disk, sockets() as folder:
        plugins_on_path(folder)
        await asyncio.to_thread(write_checkpoint, disk / "base", spec)
        await asyncio.to_thread(_write_other, disk / "other", spec)
        setup = _setup(order, kind, folder, disk / "base")
        async with AsyncExitStack() as stack:
            # All of it starts beside each other.
            trainer = await stack.enter_async_context(
                training(order.device, disk / "other", _TRAINER_S, wait=False)
            )
            async with fresh_digests(replace(setup, checkpoint=disk / "other")) as fresh:
                site = await stack.enter_async_context(generating(setup, results))
                wanted = await fresh
            client = await stack.enter_async_context(serving(site, folder))
            address = f"unix:{folder}/push.sock"
            await _Kind(site, trainer, client, address).measure(wanted)


def _write_other(folder: Path, spec: ModelSpec) -> None:
    """Write a checkpoint that differs from that of `write_checkpoint` in every value."""
    write_checkpoint(folder, spec)
    other = InPlaceTrainer(str(folder))
    other.change()
    other.close()


def _setup(order: Order, kind: Kind, folder: Path, checkpoint: Path) -> Setup:
    arguments = dict(kind.arguments)
    if order.device == "cuda":
        arguments["kv_cache_memory_bytes"] = _CACHE
    return Setup(
        folder,
        checkpoint,
        order.device,
        requests=order.requests,
        executor=order.executor,
        memory_share=_SHARE,
        arguments=arguments,
        variables=kind.variables,
    )


@dataclass
class _Kind:
    """One engine of the kind, its server, and a trainer whose content is a fresh engine's."""

    site: Site
    trainer: TrainerLink
    client: Client
    address: str

    async def measure(self, wanted: dict[str, str]) -> None:
        """Measure, with the digests of a fresh engine of the trainer's content."""
        site, results = self.site, self.site.results
        results.facts["transform"] = await asyncio.to_thread(transform, self.client)
        (process,) = await site.ask("bench_process")
        results.facts["cuda_graphs"] = process["cuda_graphs"]
        (before,) = await site.ask("bench_digests")
        async with site.load.running():
            with results.attempt("pauses"):
                await measure_pauses(site, _PAUSES, clear=False)
            with results.attempt("a push and its apply"):
                await self._update()
            with results.attempt("bitwise equality"):
                await self._compare(before, wanted)
            for _ in results.rounds(_PUSHES, "pushes and applies", reserve_s=10.0):
                await self.trainer.do("change")
                results.add(**await self._update())

    async def _update(self) -> dict[str, float]:
        pushed = await self.trainer.do("push", address=self.address)
        begin = time.perf_counter()
        loaded = await until_loaded(self.client, pushed["version"], seconds=_LOAD_S)
        figures = {"push_s": pushed["seconds"]}
        if loaded:
            figures["load_s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        report = await asyncio.to_thread(self.client.apply, pushed["version"], cache="keep")
        figures["apply_s"] = time.perf_counter() - begin
        figures["pause_total_s"] = report.phases.paused_total_s
        figures["live_bytes"] = max(rank.written_bytes for rank in report.ranks)
        await self.site.settled(begin)
        await self.site.calm()
        return figures

    async def _compare(self, before: dict[str, str], wanted: dict[str, str]) -> None:
        verified = (await asyncio.to_thread(self.client.verify)).verified
        (live,) = await self.site.ask("bench_digests")
        changed = sum(before.get(name) != digest for name, digest in live.items())
        differ = unlike(live, wanted)
        facts: dict[str, Any] = self.site.results.facts
        facts |= {"verified": verified, "tensors_compared": len(live), "tensors_changed": changed}
        # Where nothing changed, the comparison could not fail.
        facts["bitwise_equal"] = verified and not differ and changed > 0
        if differ:
            self.site.results.errors.append(f"{len(differ)} tensors differ: {differ[:5]}")


def unlike(live: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Return the tensors that are not the same on both sides, or on one alone."""
    names = sorted(live.keys() | wanted.keys())
    return [name for name in names if live.get(name) != wanted.get(name)]
