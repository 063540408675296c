"""Our way without a pause: the token gap that a switch between two steps makes.

between_steps_stall_s         longest gap between two tokens of one request around the switch, less
                              token_gap_p50_s of the run; the first update counts as well
between_steps_first_stall_s   that of the first update
between_steps_switch_s        of the slowest rank: writing, proving, agreeing
between_steps_commit_s, between_steps_verify_s      of it
between_steps_max_gap_s       longest gap of the whole call, its preparation included
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.engine import Site
from benchmarks.gpu.ours import Ours
from weightsync_client import Client

__all__ = ["measure_between", "switch_between"]

_SWITCH = "weightsync_switch"


async def measure_between(ours: Ours) -> None:
    """Apply versions of which every value differs between two steps.

    Args:
        ours: The engine, its server and the trainer; requests run.
    """
    results = ours.site.results
    stalls: list[float] = []
    with results.attempt("our apply between two steps"):
        await ours.site.calm()
        for _ in results.rounds(ours.rounds, "our apply between two steps", 45.0):
            await ours.trainer.do("change")
            pushed = await ours.trainer.do("push", address=ours.address)
            ours.version = pushed["version"]
            figures = await switch_between(ours.site, ours.client, ours.version)
            stalls.append(figures["between_steps_stall_s"])
            results.add(**figures)
            await ours.site.calm()
        results.facts["between_steps_first_stall_s"] = round(stalls[0], 6)


async def switch_between(site: Site, client: Client, version: int) -> dict[str, float]:
    """Apply a version between two steps; return its figures.

    Args:
        site: The engine; requests run, and their usual gaps are known.
        client: Of its server.
        version: Which.
    """
    begin = time.perf_counter()
    with _watched(site.llm) as switches:
        report = await asyncio.to_thread(client.apply, version, pause="between_steps")
    started, ended = switches[-1]
    await site.load.spoken(time.perf_counter())
    usual = statistics.median(site.results.samples["token_gap_p50_s"])
    return {
        "between_steps_stall_s": max(site.load.gaps(started, ended)) - usual,
        "between_steps_switch_s": report.phases.paused_total_s,
        "between_steps_commit_s": report.phases.commit_s,
        "between_steps_verify_s": report.phases.verify_s,
        "between_steps_max_gap_s": max(site.load.gaps(begin, ended)),
    }


@contextlib.contextmanager
def _watched(llm: Any) -> Iterator[list[tuple[float, float]]]:
    """Note when the ranks were asked to switch, and when all had answered."""
    times: list[tuple[float, float]] = []
    call = llm.collective_rpc

    async def timed(method: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        answer = await call(method, *args, **kwargs)
        if method == _SWITCH:
            times.append((begin, time.perf_counter()))
        return answer

    llm.collective_rpc = timed
    try:
        yield times
    finally:
        llm.collective_rpc = call
