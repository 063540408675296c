"""What a pause costs when nothing is done in it.

vllm_pause_floor_s       engine-core pause and resume with nothing between, caches kept
vllm_pause_generation_s  the same through AsyncLLM.pause_generation, which sleeps 20 ms
vllm_pause_clear_s       engine-core pause and resume, caches cleared
each with the longest token gap (max_gap_...) around it; token_gap_p50_s and token_gap_max_s while
nothing goes on
"""

from __future__ import annotations

import time

from benchmarks.gpu.engine import Site

__all__ = ["measure_pauses"]

_RESERVE_S = 10.0
_BETWEEN_S = 0.3


async def measure_pauses(site: Site, rounds: int, *, clear: bool = True) -> None:
    """Measure with requests running.

    Args:
        site: The engine.
        rounds: How many of each.
        clear: Whether caches are cleared too, which prefills every request again.
    """
    results = site.results
    await site.calm(2.0)
    for _ in results.rounds(rounds, "pause with nothing in it", _RESERVE_S):
        await _empty(site, "vllm_pause_floor", cleared=False)
        await _generation(site)
        if clear:
            await _empty(site, "vllm_pause_clear", cleared=True)
        await site.calm(_BETWEEN_S)


async def _empty(site: Site, name: str, *, cleared: bool) -> None:
    begin = time.perf_counter()
    await site.calls.pause("keep", clear_cache=cleared)
    await site.calls.resume()
    seconds = time.perf_counter() - begin
    gap = (await site.settled(begin))["gap_s"]
    site.results.add(**{f"{name}_s": seconds, f"max_gap_{name}_s": gap})
    await site.calm(_BETWEEN_S)


async def _generation(site: Site) -> None:
    begin = time.perf_counter()
    await site.llm.pause_generation(mode="keep", clear_cache=False)
    await site.llm.resume_generation()
    seconds = time.perf_counter() - begin
    gap = (await site.settled(begin))["gap_s"]
    site.results.add(vllm_pause_generation_s=seconds, max_gap_vllm_pause_generation_s=gap)
    await site.calm(_BETWEEN_S)
