"""The engine of the training benchmark: a live vLLM with our server beside it, asked over pipes.

`python -m benchmarks.train_engine JSON` prints {"event": "serving"} when it serves, then reads
lines: an empty one asks for the digest of all live parameters, any other is a checkpoint that vLLM
is to reload its own way before. Each is answered by {"event": "digest", "digest": ...}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.apply_engine import Order, bridged, serving

__all__ = ["main"]

_MAX_MODEL_LEN = 256


async def _serve(order: Order) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=order.base,
        dtype=order.dtype,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        worker_extension_cls="benchmarks.live.LiveParameters",
    )
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        async with bridged(Path(order.folder), llm) as client:
            await serving(client)
            _tell("serving")
            while line := await asyncio.to_thread(sys.stdin.readline):
                _tell("digest", digest=await _digest(llm, line.strip()))
    finally:
        llm.shutdown()


async def _digest(llm: Any, checkpoint: str) -> str:
    await llm.pause_generation(mode="keep", clear_cache=False)
    try:
        if checkpoint:
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
        (digest,) = await llm.collective_rpc("bench_live_digest")
    finally:
        await llm.resume_generation()
    return str(digest)


def _tell(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def main() -> None:
    """Set the environment that vLLM's processes inherit, and serve until standard input ends."""
    order = Order(**json.loads(sys.argv[1]))
    os.environ |= {
        "VLLM_PLUGINS": "weightsync",
        "WEIGHTSYNC_ENGINE_SOCKET": f"unix:{order.folder}/engine.sock",
        "WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    asyncio.run(_serve(order))


if __name__ == "__main__":
    main()
