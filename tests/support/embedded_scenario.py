"""A program for one test: hosts vLLM, applies a version under a request, prints what it saw.

Usage: python -m tests.support.embedded_scenario CHECKPOINT_A CHECKPOINT_B RUN_DIR
The last line of its output is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.engine import CacheUse, PauseSpec, SwitchOrder

if TYPE_CHECKING:
    from tests.support.staging import Staging, Version
    from weightsync.vllm.bridge.embedded import EmbeddedEngine

#: Tokens of a request from which on something may happen to it.
_UNDER_WAY = 20


def _get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def _answered_by(address: str) -> str | None:
    """Return the version that a completion names."""
    body = json.dumps({"model": "model", "prompt": "x", "max_tokens": 2}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        named: str | None = answer.headers["x-weightsync-version"]
    return named


async def _prepare(
    engine: EmbeddedEngine, staging: Staging, name: str, version: Version, *, live: bool = False
) -> dict[str, Any]:
    ranks = list((await engine.hello()).ranks)
    page, pages = staging.pages(ranks)
    # The workers know the segment socket from the environment that `launch` set.
    args = {"apply_id": name, "document": version.document.id, "page": page, "compare_live": live}
    await engine.call_workers("weightsync_prepare", args)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        report = pages[0].read()
        if report is not None and report["phase"] != "running":
            return report
        await asyncio.sleep(0.005)
    raise TimeoutError


async def _long_request(
    engine: EmbeddedEngine, tokens: int, under_way: asyncio.Event | None = None
) -> Any:
    from vllm import SamplingParams

    llm = engine._vllm.llm
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    final = None
    async for output in llm.generate("The quick brown", params, f"long-{time.monotonic_ns()}"):
        final = output
        if under_way is not None and len(output.outputs[0].token_ids) >= _UNDER_WAY:
            under_way.set()
    return final


async def _begun(engine: EmbeddedEngine, tokens: int) -> asyncio.Task[Any]:
    """Return a request that has some of its tokens."""
    under_way = asyncio.Event()
    request = asyncio.create_task(_long_request(engine, tokens, under_way))
    await under_way.wait()
    return request


async def _between(
    engine: EmbeddedEngine, staging: Staging, a: Version, b: Version
) -> dict[str, Any]:
    """Go from b to a between two steps of a request; tell where its tokens and labels change."""
    tokens = 300
    undisturbed = (await _long_request(engine, tokens)).outputs[0].token_ids
    await _prepare(engine, staging, "a again", a)
    request = await _begun(engine, tokens)
    order = SwitchOrder("a again", "b", 3, a.content_digest, b.content_digest, 30.0)
    outcome = await engine.switch(order)
    output = (await request).outputs[0]
    changed = [one != other for one, other in zip(output.token_ids, undisturbed, strict=True)]
    spans = getattr(output, "weight_versions", None) or []
    return {
        "switched": outcome.serves == a.content_digest,
        "switch_labelled": outcome.label_set,
        "switch_state": str((await engine.health()).state),
        "switch_tokens": len(output.token_ids),
        "switch_at": changed.index(True),
        "switch_spans": [[span.version, span.start, span.end] for span in spans],
    }


async def _scenario(model_a: Path, model_b: Path, run_dir: Path) -> dict[str, Any]:
    from tests.support.staging import Staging
    from weightsync.vllm.endpoint import launch

    staging = Staging(run_dir / "segments.sock")
    flags = [
        "--model", str(model_a), "--served-model-name", "model", "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "512", "--port", "0", "--max-num-seqs", "8",
    ]  # fmt: skip
    engine = await launch(flags, str(run_dir / "segments.sock"))
    seen: dict[str, Any] = {"address": engine.address, "state": str((await engine.health()).state)}
    a, b = staging.stage(model_a), staging.stage(model_b)
    models = f"{engine.address}/v1/models"
    seen["closed"] = await asyncio.to_thread(_get, models)
    seen["first_phase"] = (await _prepare(engine, staging, "a", a, live=True))["phase"]
    await engine.call_workers("weightsync_capture", {"document": a.document.id})
    seen["adopted"] = (await _prepare(engine, staging, "a", a, live=True))["proved"]
    await engine.resume("", 1, a.content_digest)
    seen["open"] = await asyncio.to_thread(_get, models)
    seen["answered_by"] = [await asyncio.to_thread(_answered_by, engine.address)]
    seen["prepared"] = (await _prepare(engine, staging, "b", b))["phase"]
    request = await _begun(engine, 300)
    lease = await engine.pause(PauseSpec(mode="keep", cache=CacheUse.RECOMPUTE), 30)
    seen["requests"] = (await engine.health()).requests
    replies = await engine.call_workers("weightsync_commit", {"apply_id": "b"})
    seen["committed"] = replies[0]["content_digest"] == b.content_digest
    seen["label_set"] = await engine.resume(lease.lease_id, 2, b.content_digest)
    output = (await request).outputs[0]
    seen["answered_by"].append(await asyncio.to_thread(_answered_by, engine.address))
    seen["tokens"] = len(output.token_ids)
    spans = getattr(output, "weight_versions", None) or []
    seen["spans"] = [[span.version, span.start, span.end] for span in spans]
    begin = time.monotonic()
    waiting = await _begun(engine, 400)
    spec = PauseSpec(mode="wait", cache=CacheUse.KEEP, wait_timeout_s=0.1, after_wait="keep")
    lease = await engine.pause(spec, 30)
    seen["wait_became"] = lease.mode
    seen["wait_s"] = time.monotonic() - begin
    seen["still_running"] = not waiting.done()
    await engine.resume(lease.lease_id, 2, b.content_digest)
    seen["kept_tokens"] = len((await waiting).outputs[0].token_ids)
    aborted = await _begun(engine, 400)
    spec = PauseSpec(mode="wait", cache=CacheUse.RECOMPUTE, wait_timeout_s=0.1, after_wait="abort")
    lease = await engine.pause(spec, 30)
    seen["abort_became"] = lease.mode
    seen["aborted_tokens"] = len((await asyncio.wait_for(aborted, 30)).outputs[0].token_ids)
    await engine.resume(lease.lease_id, 2, b.content_digest)
    spec = PauseSpec(mode="wait", cache=CacheUse.RECOMPUTE, wait_timeout_s=5, after_wait="keep")
    lease = await engine.pause(spec, 30)
    seen["idle_wait"] = lease.mode
    await engine.resume(lease.lease_id, 2, b.content_digest)
    seen |= await _between(engine, staging, a, b)
    await engine.close()
    staging.close()
    await engine.close()
    return seen


if __name__ == "__main__":
    result = asyncio.run(_scenario(*(Path(argument) for argument in sys.argv[1:4])))
    sys.stdout.write(json.dumps(result) + "\n")
