"""An engine of its own that loads a checkpoint as vLLM does, and tells what it then holds.

`python -m benchmarks.gpu.fresh ARGUMENTS`, a JSON object, prints one JSON line, the digests of
`benchmarks.gpu.live_digests`, and runs until its input ends: memory of the device that it gave back
would puzzle an engine that starts beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator

from benchmarks.gpu.cleanup import end_processes
from benchmarks.gpu.engine import Setup, engine_arguments, prepare_environment

__all__ = ["fresh_digests"]

_LINE = 1 << 24


@contextlib.asynccontextmanager
async def fresh_digests(setup: Setup) -> AsyncIterator[asyncio.Task[dict[str, str]]]:
    """Start such an engine; the task's result are its digests. It ends with the block."""
    prepare_environment(setup)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.gpu.fresh", json.dumps(engine_arguments(setup))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Without our plugins nothing of ours has a part in what it holds. On a CPU one of them
        # turns the repacking of weights off, here as in the engine that is compared.
        env={**os.environ, "VLLM_PLUGINS": "" if setup.device == "cuda" else "weightsync"},
        limit=_LINE,
    )
    task = asyncio.create_task(_answer(process))
    try:
        yield task
    finally:
        task.cancel()
        end_processes(process.pid)
        await process.wait()


async def _answer(process: asyncio.subprocess.Process) -> dict[str, str]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        msg = "the fresh engine has ended without an answer"
        raise RuntimeError(msg)
    found: dict[str, str] = json.loads(line)
    return found


def main() -> None:
    """Load, answer and wait."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        from vllm import LLM

        engine = LLM(**json.loads(sys.argv[1]))
        (digests,) = engine.collective_rpc("bench_digests")
        print(json.dumps(digests), file=out, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
