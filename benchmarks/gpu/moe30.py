"""The shape of Qwen3-30B-A3B in block fp8: what an update of such a model stops, and what it takes.

One checkpoint of random weights on tmpfs, 2 slots, store memory://, gpu_memory_utilization 0.5, 8
requests running; the trainer changes every value in its files before each push.

transform             plan, twin or both
vllm_pause_floor_s    vLLM's pause and resume with nothing between, caches kept
pause_total_s         of applies and a rollback with cache: keep, from the request to pause until
                      the engine runs
between_stall_s       an apply between two steps: the longest gap over the usual one
push_s, apply_s       the calls
twin_load_s           from the end of a push, when its last segment is readable, until the loader
                      has digested the arena; the second load
twin_slowdown         median token gap while it loads over that without it
twin_max_gap_s        the longest token gap of three loads
device_bytes_used     held beside vLLM: all of the loader, and what the rank took; at rest.
                      device_bytes_used_peak: at most, while it loads
restart_to_serving_s  from the start of a new vLLM until it serves the live version
vllm_reload_s         vLLM's reload_weights of the same model, then; reload_over_pause: over
                      pause_total_s
bitwise_equal         after the restart every tensor is what that reload makes of the same content
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.engine import bridge
from benchmarks.gpu.between import switch_between
from benchmarks.gpu.checkpoint import roomy, write_checkpoint
from benchmarks.gpu.cleanup import scratch
from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.gpu.engine import Setup, Site, generating, plugins_on_path
from benchmarks.gpu.kinds import MOE30
from benchmarks.gpu.link import TrainerLink, training
from benchmarks.gpu.loading import (
    arena_bytes,
    load_seconds,
    ranks,
    transform,
    until_loaded,
    until_serving,
)
from benchmarks.gpu.model_parts import unlike
from benchmarks.gpu.order import Order, sockets, take_limits
from benchmarks.gpu.ours import server_beside
from benchmarks.gpu.pause import measure_pauses
from benchmarks.gpu.results import Results
from benchmarks.gpu.trainer import IN_PLACE
from weightsync_client import ApplyReport, Client
from weightsync_client.options import ApplyOptions

__all__ = ["measure_moe30"]

_SHARE = 0.5
_TRAINER_S = 60.0
#: Until the engine serves for the first time, or the second; one load.
_READY_S, _LOAD_S = 240.0, 120.0
_PAUSES = 3
#: The first load may warm up.
_SECOND = 2


async def measure_moe30(order: Order, results: Results) -> None:
    """Measure everything; what fails is noted, and the rest is measured."""
    spec = MOE30.spec(small=order.small)
    results.parameters |= {"requests": order.requests, "tp": 1, "store": "memory://"}
    results.parameters |= {"bytes": spec.nbytes, "bytes_per_rank": spec.nbytes}
    results.parameters |= {"parameters": spec.elements, "tensors": len(spec.tensors)}
    await take_limits(order, results)
    place = roomy(spec.nbytes)
    results.parameters["files_on"] = str(place)
    with scratch(place) as disk, sockets() as folder:
        plugins_on_path(folder)
        results.say("writing the checkpoint")
        begin = time.perf_counter()
        await asyncio.to_thread(write_checkpoint, disk / "base", spec)
        results.facts["checkpoint_s"] = round(time.perf_counter() - begin, 2)
        setup = Setup(
            folder,
            disk / "base",
            order.device,
            requests=order.requests,
            executor=order.executor,
            memory_share=_SHARE,
            arguments=MOE30.arguments,
            variables=MOE30.variables,
        )
        async with (
            server_beside(folder, results) as client,
            training(IN_PLACE, disk / "base", _TRAINER_S) as trainer,
        ):
            await _Moe30(setup, results, client, trainer).measure()


@dataclass
class _Moe30:
    """One server and one trainer; engines come and go.

    Attributes:
        version: The one that was pushed last.
        live: The one that was applied last; 0: the engine's own checkpoint.
        loads: Seconds of each load.
        gaps: The longest token gap of each.
    """

    setup: Setup
    results: Results
    client: Client
    trainer: TrainerLink
    version: int = 0
    live: int = 0
    loads: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    async def measure(self) -> None:
        """Measure what needs the first engine, then what needs the second."""
        facts = self.results.facts
        async with self._engine() as site:
            facts["transform"] = await asyncio.to_thread(transform, self.client)
            (process,) = await site.ask("bench_process")
            facts["cuda_graphs"] = process["cuda_graphs"]
            async with site.load.running():
                with self.results.attempt("pauses"):
                    await measure_pauses(site, _PAUSES, clear=False)
                with self.results.attempt("updates"):
                    await self._updates(site, process["pid"])
        first = facts["vllm_start_s"]
        # The engine's own checkpoint is what it started from.
        await self.trainer.do("write_first")
        with self.results.attempt("room for the engine's own checkpoint"):
            await asyncio.to_thread(self._free_slot)
        with self.results.attempt("a restart of the engine"):
            async with self._engine() as site:
                with self.results.attempt("vLLM's own reload"):
                    await self._reload(site)
        facts["vllm_restart_s"], facts["vllm_start_s"] = facts["vllm_start_s"], first

    def _free_slot(self) -> None:
        """Delete the version before: an engine that starts is compared with its checkpoint first.

        Else that would lie beside both slots, and this host has no room for one more.
        """
        before = self.client.status().models[0].rollback_version
        self.client.delete(before, force=True)

    @contextlib.asynccontextmanager
    async def _engine(self) -> AsyncIterator[Site]:
        """Run vLLM and its bridge until the block ends, once it serves what shall be live."""
        begin = time.perf_counter()
        async with generating(self.setup, self.results) as site, bridge(site.llm):
            await until_serving(self.client, self.live, seconds=_READY_S)
            key = "restart_to_serving_s" if self.live else "start_to_serving_s"
            self.results.facts[key] = round(time.perf_counter() - begin, 2)
            self.results.say("it serves; its loader gets ready")
            await until_loaded(self.client, 0, seconds=_READY_S)
            self.results.say("its loader is ready")
            yield site

    async def _updates(self, site: Site, worker: int) -> None:
        """Push and apply, with a pause and between two steps, and go back."""
        with self._watched(worker) as memory:
            for between in (False, False, True):
                await self._push(site)
                if between:
                    figures = await switch_between(site, self.client, self.version)
                    self.live = self.version
                    self.results.add(between_stall_s=figures["between_steps_stall_s"], **figures)
                else:
                    await self._apply(site)
                await site.calm()
            self._note_loads()
            if memory is not None:
                await self._note_memory(memory)
        await self._paused(site, lambda: self.client.rollback("a test", cache="keep").report)
        await self._apply(site)

    @contextlib.contextmanager
    def _watched(self, worker: int) -> Iterator[PeakMemory | None]:
        """Watch the memory of the device, where its driver counts it by process."""
        with contextlib.ExitStack() as stack:
            memory = None
            with self.results.attempt("device_bytes_used"):
                memory = stack.enter_context(PeakMemory(worker))
            yield memory

    async def _push(self, site: Site) -> None:
        """Push the next content, and see what its load does to the requests."""
        results = self.results
        await self.trainer.do("change")
        results.say("push")
        address = f"unix:{self.setup.folder}/push.sock"
        pushed = await self.trainer.do("push", address=address)
        begin = time.perf_counter()
        self.version = pushed["version"]
        results.add(push_s=pushed["seconds"])
        results.facts |= {"push_way": pushed["way"], "push_way_reason": pushed["way_reason"]}
        if not await until_loaded(self.client, self.version, seconds=_LOAD_S):
            return
        end = time.perf_counter()
        await site.load.spoken(end)
        gaps = site.load.gaps(begin, end)
        usual = statistics.median(results.samples["token_gap_p50_s"])
        results.add(loader_load_s=await asyncio.to_thread(load_seconds, self.client))
        self.loads.append(end - begin)
        self.gaps.append(max(gaps))
        results.add(twin_slowdown=statistics.median(gaps) / usual)

    def _note_loads(self) -> None:
        """Put together what the loads showed."""
        if not self.loads:
            self.results.errors.append("twin_load_s: this engine has no loader")
            return
        self.results.facts |= {
            "twin_load_s": round(self.loads[:_SECOND][-1], 3),
            "twin_loads_s": [round(seconds, 3) for seconds in self.loads],
            "twin_max_gap_s": round(max(self.gaps), 6),
        }

    async def _apply(self, site: Site) -> None:
        options = ApplyOptions(cache="keep", clear_rejected=True)
        await self._paused(site, lambda: self.client.apply(self.version, **options))

    async def _paused(self, site: Site, call: Callable[[], ApplyReport]) -> None:
        begin = time.perf_counter()
        report = await asyncio.to_thread(call)
        applied, self.live = time.perf_counter() - begin, report.version
        seen = await site.settled(begin)
        self.results.facts["live_bytes"] = max(rank.written_bytes for rank in report.ranks)
        self.results.add(
            pause_total_s=report.phases.paused_total_s,
            pause_seen_s=seen["paused_s"],
            max_gap_s=seen["gap_s"],
            apply_s=applied,
            commit_s=max(rank.commit_s for rank in report.ranks),
            verify_s=max(rank.verify_s for rank in report.ranks),
        )
        await site.calm()

    async def _note_memory(self, memory: PeakMemory) -> None:
        taken = [rank.device_used_bytes for rank in await asyncio.to_thread(ranks, self.client)]
        self.results.facts |= {
            "arena_bytes": await asyncio.to_thread(arena_bytes, self.client),
            "device_bytes_used": memory.now() + max(taken),
            "device_bytes_used_peak": memory.peak + max(taken),
        }

    async def _reload(self, site: Site) -> None:
        """Compare what is live with what vLLM makes of the same content, and time that."""
        results = self.results
        (live,) = await site.ask("bench_digests")
        await site.calls.pause("keep", clear_cache=False)
        # The files have the first content. Else the comparison could not fail.
        await self._reloaded(site)
        (other,) = await site.ask("bench_digests")
        results.facts["tensors_changed"] = len(unlike(live, other))
        await self.trainer.do("write_present")
        await self._reloaded(site)
        (same,) = await site.ask("bench_digests")
        differ = unlike(live, same)
        results.facts["bitwise_equal"] = not differ and live != other
        if differ:
            results.errors.append(f"{len(differ)} tensors differ: {differ[:5]}")

    async def _reloaded(self, site: Site) -> None:
        begin = time.perf_counter()
        weights = {"weights_path": str(self.setup.checkpoint)}
        await site.llm.collective_rpc("reload_weights", kwargs=weights)
        self.results.add(vllm_reload_s=time.perf_counter() - begin)
        pauses = self.results.samples.get("pause_total_s")
        if pauses:
            reload_s = statistics.median(self.results.samples["vllm_reload_s"])
            self.results.facts["reload_over_pause"] = round(reload_s / statistics.median(pauses), 1)
