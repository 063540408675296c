"""A real vLLM in this process: how the benchmarks start it, keep it busy and serve our bridge."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

__all__ = ["Load", "bridge", "set_environment", "start_engine"]

_MAX_MODEL_LEN = 1024
_PROMPT_TOKENS = 16
_WARM_UP_S = 3.0
_TOKEN_S = 120.0


def set_environment(folder: str, *, plain: bool) -> None:
    """Set what vLLM's processes inherit; call it before vllm is imported.

    Args:
        folder: Where the bridge's socket will be.
        plain: Whether CPU repacking is off.
    """
    os.environ |= {
        "VLLM_PLUGINS": "weightsync",
        "WEIGHTSYNC_ENGINE_SOCKET": f"unix:{folder}/engine.sock",
        "WEIGHTSYNC_CPU_PLAIN_WEIGHTS": str(int(plain)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def start_engine(model: str, dtype: str, requests: int, extension: str = "") -> Any:
    """Return vLLM's AsyncLLM; call its `shutdown` at the end.

    Args:
        model: Checkpoint.
        dtype: vLLM's --dtype.
        requests: Requests that it must be able to run at once.
        extension: vLLM's --worker-extension-cls.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model,
        dtype=dtype,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=max(4, requests),
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        worker_extension_cls=extension,
    )
    return AsyncLLM.from_engine_args(arguments)


@contextlib.asynccontextmanager
async def bridge(llm: Any) -> AsyncIterator[None]:
    """Serve the bridge from this process, as vLLM's API server does, until the block ends."""
    from weightsync.vllm.endpoint import BridgePlugin

    served = BridgePlugin()
    await served.init_state(llm, None, SimpleNamespace(api_server_count=1))
    try:
        yield
    finally:
        await served.stop()


@dataclass
class Load:
    """Requests that run all the time, and when each of their tokens came.

    Attributes:
        llm: vLLM's AsyncLLM.
        count: How many requests.
        length: Tokens of each answer; then the request is made again.
        times: When the tokens of each request came, by `time.perf_counter`.
        tokens: Notified at each token.
    """

    llm: Any
    count: int
    length: int = _MAX_MODEL_LEN - _PROMPT_TOKENS - 8
    times: list[list[float]] = field(default_factory=list)
    tokens: asyncio.Condition = field(default_factory=asyncio.Condition)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the requests running until the block ends."""
        self.times = [[] for _ in range(self.count)]
        tasks = [asyncio.create_task(self._generate(number)) for number in range(self.count)]
        try:
            # vLLM's first steps are slow.
            await asyncio.sleep(_WARM_UP_S)
            await self.spoken(time.perf_counter())
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, number: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=self.length,
            output_kind=RequestOutputKind.DELTA,
        )
        for turn in itertools.count():
            prompt = {"prompt_token_ids": [(number * 31 + i) % 1000 for i in range(_PROMPT_TOKENS)]}
            async for _ in self.llm.generate(prompt, parameters, f"bench-{number}-{turn}"):
                self.times[number].append(time.perf_counter())
                async with self.tokens:
                    self.tokens.notify_all()

    async def spoken(self, since: float) -> None:
        """Return when every request has got a token after `since`: a gap is known at its end."""
        async with asyncio.timeout(_TOKEN_S), self.tokens:
            await self.tokens.wait_for(lambda: all(t and t[-1] > since for t in self.times))

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the times between two tokens of one request that touch begin..end."""
        return [
            after - before
            for times in self.times
            for before, after in itertools.pairwise(times)
            if after >= begin and before <= end
        ]
