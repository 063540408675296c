"""What the ranks tell of the way in which they take versions, and of their loaders."""

from __future__ import annotations

import asyncio
import time

from weightsync_client import (
    Client,
    EngineState,
    LiveCheck,
    LoaderState,
    LoaderStatus,
    RankResult,
    Transform,
)

__all__ = [
    "arena_bytes",
    "load_seconds",
    "ranks",
    "transform",
    "until_compared",
    "until_loaded",
    "until_serving",
]

_POLL_S = 0.05


def ranks(client: Client) -> tuple[RankResult, ...]:
    """Return the ranks of the only model."""
    return client.status().models[0].engine.ranks


def transform(client: Client) -> str:
    """Return what leads from a version's bytes to the live ones: `plan`, `twin` or both."""
    return "+".join(sorted({rank.transform for rank in ranks(client)}))


def arena_bytes(client: Client) -> int:
    """Return the bytes of the loaders' arenas; 0 where there is no loader."""
    return sum(loader.arena_bytes for loader in _loaders(client))


def load_seconds(client: Client) -> float:
    """Return how long the slowest loader says that its last load took; 0: there is none."""
    return max((loader.load_s for loader in _loaders(client)), default=0.0)


async def until_serving(client: Client, version: int = 0, *, seconds: float) -> None:
    """Wait until the engine serves, a version if one is named.

    Raises:
        RuntimeError: It is fenced, or does not within that time.
    """
    deadline = time.monotonic() + seconds
    while True:
        model = (await asyncio.to_thread(client.status)).models[0]
        served = model.live_version if version else 0
        if model.engine.state == EngineState.SERVING and served == version:
            return
        if model.engine.state == EngineState.FENCED or time.monotonic() > deadline:
            msg = f"the engine does not serve: {model.engine.state}, {model.engine.reason}"
            raise RuntimeError(msg)
        await asyncio.sleep(_POLL_S)


async def until_compared(client: Client, version: int, *, seconds: float) -> None:
    """Wait until all that is live was compared with a version.

    Raises:
        RuntimeError: It was not within that time, or does not hold it.
    """
    deadline = time.monotonic() + seconds
    while True:
        told = await asyncio.to_thread(client.get_version, version)
        if told.live_check == LiveCheck.FAILED:
            msg = f"the live parameters do not hold version {version}"
            raise RuntimeError(msg)
        if told.live_check != LiveCheck.PENDING:
            return
        if time.monotonic() > deadline:
            msg = f"version {version} was not compared within {seconds:g} s"
            raise RuntimeError(msg)
        await asyncio.sleep(_POLL_S)


async def until_loaded(client: Client, version: int, *, seconds: float) -> bool:
    """Wait until every loader holds a version, so that an apply finds it ready.

    Args:
        client: Of the server.
        version: Which; 0: whichever, once the loaders are ready.
        seconds: How long.

    Returns:
        Whether there are loaders. One that fails is started anew, and tries again.

    Raises:
        RuntimeError: One is not ready within that time.
    """
    deadline = time.monotonic() + seconds
    while True:
        known = await asyncio.to_thread(ranks, client)
        loaders = [rank.loader for rank in known if rank.transform is not Transform.PLAN]
        if all(_holds(loader, version) for loader in loaders):
            return bool(loaders)
        if time.monotonic() > deadline:
            msg = f"version {version or 'of the checkpoint'} is not loaded: {loaders}"
            raise RuntimeError(msg)
        await asyncio.sleep(_POLL_S)


def _holds(loader: LoaderStatus | None, version: int) -> bool:
    if loader is None or loader.state is not LoaderState.READY:
        return False
    return not version or loader.version == version


def _loaders(client: Client) -> list[LoaderStatus]:
    return [rank.loader for rank in ranks(client) if rank.loader is not None]
