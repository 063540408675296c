"""Which keys the requests of one engine may read, as the bridge moves them with the weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from weightsync.engine import CacheUse, SwitchOrder
from weightsync.vllm.bridge.live_versions import KeptKeys
from weightsync.vllm.bridge.llm_calls import EngineCores, WorkerRpc
from weightsync.vllm.lineage.admission import AdmissionKeys
from weightsync.vllm.lineage.cache_key import KeyNames, Lineage
from weightsync.vllm.lineage.core_hooks import BEGIN, MOVE, SWITCH

logger = logging.getLogger(__name__)


class EngineKeys:
    """Moves an engine from the keys of one content to those of another.

    A request then reads keys that its present version computed, or itself, and no others; with
    SHARE it reads all that are there. Where `kind` is NONE, vLLM keeps or clears them.

    Args:
        llm: vLLM's AsyncLLM.
        cores: Its engine cores.
        wanted: What the settings ask for.

    Attributes:
        kind: What is done; `begin` finds out.
        key: The present name.
        cut: Requests that a switch found with keys, and that keep them for themselves.
        moved: Requests that waited over a switch, as of the last one.
        move_s: Seconds that engine cores took for the last move.
    """

    def __init__(self, llm: Any, cores: EngineCores, wanted: Lineage) -> None:
        self.kind = Lineage.NONE
        self.cut = self.moved = 0
        self.move_s = 0.0
        self._llm = llm
        self._cores = cores
        self._wanted = wanted
        self._names = KeyNames()
        self._admission: AdmissionKeys | None = None
        self.key = self._names.name("")

    async def begin(self) -> None:
        """Keep keys apart from now on, in the best way that this vLLM has."""
        if self._wanted is Lineage.CORE:
            why = await self._begin_in_core()
            if not why:
                self.kind = Lineage.CORE
                return
            logger.warning(
                "weightsync: use vLLM 0.26 to 0.33: %s, so keys are kept apart by version only "
                "when a request arrives, and none is found again after a rollback",
                why,
            )
        if self._wanted is not Lineage.NONE and hasattr(self._llm.output_processor, "add_request"):
            self._admission = AdmissionKeys(self._llm, self.key)
            self.kind = Lineage.ADMISSION

    async def _begin_in_core(self) -> str:
        try:
            answers = await self._cores.ask(BEGIN, self.key)
        except Exception as error:  # noqa: BLE001 - it becomes a sentence
            return f"vLLM's EngineCore does not know {BEGIN} ({str(error)[:200]})"
        if len(answers) != self._cores.count:
            return f"{len(answers)} of {self._cores.count} engine cores answer"
        return str(next(filter(None, answers), ""))

    def clears(self, use: CacheUse) -> bool:
        """Whether vLLM has to clear its caches for a pause."""
        return use is CacheUse.RECOMPUTE and self.kind is not Lineage.CORE

    def kept(self, use: CacheUse, *, cleared: bool) -> KeptKeys:
        """Return who finds keys of before after a move; `cleared`: vLLM has none any more."""
        if use is CacheUse.SHARE and not cleared:
            return KeptKeys.ALL
        if cleared or (self.kind is Lineage.CORE and use is CacheUse.RECOMPUTE):
            return KeptKeys.NONE
        return KeptKeys.ALL if self.kind is Lineage.NONE else KeptKeys.IN_FLIGHT

    async def move(self, digest: str, use: CacheUse) -> None:
        """Let requests read keys of this content, before the next step; "": what vLLM loaded."""
        key = self._next(digest, use)
        if self._admission is not None and key != self.key:
            self._admission.move(key)
        if self.kind is Lineage.CORE:
            with self._given_up_on_failure(key):
                self._count(await self._moved(key, recompute=use is CacheUse.RECOMPUTE))
        self.key = key

    async def _moved(self, key: str, *, recompute: bool) -> list[Any]:
        if self._cores.count == 1:
            # Sent before this waits for anything, so that it precedes what is sent next.
            return [await self._cores.ask_one(MOVE, key, recompute)]
        return await self._cores.ask(MOVE, key, recompute)

    @contextlib.contextmanager
    def _given_up_on_failure(self, key: str) -> Iterator[None]:
        """Use neither name again where it is not known what lies under them."""
        try:
            yield
        except BaseException:
            self._names.give_up(self.key)
            self._names.give_up(key)
            raise

    def switching(self, order: SwitchOrder, rpc: WorkerRpc) -> WorkerRpc:
        """Return what calls the workers for a switch between two steps, with vLLM's own call.

        Where all ranks did it, the keys have moved before the next step.
        """
        admission = self._admission

        async def admit(method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
            if admission is not None:
                # Whether it succeeds or not: what runs meanwhile leaves its keys under either name.
                self.key = self._next(order.content_digest, order.cache)
                admission.move(self.key)
            return await rpc(method, args)

        async def switch(method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
            key = self._next(order.content_digest, order.cache)
            recompute = order.cache is CacheUse.RECOMPUTE
            digests = [order.base_digest, order.content_digest]
            with self._given_up_on_failure(key):
                answers = await self._cores.ask_one(
                    SWITCH, method, dict(args), digests, key, recompute
                )
            self._count(answers[-1:])
            self.key = str(answers[-1]["key"])
            return list(answers[:-1])

        return switch if self.kind is Lineage.CORE else admit

    def _next(self, digest: str, use: CacheUse) -> str:
        if use is not CacheUse.SHARE:
            return self._names.name(digest)
        self._names.give_up(self.key)
        return self.key

    def _count(self, answers: list[Any]) -> None:
        self.cut += int(sum(answer.get("cut", 0) for answer in answers))
        self.moved += int(sum(answer.get("moved", 0) for answer in answers))
        self.move_s = max(answer.get("seconds", 0.0) for answer in answers)
        if any(answer.get("cleared") for answer in answers):
            logger.error("weightsync: vLLM could not keep its cache over a switch and cleared it")
