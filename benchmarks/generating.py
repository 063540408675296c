"""A vLLM that generates all the while, for benchmarks of what goes on beside it.

`python -m benchmarks.generating FOLDER CHECKPOINT REQUESTS` serves the bridge on
FOLDER/engine.sock. Once a weightsync-server has let the engine run and every request has got a
token, it prints "tokens N" ten times a second, all of them so far, until it is terminated.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from benchmarks.engine import Load, bridge, set_environment, start_engine

__all__ = ["token_count"]

_EVERY_S = 0.1


def token_count(line: bytes) -> int | None:
    """Return the number in a line that this program printed; None: vLLM printed it."""
    word, _, number = line.strip().partition(b" ")
    return int(number) if word == b"tokens" and number.isdigit() else None


async def _generate(checkpoint: str, requests: int) -> None:
    over = asyncio.Event()
    llm = start_engine(checkpoint, "float32", requests)
    try:
        async with bridge(llm):
            load = Load(llm, requests)
            # Not earlier: until here SIGTERM ends the process at once.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
            async with load.running():
                while not over.is_set():
                    print(f"tokens {sum(map(len, load.times))}", flush=True)
                    await asyncio.sleep(_EVERY_S)
    finally:
        llm.shutdown()


def main() -> None:
    """Generate until terminated."""
    folder, checkpoint, requests = sys.argv[1:]
    set_environment(folder, plain=True)
    asyncio.run(_generate(checkpoint, int(requests)))


if __name__ == "__main__":
    main()
