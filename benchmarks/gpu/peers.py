"""The peers' ways to new weights, each with vLLM's pause around it and requests running.

vllm_reload_s      vLLM's reload_weights from safetensors in shared memory
torchforge_way_s   the model's own load_weights from pageable views of shared memory, in place
vllm_ipc_s         vLLM's ipc backend: start, update and finish; the trainer's tensors lie on the
                   same GPU
vllm_nccl_s        vLLM's nccl backend, packed, from a trainer on another GPU; vllm_nccl_unpacked_s
                   tensor by tensor
checkpoint_engine_s  checkpoint-engine's update, once it holds the trainer's tensors in pinned
                   memory; null where its package is not installed

pause_..., max_gap_... and update_end_to_end_... of each: from the request to pause until vLLM has
resumed, the longest token gap, and from the trainer's call to the first token of the new weights.
Where files are read, the trainer writes them in that time, into pages that are warm.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import Site
from benchmarks.gpu.link import TrainerLink
from benchmarks.servers import free_port

__all__ = ["Peers"]

#: One update that takes longer has hung.
_UPDATE_S = 60.0
_JOIN_S = 60.0


@dataclass
class Peers:
    """Measures the peers in one engine.

    Args:
        site: The engine, with requests running.
        trainer: Holds the weights.
        files: A checkpoint that the trainer writes and that vLLM did not start from.
        rounds: How many of each.
    """

    site: Site
    trainer: TrainerLink
    files: Path
    rounds: int
    _handles: dict[str, Any] = field(default_factory=dict)
    _port: int = 0

    async def without_backend(self) -> None:
        """Measure what needs no weight transfer backend."""
        await self._way("vllm_reload", self._reload, self._write)
        await self._way("torchforge_way", self._torchforge, self._write)
        if importlib.util.find_spec("checkpoint_engine") is None:
            self.site.results.facts["checkpoint_engine_s"] = None
        else:
            await self._way("checkpoint_engine", self._checkpoint_engine, self._register)

    async def ipc(self) -> None:
        """Measure vLLM's ipc backend."""
        with self.site.results.attempt("vllm_ipc"):
            await self.site.llm.init_weight_transfer_engine(_init_request({}))
            await self._way("vllm_ipc", self._ipc, self._make_handles)

    async def nccl(self, tp: int) -> None:
        """Measure vLLM's nccl backend, with a trainer on a GPU of its own."""
        with self.site.results.attempt("vllm_nccl"):
            described = await self._join(tp)
            for name, packed in (("vllm_nccl", True), ("vllm_nccl_unpacked", False)):
                info = {**described, "packed": packed}

                async def send(info: dict[str, Any] = info) -> None:
                    await self._nccl(info)

                await self._way(name, send, None)

    async def _join(self, tp: int) -> dict[str, Any]:
        port, world = free_port(), 1 + tp
        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
        }
        async with asyncio.timeout(_JOIN_S):
            joining = asyncio.ensure_future(self.trainer.do("join", port=port, world_size=world))
            await self.site.llm.init_weight_transfer_engine(_init_request(info))
            return await joining

    async def _way(
        self,
        name: str,
        update: Callable[[], Awaitable[None]],
        before: Callable[[], Awaitable[None]] | None,
    ) -> None:
        results, number = self.site.results, -1
        with results.attempt(name):
            for number in results.rounds(1 + self.rounds, name):
                await self.trainer.do("change")
                async with asyncio.timeout(_UPDATE_S):
                    figures = await self._round(name, update, before)
                if number:  # The first one warms up.
                    results.add(**figures)
                await self.site.calm()
            if number >= 0:
                await self._prove(name)

    async def _round(
        self,
        name: str,
        update: Callable[[], Awaitable[None]],
        before: Callable[[], Awaitable[None]] | None,
    ) -> dict[str, float]:
        llm = self.site.llm
        called = time.perf_counter()
        if before is not None:
            await before()
        begin = time.perf_counter()
        await llm.pause_generation(mode="keep", clear_cache=False)
        try:
            updating = time.perf_counter()
            await update()
            updated = time.perf_counter()
        finally:
            await llm.resume_generation()
        seen = await self.site.settled(begin)
        if name == "vllm_ipc":
            await self.trainer.do("forget_handles")
        figures = {
            f"{name}_s": updated - updating,
            f"pause_{name}_s": seen["paused_s"],
            f"max_gap_{name}_s": seen["gap_s"],
            f"update_end_to_end_{name}_s": seen["first_token"] - called,
        }
        return figures | ({f"write_{name}_s": begin - called} if before is not None else {})

    async def _write(self) -> None:
        await self.trainer.do("write", folder=str(self.files))

    async def _reload(self) -> None:
        await self.site.llm.collective_rpc(
            "reload_weights", kwargs={"weights_path": str(self.files)}
        )

    async def _torchforge(self) -> None:
        await self.site.ask("bench_load_files", str(self.files))

    async def _register(self) -> None:
        self._port = self._port or free_port()
        await self.trainer.do("engine_register", port=self._port)

    async def _checkpoint_engine(self) -> None:
        handles = (await self.trainer.do("engine_update"))["handles"]
        await self.site.ask("bench_checkpoint_engine", handles)
        await self.trainer.do("engine_wait")

    async def _make_handles(self) -> None:
        self._handles = await self.trainer.do("handles")

    async def _ipc(self) -> None:
        # A copy: vLLM takes the handles out.
        await self._session(dict(self._handles))

    async def _nccl(self, info: dict[str, Any]) -> None:
        await asyncio.gather(
            self._session(dict(info)), self.trainer.do("send", packed=info["packed"])
        )

    async def _session(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self.site.llm
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await llm.finish_weight_update()

    async def _prove(self, name: str) -> None:
        """Compare what the way left with a reload of the trainer's weights, and with others."""
        site = self.site
        await site.llm.pause_generation(mode="keep", clear_cache=False)
        try:
            await site.ask("bench_keep")
            await self._write()
            await self._reload()
            same = all(await site.ask("bench_same"))
            await self.trainer.do("change")
            await self._write()
            await self._reload()
            # Else the comparison could not fail.
            other = any(await site.ask("bench_same"))
            await site.ask("bench_drop")
        finally:
            await site.llm.resume_generation()
        site.results.facts[f"bitwise_equal_{name}"] = same and not other


def _init_request(info: dict[str, Any]) -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=info)
