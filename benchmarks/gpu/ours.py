"""Our way: push to a real weightsync-server, apply it to vLLM through the bridge, prove it.

With cache: keep, and suffix _exact with the default, which computes caches again:

commit_s, verify_s        of the slowest rank, a version of which every value differs
pause_total_s             from the request to pause until the engine runs, as the server tells it
pause_seen_s              the same as vLLM's process sees it; max_gap_s the longest token gap while
                          the version is prepared and applied
prepare_s, apply_s        before the pause, of a version that lies in host memory; the whole call
prepare_pushed_s          the same of one that was just pushed: the ranks staged it as it came
update_end_to_end_s       the trainer's call, push included, to the first token of the new weights

commit_prestaged_s        commit_s where the version lay in device memory before the pause
staging_slowdown          median token gap while a version that lies in host memory is staged, from
                          the call of the apply to the pause, over that without anything;
staging_max_gap_s         the longest one then
push_slowdown, push_max_gap_s
                          the same from the call of a push to the pause of its apply: the trainer is
                          on the same GPU, and the ranks stage what has come
h2d_bytes_per_rank        sent to the device, before the pause and in it, by the rank that sent most

live_check_s              from then until all that is live was compared, beside generation

Three versions are pushed and applied, then the last and the one before it are applied in turns.

With suffix _registered: without room on the device, straight from registered host memory.

With suffix _delta_1pct: a version of which 1 % of the values differ from the live one. strategy_...
tells how it was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine import bridge
from benchmarks.gpu.engine import Site
from benchmarks.gpu.link import TrainerLink
from benchmarks.gpu.loading import until_compared, until_serving
from benchmarks.gpu.results import Results
from benchmarks.servers import weightsync_server
from weightsync_client import ApplyReport, Client, RankResult

__all__ = ["Ours", "server_beside", "serving"]

_READY_S = 150.0
_SHARE = 0.01
#: Of the server, by default; pushes of each kind that are measured.
_SLOTS, _PUSHES = 2, 3
_CHECK_S = 60.0
#: A store on a disk has room for few versions of this size.
_KEPT = ("--retain-versions", "2")
_FLAGS = ("--pause-lease-s", "60", "--commit-timeout-s", "120", *_KEPT)


@contextlib.asynccontextmanager
async def serving(
    site: Site, folder: Path, store: str = "memory://", *flags: str
) -> AsyncIterator[Client]:
    """Run a server beside the engine until the block ends, and wait until it serves.

    Args:
        site: The engine; its bridge is served here.
        folder: For sockets, state and log.
        store: Where versions are kept. On disk, a push ends when it would survive a crash.
        *flags: More of the server's.
    """
    begin = time.perf_counter()
    async with bridge(site.llm), server_beside(folder, site.results, store, *flags) as client:
        site.results.say("the server adopts the checkpoint")
        await until_serving(client, seconds=_READY_S)
        site.results.facts["adopt_s"] = round(time.perf_counter() - begin, 2)
        yield client


@contextlib.asynccontextmanager
async def server_beside(
    folder: Path, results: Results, store: str = "memory://", *flags: str
) -> AsyncIterator[Client]:
    """Run a server of the engine whose bridge is, or will be, in a folder until the block ends.

    Args:
        folder: For sockets, state and log.
        results: Where the end of its log is told if the block fails.
        store: Where versions are kept.
        *flags: More of the server's.
    """
    address = f"unix:{folder}/push.sock"
    engine = str(folder / "engine.sock")
    server = weightsync_server(folder, [address], *_FLAGS, *flags, engine=engine, store=store)
    # Starting and stopping wait, and the bridge lives on this loop.
    await asyncio.to_thread(server.__enter__)
    try:
        with Client(address) as client:
            yield client
    except BaseException:
        log = (folder / "server.log").read_text(errors="replace")[-3000:]
        results.say(f"weightsync-server's log ends:\n{log}")
        raise
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


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
        version: The one that was pushed last.
    """

    site: Site
    trainer: TrainerLink
    client: Client
    address: str
    files: Path
    rounds: int
    cache: str = "keep"
    version: int = 0
    _calm_s: float = 0.0

    async def full(self) -> None:
        """Apply versions of which every value differs."""
        suffix = "" if self.cache == "keep" else "_exact"
        with self.site.results.attempt(f"our apply{suffix}"):
            # The first ones make segments and warm up.
            for _ in range(_SLOTS):
                await self.pushed(suffix, None)
            await self._measured(suffix, None)

    async def delta(self) -> None:
        """Apply versions of which 1 % of the values differ from the live one."""
        with self.site.results.attempt("our apply_delta_1pct"):
            await self._measured("_delta_1pct", _SHARE)

    async def registered(self) -> None:
        """Apply versions that were not staged on the device."""
        with self.site.results.attempt("our apply_registered"):
            await self.site.ask("bench_room", 0)
            await self._there_and_back("_registered", self.rounds - 1)

    async def _measured(self, suffix: str, share: float | None) -> None:
        for _ in self.site.results.rounds(_PUSHES, f"push and apply{suffix}"):
            self.site.results.add(**await self.pushed(suffix, share))
        await self._there_and_back(suffix, self.rounds - 1)
        (used, *_) = await self.site.ask("bench_memory")
        self.site.results.facts[f"device_bytes_used{suffix}"] = used

    async def pushed(self, suffix: str, share: float | None) -> dict[str, float]:
        """Push and apply what the trainer has next."""
        if share is None:
            await self.trainer.do("change")
        else:
            changed = await self.trainer.do("change_some", share=share)
            self.site.results.facts["changed_elements"] = changed["changed"]
        self.site.results.say(f"push for our apply{suffix}")
        called = time.perf_counter()
        pushed = await self.trainer.do("push", address=self.address)
        self.version = pushed["version"]
        self.site.results.facts[f"push_kind{suffix}"] = pushed["kind"]
        self.site.results.facts[f"push_way{suffix}"] = pushed["way"]
        self.site.results.facts[f"push_fallback{suffix}"] = pushed["fallback_reason"]
        figures, first_token = await self.applied(suffix, pushed=called)
        figures[_key("push", suffix)] = pushed["seconds"]
        figures[_key("update_end_to_end", suffix)] = first_token - called
        return figures

    async def _there_and_back(self, suffix: str, rounds: int) -> None:
        """Go to the version before and back to the pushed one; both lie in host memory."""
        pairs = max(1, rounds // 2)
        for _ in self.site.results.rounds(pairs, f"our apply{suffix}", 45.0):
            for back in (True, False):
                figures, _ = await self.applied(suffix, back=back)
                self.site.results.add(**figures)

    async def applied(
        self, suffix: str, *, back: bool = False, pushed: float | None = None
    ) -> tuple[dict[str, float], float]:
        """Return figures of one apply, and when the first token of the new weights came.

        Args:
            suffix: Of the figures' names.
            back: Whether it is a rollback.
            pushed: When the push of the version was called; None: it lay in host memory.
        """
        begin = time.perf_counter()
        report = await asyncio.to_thread(self._rolled_back if back else self._forwards)
        applied = time.perf_counter()
        seen = await self.site.settled(begin)
        figures = self._figures(suffix, report, seen)
        what, since = ("staging", begin) if pushed is None else ("push", pushed)
        prepare = "prepare" if pushed is None else "prepare_pushed"
        figures[_key(prepare, suffix)] = report.phases.prepare_s
        figures |= self._beside(what, suffix, since, seen["paused_at"])
        figures[_key("apply", suffix)] = applied - begin
        await self._compared(suffix, report.version)
        self._calm_s = await self.site.calm()
        return figures, seen["first_token"]

    def _forwards(self) -> ApplyReport:
        return self.client.apply(self.version, cache=self.cache, clear_rejected=True)

    def _rolled_back(self) -> ApplyReport:
        return self.client.rollback("a benchmark", cache=self.cache).report

    async def _compared(self, suffix: str, version: int) -> None:
        """Wait until what is live was compared as a whole, which would slow down what comes."""
        begin = time.perf_counter()
        await until_compared(self.client, version, seconds=_CHECK_S)
        self.site.results.add(**{_key("live_check", suffix): time.perf_counter() - begin})

    def _figures(
        self, suffix: str, report: ApplyReport, seen: dict[str, float]
    ) -> dict[str, float]:
        facts = self.site.results.facts
        facts[f"strategy{suffix}"] = str(report.strategy)
        facts[f"written_bytes{suffix}"] = report.written_bytes
        facts[f"h2d_bytes_per_rank{suffix}"] = max(r.h2d_bytes for r in report.ranks)
        facts[f"device_room_bytes{suffix}"] = report.ranks[0].device_room_bytes
        figures = {
            "commit": max(rank.commit_s for rank in report.ranks),
            "verify": max(rank.verify_s for rank in report.ranks),
            "pause_total": report.phases.paused_total_s,
            "pause_seen": seen["paused_s"],
            "stop": report.phases.pause_s,
            "resume": report.phases.resume_s,
            "max_gap": seen["gap_s"],
        }
        if not suffix and all(map(_prestaged, report.ranks)):
            figures["commit_prestaged"] = figures["commit"]
        return {_key(name, suffix): value for name, value in figures.items()}

    def _beside(self, what: str, suffix: str, called: float, paused: float) -> dict[str, float]:
        """Return what all that comes before the pause did to the requests."""
        gaps = self.site.load.gaps(called, paused)
        if not self._calm_s or not gaps:
            return {}
        slowdown = statistics.median(gaps) / self._calm_s
        return {
            f"{what}_slowdown{suffix}": slowdown,
            f"{what}_max_gap{suffix}_s": max(gaps),
        }

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


def _prestaged(rank: RankResult) -> bool:
    # Where there is room it holds a whole version.
    return 0 < rank.written_bytes < rank.device_used_bytes


def _key(name: str, suffix: str) -> str:
    # As the tables have them: commit_delta_1pct_s, but commit_s_exact.
    return f"{name}_s{suffix}" if suffix == "_exact" else f"{name}{suffix}_s"
