"""Scores sequences beside generation, as requests of their own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

__all__ = ["live_scores"]


async def live_scores(llm: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the natural log probability of every token but the first, by sequence.

    No other request finds a key of theirs. A caller who is cancelled aborts them.

    Args:
        llm: vLLM's AsyncLLM, which generates.
        sequences: Token ids.
    """
    mark = secrets.token_hex(8)
    tasks = [
        asyncio.ensure_future(_scored(llm, list(tokens), f"weightsync-probe-{mark}-{at}"))
        for at, tokens in enumerate(sequences)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _scored(llm: Any, tokens: list[int], name: str) -> list[float]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = {"prompt_token_ids": tokens, "cache_salt": name}
    found: Any = None
    async for output in llm.generate(prompt, params, name):
        found = output.prompt_logprobs or found
    if found is None or len(found) != len(tokens):
        raise RuntimeError("vLLM returned no prompt logprobs")
    return [float(place[token].logprob) for place, token in zip(found[1:], tokens[1:], strict=True)]
