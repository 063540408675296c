"""One engine of the apply benchmark: vLLM's AsyncLLM in this process, with our bridge beside it.

`python -m benchmarks.apply_engine JSON` prints one JSON line: {"samples": ..., "facts": ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_neighbour, write_variant
from benchmarks.engine import Load, bridge, set_environment, start_engine
from benchmarks.servers import weightsync_server
from weightsync_client import (
    ApplyReport,
    ApplyStrategy,
    Client,
    ClientError,
    EngineState,
    LiveCheck,
)

__all__ = ["Order", "bridged", "measure", "serving"]

_READY_S = 120.0
#: Generation after each round in which nothing else goes on.
_CALM_S = 1.0
#: Share of the values that a small change changes.
_CHANGED = 0.01


@dataclass(frozen=True)
class Order:
    """What to measure.

    Attributes:
        folder: For sockets and logs.
        base: Checkpoint that vLLM starts with and that reload_weights goes back to, on tmpfs.
        other: Where versions are written that differ from it in every value, on tmpfs.
        near: Where versions are written that differ from those in few values, on tmpfs.
        plain: Whether CPU repacking is off.
        rounds: How many reloads, and how many applies of ours, in turn.
        requests: Requests that run all the time.
        dtype: vLLM's --dtype.
    """

    folder: str
    base: str
    other: str
    near: str
    plain: bool
    rounds: int
    requests: int
    dtype: str = "bfloat16"


class _Measure:
    """Takes the samples of one engine."""

    def __init__(self, order: Order, llm: Any) -> None:
        self._order = order
        self._llm = llm
        self._load = Load(llm, order.requests)
        self.samples: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self.samples.setdefault(name, []).append(value)

    async def reload(self, directory: str) -> None:
        """Let vLLM reload its weights its own way, and note how long it stood still."""
        begin = time.perf_counter()
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        finally:
            await self._llm.resume_generation()
        self._add(reload_pause_s=time.perf_counter() - begin)
        await self._note_gaps("reload_max_token_gap_s", begin)

    async def apply(self, client: Client, mask: int) -> None:
        """Push a version in which every value is another and apply it; note what it took."""
        order = self._order
        base, other = Path(order.base), Path(order.other)
        await asyncio.to_thread(write_variant, base, other, mask)
        pushed = await asyncio.to_thread(client.push, other, delta="never")
        begin = time.perf_counter()
        report = await asyncio.to_thread(client.apply, pushed.version, cache="keep")
        self._note(report, ApplyStrategy.COPY, "", time.perf_counter() - begin)
        await self._note_gaps("max_token_gap_s", begin)

    async def patch(self, client: Client, seed: int) -> str:
        """Do the same with a version in which few are, and go back; return what was live between.

        Ends when the live parameters were compared as a whole, as nothing may write them before.
        """
        order = self._order
        other, near = Path(order.other), Path(order.near)
        share = await asyncio.to_thread(write_neighbour, other, near, _CHANGED, seed)
        self._add(delta_changed=share)
        pushed = await asyncio.to_thread(client.push, near)
        begin = time.perf_counter()
        report = await asyncio.to_thread(client.apply, pushed.version, cache="keep")
        self._note(report, ApplyStrategy.PATCH, "delta_", time.perf_counter() - begin)
        await _checked(client)
        self._add(delta_check_s=time.perf_counter() - begin)
        digest = await self._live_digest()
        begin = time.perf_counter()
        back = await asyncio.to_thread(client.rollback, cache="keep")
        self._note(back.report, ApplyStrategy.PATCH, "rollback_", time.perf_counter() - begin)
        await _checked(client)
        return digest

    def _note(
        self, report: ApplyReport, strategy: ApplyStrategy, prefix: str, seconds: float
    ) -> None:
        assert report.strategy is strategy, f"written by {report.strategy}, not {strategy}"
        phases = report.phases
        values = {
            "apply_s": seconds,
            "pause_s": phases.paused_total_s,
            "stop_s": phases.pause_s,
            "still_s": phases.paused_total_s - phases.pause_s,
            "resume_s": phases.resume_s,
            "prepare_s": phases.prepare_s,
            "commit_s": phases.commit_s,
            "verify_s": phases.verify_s,
        }
        self._add(**{f"{prefix}{name}": value for name, value in values.items()})

    async def _note_gaps(self, name: str, begin: float) -> None:
        end = time.perf_counter()
        await self._load.spoken(end)
        self._add(**{name: max(self._load.gaps(begin, end))})
        calm = time.perf_counter()
        await asyncio.sleep(_CALM_S)
        # On a loaded machine a step may take longer than that.
        if gaps := self._load.gaps(calm, time.perf_counter()):
            self._add(token_gap_p50_s=statistics.median(gaps))

    async def _live_digest(self) -> str:
        (digest,) = await self._llm.collective_rpc("bench_live_digest")
        return str(digest)

    async def plain(self, client: Client) -> None:
        """Alternate between applies and reloads, then compare what both write."""
        order = self._order
        async with self._load.running():
            for number in range(order.rounds):
                await self.apply(client, mask=1 + number % 15)
                copied = await self._live_digest()
                patched = await self.patch(client, number)
                back = await self._live_digest()
                await self.reload(order.base)
            reloaded = [await self._reloaded(path) for path in (order.other, order.near)]
        # The contents differ, so a digest that never changes would not pass.
        self.facts["bitwise_equal"] = [copied, patched] == reloaded and back == copied != patched
        self._add_ratios("reload_over_ours", "reload_pause_s", "pause_s")
        self._add_ratios("delta_over_full_pause", "delta_pause_s", "pause_s")
        self._add_ratios("delta_over_full_still", "delta_still_s", "still_s")

    async def _reloaded(self, directory: str) -> str:
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        digest = await self._live_digest()
        await self._llm.resume_generation()
        return digest

    def _add_ratios(self, name: str, above: str, below: str) -> None:
        """Add the ratio within each round: what disturbs a round disturbs both."""
        pairs = zip(self.samples[above], self.samples[below], strict=True)
        self.samples[name] = [one / other for one, other in pairs]

    async def repacked(self) -> None:
        """Reload only: what ours does about such an engine is asked afterwards."""
        order = self._order
        (self.facts["engine_repacks"],) = await self._llm.collective_rpc("bench_repacked")
        async with self._load.running():
            for number in range(order.rounds):
                await self.reload(order.base if (order.rounds - number) % 2 else order.other)

    async def try_apply(self, client: Client) -> None:
        """Push and apply to an engine whose weights are repacked; note a refusal."""
        try:
            # Adoption of the checkpoint comes first; it ends in serving, or in a fence.
            with contextlib.suppress(RuntimeError):
                await serving(client)
            other = Path(self._order.other)
            pushed = await asyncio.to_thread(client.push, other, delta="never")
            report = await asyncio.to_thread(client.apply, pushed.version, cache="keep")
        except ClientError as error:
            ours = ("pause_s", "reload_over_ours", "delta_pause_s", "delta_over_full_pause")
            self.facts |= dict.fromkeys(ours) | {"refusal": str(error)}
        else:
            self._add(pause_s=report.phases.paused_total_s)


async def measure(order: Order) -> dict[str, Any]:
    """Start vLLM, measure and stop it."""
    llm = start_engine(order.base, order.dtype, order.requests, "benchmarks.live.LiveParameters")
    try:
        measured = _Measure(order, llm)
        if not order.plain:
            await measured.repacked()
        async with bridged(Path(order.folder), llm) as client:
            if order.plain:
                await serving(client)
                await measured.plain(client)
            else:
                await measured.try_apply(client)
        return {"samples": measured.samples, "facts": measured.facts}
    finally:
        llm.shutdown()


@contextlib.asynccontextmanager
async def bridged(folder: Path, llm: Any) -> AsyncIterator[Client]:
    """Serve the bridge from this process, as vLLM's API server does, with a server beside it."""
    address = f"unix:{folder}/push.sock"
    async with bridge(llm):
        server = weightsync_server(folder, [address], engine=str(folder / "engine.sock"))
        # Starting and stopping wait, and the bridge lives on this loop.
        await asyncio.to_thread(server.__enter__)
        try:
            with Client(address) as client:
                yield client
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)


