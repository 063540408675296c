"""An engine that holds its parameters in a dictionary and talks to a real server.

It maps segments, matches names, dtypes and shapes, copies, or only the tensors that differ from the
live version where those are few, digests what it holds and keeps the pause states of a real engine,
so that a user's trainer or controller can be tested in milliseconds. It generates no tokens, and
scores those of others by `memory_logprobs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import struct
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsync.engine import (
    ATTACH,
    BETWEEN_STEPS,
    CACHE_LINEAGE,
    FENCES_ON_EXPIRY,
    LAYOUT_CHECK,
    LIMITS_SERVING,
    PAUSED_SCORES,
    SCORES,
    EngineHealth,
    EngineInfo,
    EngineState,
    Lease,
    OnExpiry,
    PauseSpec,
    SwitchOrder,
    SwitchOutcome,
)
from weightsync.engine.leases import PauseLease, ServeLimit
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import build_header
from weightsync.shm.segment_socket import SegmentClient
from weightsync.testing.memory_rank import MemoryRank

#: Ranks as vLLM's of one tensor-parallel group.
_NAME = "0/0/{}"


class MemoryEngine(MemoryRank):
    """Implements `weightsync.engine.Engine` in this process; it is its own first rank.

    Args:
        tensors: The checkpoint: name to (safetensors dtype, shape in elements, bytes).
        segment_socket: The server's segment socket.
        ranks: How many ranks; each holds the whole model.
        checks_layouts: Whether a push of other tensors is refused when its layout arrives, as with
            vLLM, and not only when it is applied.
        attachable: Whether trainers on this host may attach to the parameters.
        checkpoint: What they are to report as loaded: a name or a path.

    Attributes:
        ranks: All of them, in order. Tests damage one, or override its `write`.
        version: The version that the last resume named; 0: none.
        events: What was done, in order: pause, commit, score, resume, switch, fence; expire: the
            lease of a pause ran out, and it did what that pause said; overdue: it was fenced as its
            time to serve was over.
        on_score: What tests do to a score: awaited with the log probabilities and returns them; it
            may take its time, raise, or return others.
        updates: None: it receives nothing by itself.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
        segment_socket: str | Path,
        ranks: int = 1,
        *,
        checks_layouts: bool = False,
        attachable: bool = False,
        checkpoint: str = "memory",
    ) -> None:
        self._abilities = {
            *("weight_version", BETWEEN_STEPS, CACHE_LINEAGE, FENCES_ON_EXPIRY, LIMITS_SERVING),
            *(SCORES, PAUSED_SCORES),
        }
        if checks_layouts:
            self._abilities.add(LAYOUT_CHECK)
        if attachable:
            self._abilities.add(ATTACH)
        facts = tensors, segment_socket, self._serving
        super().__init__(_NAME.format(0), *facts, attachable=attachable, checkpoint=checkpoint)
        others = (
            MemoryRank(_NAME.format(rank), *facts, attachable=attachable, checkpoint=checkpoint)
            for rank in range(1, ranks)
        )
        self.ranks: tuple[MemoryRank, ...] = (self, *others)
        self._lease = PauseLease(self._on_expiry)
        self._limit = ServeLimit(self._out_of_time)
        self._condition, self._reason = EngineState.UNRECONCILED, "no server yet"
        self._engine_id = secrets.token_hex(8)
        self._switching: asyncio.Future[SwitchOutcome] | None = None
        self._ending: asyncio.Future[None] | None = None
        #: The version of each content that was served or committed as one.
        self._versions: dict[str, int] = {}
        self.version = 0
        self.events: list[str] = []
        self.on_score: Callable[[list[list[float]]], Awaitable[list[list[float]]]] = _unchanged
        self.updates = None

    async def hello(self) -> EngineInfo:
        """Tell what the engine is."""
        return EngineInfo(
            engine_id=self._engine_id,
            vllm_version="none",
            ranks=tuple(rank.name for rank in self.ranks),
            capabilities=frozenset(self._abilities),
            refusals=(),
            state=self._condition,
            reason=self._reason,
            model="memory",
            kind="memory",
            served_model_name="memory",
            open_apply=self._lease.open_apply,
        )

    async def pause(self, spec: PauseSpec, lease_s: float) -> Lease:
        """Stand still; the pause ends by itself as that of a real engine."""
        await self._between_switches()
        if self._lease.id:
            raise WeightSyncError(Reason.APPLY_BUSY, "another apply has paused this engine")
        self.events.append("pause")
        if self._condition is EngineState.SERVING:
            self._condition = EngineState.PAUSED
        return Lease(self._lease.take(lease_s, spec), spec.mode)

    async def renew(self, lease_id: str, lease_s: float) -> None:
        """Prolong a lease."""
        self._lease.renew(lease_id, lease_s)

    async def resume(self, lease_id: str, version: int, content_digest: str) -> bool:
        """Serve a version that the parameters were proved to hold, or what they began with."""
        if lease_id or self._lease.id:
            self._lease.check(lease_id)
        proved = self._served()
        if not (content_digest == proved if content_digest else self._begins()):
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, f"the engine holds {proved or 'nothing proved'}"
            )
        self.events.append("resume")
        self._versions[content_digest] = version
        self._serve(version)
        return True

    async def switch(self, order: SwitchOrder) -> SwitchOutcome:
        """Write a version on every rank and prove it, or put the base back, or be fenced.

        It goes on to its end when its caller stops waiting; calls of the ranks wait for that.
        """
        await self._between_switches()
        self.events.append("switch")
        if not self._serving() or self._served() != order.base_digest:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, f"the engine does not serve {order.base_digest}"
            )
        self._switching = asyncio.ensure_future(self._switch(order))
        return await asyncio.shield(self._switching)

    async def _switch(self, order: SwitchOrder) -> SwitchOutcome:
        replies = await self._place_everywhere(order.apply_id, order)
        if not all(reply["ok"] for reply in replies):
            back = await self._place_everywhere(order.base_id, order)
            replies = [
                old | {"ok": False, "error": _joined(reply["error"], old["error"])}
                for reply, old in zip(replies, back, strict=True)
            ]
        served = self._served()
        if served == order.content_digest:
            self.version = order.version
        if not served:
            await self.fence("the content of the parameters after a switch is not known")
        return SwitchOutcome(replies, served, label_set=True)

    async def score(
        self, sequences: Sequence[Sequence[int]], lease_id: str, limit_s: float
    ) -> list[list[float]]:
        """Return what `memory_logprobs` makes of each sequence and the parameters of its rank."""
        if lease_id:
            self._lease.check(lease_id)
        elif not self._serving():
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, "the engine does not generate; score with the lease"
            )
        self.events.append("score")
        tensors = dict(self.live)
        found = [memory_logprobs(tensors, tokens) for tokens in sequences]
        try:
            async with asyncio.timeout(limit_s):
                return await self.on_score(found)
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED, f"the probes were not scored within {limit_s:g} s"
            ) from None

    async def fence(self, reason: str) -> None:
        """Stand still for a reason."""
        self.events.append("fence")
        self._stand_fenced(reason)

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Do what a worker method does, on every rank at once."""
        await self._between_switches()
        return await asyncio.gather(*(rank.call(method, args) for rank in self.ranks))

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> list[str]:
        """Offer the present parameters as one safetensors file."""
        del segment_socket
        header, _ = build_header((name, *kind) for name, kind in self._kinds.items())
        with tempfile.TemporaryFile() as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.writelines(self.live.values())
            file.flush()
            offered = ("model.safetensors", os.fstat(file.fileno()).st_size, file.fileno())
            with SegmentClient(self._socket) as client:
                await asyncio.to_thread(client.offer, offer_id, [offered])
        return ["model.safetensors"]

    async def health(self, newest: int | None = None) -> EngineHealth:
        """Tell how the engine is."""
        # It has no requests, which alone ask for it.
        del newest
        self._limit.check()
        return EngineHealth(
            self._condition, self._reason, self._engine_id, open_apply=self._lease.open_apply
        )

    async def serve_for(self, seconds: float | None) -> None:
        """Serve for so long; then, unless called again, be fenced. None: without a limit."""
        self._limit.move(seconds)

    async def close(self) -> None:
        """Nothing to let go of."""

    def restart(self, tensors: Mapping[str, bytes]) -> None:
        """Become a fresh engine with these parameters, as after a crash of vLLM."""
        for rank in self.ranks:
            rank.become(tensors)
        self._lease.settle()
        self._limit.drop()
        self._condition, self._reason = EngineState.UNRECONCILED, "restarted"
        self._engine_id = secrets.token_hex(8)

    async def _between_switches(self) -> None:
        """Wait for a switch whose caller has gone away."""
        if self._switching is not None and not self._switching.done():
            await asyncio.wait([self._switching])

    def _serving(self) -> bool:
        return self._condition is EngineState.SERVING

    async def _place_everywhere(self, prepared_id: str, order: SwitchOrder) -> list[dict[str, Any]]:
        placed = (rank.place(prepared_id, order.apply_id) for rank in self.ranks)
        return await asyncio.gather(*placed)

    def _on_expiry(self, lease_id: str) -> None:
        self._ending = asyncio.ensure_future(self._expire(lease_id))

    async def _expire(self, lease_id: str) -> None:
        """Do what the pause said; a resume waits for what is being written, a fence does not."""
        async with contextlib.AsyncExitStack() as turns:
            if self._lease.on_expiry is OnExpiry.RESUME:
                for rank in self.ranks:
                    await asyncio.to_thread(rank.turn.acquire)
                    turns.callback(rank.turn.release)
            if self._lease.id == lease_id:
                self.events.append("expire")
                self._end()

    def _end(self) -> None:
        proved = self._served()
        if self._condition is not EngineState.PAUSED:
            self._lease.drop()
        elif self._lease.on_expiry is OnExpiry.FENCE:
            self._stand_fenced(self._lease.undecided())
        elif proved or self._begins():
            self._serve(self._versions.get(proved, self.version))
        else:
            self._stand_fenced("the lease ran out and the ranks do not hold one proved version")

    def _serve(self, version: int) -> None:
        self._lease.settle()
        self.version = version
        self._condition, self._reason = EngineState.SERVING, ""
        if self._limit.over:
            self._out_of_time()

    def _out_of_time(self) -> None:
        """Be fenced; what waits for a decision is left to its lease."""
        paused = self._condition is EngineState.PAUSED
        if self._serving() or (paused and self._lease.on_expiry is OnExpiry.RESUME):
            self.events.append("overdue")
            self._stand_fenced(self._limit.reason)

    def _stand_fenced(self, reason: str) -> None:
        self._lease.drop()
        self._condition, self._reason = EngineState.FENCED, reason

    def _commit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.events.append("commit")
        if version := int(args.get("version", 0)):
            # Should the server not live to resume, its number is known.
            self._versions[self._known(args).content_digest] = version
        return super()._commit(args)

    def _begins(self) -> bool:
        """Whether it has served nothing but what it began with, and still holds that."""
        paused = self._condition is EngineState.PAUSED and not self.version
        begins = paused or self._condition is EngineState.UNRECONCILED
        return begins and not any(rank.touched for rank in self.ranks)

    def _served(self) -> str:
        """Return what every rank is proved to hold; empty: no one version."""
        contents = {rank.content_digest for rank in self.ranks}
        return contents.pop() if len(contents) == 1 else ""


def memory_logprobs(tensors: Mapping[str, bytes], tokens: Sequence[int]) -> list[float]:
    """Return the log probability of every token but the first, from -5 to below 0.

    They depend on the bytes of all tensors, on the token and on the one before it, and on nothing
    else, so that a test computes what a trainer of the same bytes does.
    """
    content = 0
    for name in sorted(tensors):
        content = zlib.crc32(tensors[name], zlib.crc32(name.encode(), content))
    pairs = itertools.pairwise(tokens)
    return [_logprob(struct.pack("<QQ", before, token), content) for before, token in pairs]


def _logprob(pair: bytes, content: int) -> float:
    # In 32 bits, as it travels.
    value = -5.0 + 4.9999 * zlib.crc32(pair, content) / (1 << 32)
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


async def _unchanged(scores: list[list[float]]) -> list[list[float]]:
    return scores


def _joined(*errors: str) -> str:
    """Return why a rank went back: what it met itself, or that another one did."""
    return "; ".join(filter(None, errors)) or "another rank failed"
