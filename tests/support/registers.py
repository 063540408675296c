"""Uses of a register; run as a program it is a member until it is killed: URL KEY VALUE TTL_S."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync_server.coordination import open_register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from weightsync_server.coordination.coordination import CoordinationStore

__all__ = ["hints", "member_process", "until_gone", "until_there"]


@contextlib.contextmanager
def member_process(url: str, key: str, value: str, ttl_s: int) -> Iterator[subprocess.Popen[str]]:
    """Start one, wait until its key is there, and kill it in the end."""
    command = [sys.executable, "-m", "tests.support.registers", url, key, value, str(ttl_s)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        try:
            yield process
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def hints(
    register: CoordinationStore, prefix: str
) -> AsyncIterator[asyncio.Queue[frozenset[str]]]:
    """Queue what a watch yields, once it has begun."""
    queue: asyncio.Queue[frozenset[str]] = asyncio.Queue()

    async def collect() -> None:
        async with contextlib.aclosing(register.watch(prefix)) as changes:
            async for changed in changes:
                queue.put_nowait(changed)

    task = asyncio.create_task(collect())
    try:
        assert await queue.get() == frozenset()
        yield queue
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until_gone(register: CoordinationStore, key: str) -> None:
    while await register.get(key) is not None:  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.05)


async def until_there(register: CoordinationStore, key: str) -> None:
    while await register.get(key) is None:  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.05)


async def _main(url: str, key: str, value: str, ttl_s: int) -> None:
    register = open_register(url)
    await register.member(key, value.encode(), ttl_s)
    print("here", flush=True)  # noqa: T201 - what the starter waits for
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