async def _checked(client: Client) -> None:
    """Return when the live parameters were compared as a whole, and hold the version."""
    deadline = time.monotonic() + _READY_S
    while True:
        check = (await asyncio.to_thread(client.get_version)).live_check
        if check is LiveCheck.PASSED:
            return
        if check is LiveCheck.FAILED or time.monotonic() > deadline:
            msg = f"the live parameters were compared with the outcome {check}"
            raise RuntimeError(msg)
        await asyncio.sleep(0.05)


async def serving(client: Client) -> None:
    """Return once the engine serves.

    Raises:
        RuntimeError: It is fenced, or not ready in time.
    """
    deadline = time.monotonic() + _READY_S
    while True:
        engine = (await asyncio.to_thread(client.status)).models[0].engine
        if engine.state == EngineState.SERVING:
            return
        if engine.state == EngineState.FENCED:
            msg = f"the engine is fenced: {engine.reason}"
            raise RuntimeError(msg)
        if time.monotonic() > deadline:
            msg = f"the engine does not serve: {engine.state}, {engine.reason}"
            raise RuntimeError(msg)
        await asyncio.sleep(0.2)


def main() -> None:
    """Set the environment that vLLM's processes inherit, measure and print."""
    order = Order(**json.loads(sys.argv[1]))
    set_environment(order.folder, plain=order.plain)
    print(json.dumps(asyncio.run(measure(order))), flush=True)


def order_json(order: Order) -> str:
    """Return an order as the argument of this program."""
    return json.dumps(asdict(order))


if __name__ == "__main__":
    main()
