"""What we call on vLLM's AsyncLLM and its engine cores, by capability (vLLM 0.26 to 0.33)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from weightsync.engine import (
    ATTACH,
    BETWEEN_STEPS,
    FENCES_ON_EXPIRY,
    LAYOUT_CHECK,
    LIMITS_SERVING,
    READ_AHEAD,
    VERSION_LOADS,
    WEIGHT_UPDATES,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.resume_guard import ours
from weightsync.vllm.worker_protocol import RECEIVING_BACKENDS

#: Calls a method of the workers and returns one reply per rank.
WorkerRpc = Callable[[str, Mapping[str, Any]], Awaitable[list[dict[str, Any]]]]


class EngineCores:
    """The cores of AsyncLLM's `engine_core`: one per data parallel rank, in order."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._engines = tuple(getattr(client, "core_engines", ()))
        self.count = len(self._engines) or 1

    @property
    def answer_each(self) -> bool:
        """Whether every one can be asked for its own answer."""
        names = ("call_utility_all_async", "_call_utility_async")
        return any(hasattr(self._client, name) for name in names)

    async def ask_one(self, utility: str, *args: Any) -> Any:
        """Call a utility where there is one engine core, and return its answer.

        The call is sent before this waits for anything.
        """
        return await self._client.call_utility_async(utility, *args)

    async def ask(self, utility: str, *args: Any) -> list[Any]:
        """Call a utility of all engine cores at once; return one answer per core, in order.

        After a failure the other cores are not waited for, and may still do it.
        """
        # Older releases gather in the same way, and keep the first answer.
        if hasattr(self._client, "call_utility_all_async"):
            return list(await self._client.call_utility_all_async(utility, *args))
        one = self._client._call_utility_async  # noqa: SLF001 - the only way in older releases
        return await asyncio.gather(*(one(utility, *args, engine=core) for core in self._engines))


T = TypeVar("T")


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


async def guarded(call: Awaitable[T]) -> T:
    """Return what a call of vLLM returns; whatever it raises becomes ENGINE_AWAY."""
    try:
        return await call
    except Exception as error:
        msg = f"vLLM refused the call ({error_text(error)}); check its log"
        raise WeightSyncError(Reason.ENGINE_AWAY, msg) from error


def node_count(config: Any) -> int:
    """Return how many nodes the workers of an engine core are on."""
    return int(getattr(config.parallel_config, "nnodes", 1))


def _steps_as_one(config: Any, cores: EngineCores) -> bool:
    stages = int(config.parallel_config.pipeline_parallel_size)
    return cores.count == stages == node_count(config) == 1


class VllmCalls:
    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._core = llm.engine_core
        self.cores = EngineCores(llm.engine_core)

    @property
    def config(self) -> Any:
        return self.llm.vllm_config

    @property
    def capabilities(self) -> frozenset[str]:
        found = {"cache_keep", FENCES_ON_EXPIRY, LAYOUT_CHECK, LIMITS_SERVING}
        if node_count(self.config) == 1:
            # What comes in, what loaders read, and what is handed out, is on this host alone.
            found |= {ATTACH, READ_AHEAD, VERSION_LOADS}
        if _steps_as_one(self.config, self.cores):
            # Tensor parallel ranks vote, and no step runs meanwhile; who else steps has no vote.
            found.add(BETWEEN_STEPS)
        if hasattr(self.llm, "update_weight_version"):
            found.add("weight_version")
        if self.transfer_backend in RECEIVING_BACKENDS:
            found.add(WEIGHT_UPDATES)
        return frozenset(found)

    @property
    def transfer_backend(self) -> str:
        """The backend of vLLM's weight transfer; "": it has none."""
        transfer = getattr(self.config, "weight_transfer_config", None)
        return str(getattr(transfer, "backend", ""))

    @property
    def dead(self) -> bool:
        return bool(self.llm.errored)

    @property
    def requests(self) -> int:
        return len(self.llm.output_processor.request_states)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Return when no core runs a step or will start one, except to drain in mode `wait`.

        Asks the cores themselves: AsyncLLM.pause_generation sleeps 20 ms after it.
        """
        if clear_cache:
            await self._clear_mm_cache()
        core = self._core
        ask = getattr(core, "pause_scheduler_async", None) or core.pause_generation_async
        await ask(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Let steps run again on every core; without effect when they do."""
        with ours():
            await self.llm.resume_generation()

    async def set_version(self, label: str) -> bool:
        """Set the weight version of outputs, where vLLM has one, before the next step."""
        if not hasattr(self.llm, "update_weight_version"):
            return False
        await self.llm.update_weight_version(label)
        return True

    async def rpc(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Never with a timeout: vLLM would leave the late replies in its queues."""
        replies: list[dict[str, Any]]
        if self.cores.count == 1:
            replies = await self.llm.collective_rpc(method, args=(dict(args),))
        else:
            answers = await self.cores.ask("collective_rpc", method, None, (dict(args),), None)
            replies = [reply for answer in answers for reply in answer]
        return replies

    async def _clear_mm_cache(self) -> None:
        # The processor that feeds the engine keeps a multimodal cache of its own. It has moved:
        # 0.26 and newer have it in the renderer, some in the input processor.
        for owner in ("renderer", "input_processor", "processor"):
            part = getattr(self.llm, owner, None)
            if clear := getattr(part, "clear_mm_cache_async", None):
                await clear()
                return
            if clear := getattr(part, "clear_mm_cache", None):
                clear()
                return
