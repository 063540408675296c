"""How much longer vLLM stands still when an apply scores probes before it goes on.

A real vLLM serves a random-weight Qwen2; versions with probes are pushed and applied in turn with
the gate off and with the gate before the resume:

pause_s        without a gate, from the request to pause until the engine runs
gate_pause_s   with it
added_s        the second less the first of each round
score_s        of it, scoring in the pause, as the apply reports it
prefill_s      the limit: the same sequences as requests that want one token and nothing else
requests_s     the peer: the same sequences as requests for prompt_logprobs, which vLLM answers only
               while it generates
tokens         of all probes
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.apply_engine import bridged, serving
from benchmarks.checkpoints import make_checkpoint, write_variant
from benchmarks.engine import set_environment, start_engine
from weightsync_client import Client, Gate, Probes

__all__ = ["main"]

_TMPFS = "/dev/shm"  # noqa: S108 - versions are read from memory, as in the other benchmarks
_TOKENS = range(10, 250)


def main() -> None:
    """Read the command line, measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--probes", type=int, default=32, help="sequences (default 32)")
    parser.add_argument("--length", type=int, default=64, help="tokens of each (default 64)")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ws-bench-", dir=_TMPFS) as folder:
        place = Path(folder)
        count = make_checkpoint(place / "base", tied=True, small=options.small)
        set_environment(folder, plain=True)
        samples = asyncio.run(_measured(place, options))
    parameters = {
        "parameters": count,
        "rounds": options.rounds,
        "probes": options.probes,
        "length": options.length,
        "dtype": options.dtype,
    }
    facts = {"tokens": options.probes * options.length}
    report.emit("gate", parameters, samples, facts, as_json=options.json)


async def _measured(place: Path, options: Any) -> dict[str, list[float]]:
    draw = random.Random(1)
    probes = Probes(
        [[draw.choice(_TOKENS) for _ in range(options.length)] for _ in range(options.probes)]
    )
    llm = start_engine(str(place / "base"), options.dtype, options.probes)
    samples: dict[str, list[float]] = {}
    try:
        async with bridged(place, llm) as client:
            await serving(client)
            for turn in range(options.rounds + 1):
                values = await _round(llm, client, place, probes, turn)
                # The first warms up.
                for name, value in values.items() if turn else ():
                    samples.setdefault(name, []).append(value)
    finally:
        llm.shutdown()
    return samples


async def _round(
    llm: Any, client: Client, place: Path, probes: Probes, turn: int
) -> dict[str, float]:
    values: dict[str, float] = {}
    for at, (name, when) in enumerate((("pause_s", "off"), ("gate_pause_s", "before"))):
        write_variant(place / "base", place / "other", 2 * turn + at + 1)
        push = await asyncio.to_thread(client.push, place / "other", delta="never", probes=probes)
        gate = Gate(when=when, time_limit_s=60)
        done = await asyncio.to_thread(client.apply, push.version, gate=gate)
        values[name] = done.phases.paused_total_s
        if when == "before":
            assert done.gate is not None
            assert done.gate.nan == 0
            values["score_s"] = done.gate.took_s
    values["added_s"] = values["gate_pause_s"] - values["pause_s"]
    values["prefill_s"] = await _asked(llm, probes, f"prefill-{turn}", None)
    values["requests_s"] = await _asked(llm, probes, f"requests-{turn}", 0)
    return values


async def _asked(llm: Any, probes: Probes, name: str, logprobs: int | None) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=logprobs, detokenize=False)

    async def ask(at: int, tokens: tuple[int, ...]) -> None:
        async for _ in llm.generate({"prompt_token_ids": list(tokens)}, params, f"{name}-{at}"):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(ask(at, tokens) for at, tokens in enumerate(probes.tokens)))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
