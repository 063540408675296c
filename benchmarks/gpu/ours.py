"""Our way: push to a real weightsync-server, apply it to vLLM through the bridge, prove it.

With cache: keep, and suffix _exact with the default, which computes caches again:

commit_s, verify_s        of the slowest rank, a version of which every value differs
pause_total_s             from the request to pause until the engine runs, as the server tells it
pause_seen_s              the same as vLLM's process sees it; max_gap_s the longest token gap while
                          the version is prepared and applied
prepare_s, apply_s        before the pause; the whole call
update_end_to_end_s       the trainer's call, push included, to the first token of the new weights

With suffix _delta_1pct: a version of which 1 % of the values differ from the live one. strategy_...
tells how it was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine import bridge
from benchmarks.gpu.engine import Site
from benchmarks.gpu.link import TrainerLink
from benchmarks.servers import weightsync_server
from weightsync_client import ApplyReport, Client, EngineState

__all__ = ["Ours", "serving"]

_READY_S = 150.0
_SHARE = 0.01
_FLAGS = ("--pause-lease-s", "60", "--commit-timeout-s", "120")


@contextlib.asynccontextmanager
async def serving(site: Site, folder: Path, fetchers: int) -> AsyncIterator[Client]:
    """Run a server beside the engine until the block ends, and wait until it serves.

    Args:
        site: The engine; its bridge is served here.
        folder: For sockets, state and log.
        fetchers: Processes of the server.
    """
    address = f"unix:{folder}/push.sock"
    flags = (*_FLAGS, "--fetchers", str(fetchers))
    async with bridge(site.llm):
        server = weightsync_server(folder, [address], *flags, engine=str(folder / "engine.sock"))
        begin = time.perf_counter()
        # Starting and stopping wait, and the bridge lives on this loop.
        await asyncio.to_thread(server.__enter__)
        try:
            with Client(address) as client:
                site.results.say("the server adopts the checkpoint")
                await _until_serving(client)
                site.results.facts["adopt_s"] = round(time.perf_counter() - begin, 2)
                yield client
        except BaseException:
            log = (folder / "server.log").read_text(errors="replace")[-3000:]
            site.results.say(f"weightsync-server's log ends:\n{log}")
            raise
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)


async def _until_serving(client: Client) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        engine = (await asyncio.to_thread(client.status)).models[0].engine
        if engine.state == EngineState.SERVING:
            return
        if engine.state == EngineState.FENCED or time.monotonic() > deadline:
            msg = f"the engine does not serve: {engine.state}, {engine.reason}"
            raise RuntimeError(msg)
        await asyncio.sleep(0.2)


@dataclass
class Ours:
    """Measures our applies in one engine.

    Args:
        site: The engine, with requests running.
        trainer: Holds the weights.
        client: Of the server.
        address: Of the server, for the trainer.
        files: A checkpoint that the trainer writes and that vLLM did not start from.
        rounds: How many of each.
        cache: `keep` or `recompute`.
    """

    site: Site
    trainer: TrainerLink
    client: Client
    address: str
    files: Path
    rounds: int
    cache: str = "keep"

    async def full(self) -> None:
        """Apply versions of which every value differs."""
        await self._rounds("" if self.cache == "keep" else "_exact", None)

    async def delta(self) -> None:
        """Apply versions of which 1 % of the values differ from the live one."""
        await self._rounds("_delta_1pct", _SHARE)

    async def _rounds(self, suffix: str, share: float | None) -> None:
        results = self.site.results
        with results.attempt(f"our apply{suffix}"):
            for number in results.rounds(1 + self.rounds, f"our apply{suffix}", 45.0):
                if share is None:
                    await self.trainer.do("change")
                else:
                    changed = await self.trainer.do("change_some", share=share)
                    results.facts["changed_elements"] = changed["changed"]
                figures = await self._round(suffix)
                if number:  # The first one makes segments and warms up.
                    results.add(**figures)
                await self.site.calm()
            (results.facts[f"device_bytes_used{suffix}"], *_) = await self.site.ask("bench_memory")

    async def _round(self, suffix: str) -> dict[str, float]:
        called = time.perf_counter()
        pushed = await self.trainer.do("push", address=self.address)
        begin = time.perf_counter()
        report: ApplyReport = await asyncio.to_thread(
            self.client.apply, pushed["version"], cache=self.cache
        )
        applied = time.perf_counter()
        seen = await self.site.settled(begin)
        facts = self.site.results.facts
        facts[f"strategy{suffix}"] = str(report.strategy)
        facts[f"push_kind{suffix}"] = pushed["kind"]
        facts[f"written_bytes{suffix}"] = report.written_bytes
        facts[f"h2d_bytes_per_rank{suffix}"] = max(r.written_bytes for r in report.ranks)
        figures = {
            "commit": max(rank.commit_s for rank in report.ranks),
            "verify": max(rank.verify_s for rank in report.ranks),
            "pause_total": report.phases.paused_total_s,
            "pause_seen": seen["paused_s"],
            "prepare": report.phases.prepare_s,
            "stop": report.phases.pause_s,
            "resume": report.phases.resume_s,
            "apply": applied - begin,
            "push": pushed["seconds"],
            "update_end_to_end": seen["first_token"] - called,
            "max_gap": seen["gap_s"],
        }
        return {_key(name, suffix): value for name, value in figures.items()}

    async def prove(self) -> None:
        """Ask every rank for a proof, then compare with a reload of the trainer's weights."""
        results, site = self.site.results, self.site
        with results.attempt("bitwise equality"):
            begin = time.perf_counter()
            verified = (await asyncio.to_thread(self.client.verify)).verified
            results.facts["verify_version_s"] = round(time.perf_counter() - begin, 3)
            results.facts["verified_by_verify_version"] = verified
            await site.calls.pause("keep", clear_cache=False)
            try:
                await site.ask("bench_keep")
                same, other = await self._reloaded(), True
                await self.trainer.do("change")
                # Else the comparison could not fail.
                other = await self._reloaded()
                await site.ask("bench_drop")
            finally:
                await site.calls.resume()
            results.facts["bitwise_equal"] = verified and same and not other

    async def _reloaded(self) -> bool:
        """Let vLLM reload the trainer's weights; tells whether the kept copy is the same."""
        await self.trainer.do("write", folder=str(self.files))
        await self.site.llm.collective_rpc(
            "reload_weights", kwargs={"weights_path": str(self.files)}
        )
        return all(await self.site.ask("bench_same"))


def _key(name: str, suffix: str) -> str:
    # As the tables have them: commit_delta_1pct_s, but commit_s_exact.
    return f"{name}_s{suffix}" if suffix == "_exact" else f"{name}{suffix}_s"
