"""Whole pushes of deltas, for the tests of this folder."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from tests.support.deltas import delta_begin, delta_of, every_dtype, stepped
from tests.unit.server.world import content, make_shard, one_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.unit.server.world import Shard, World
    from weightsync.v1 import weightsync_pb2 as pb

__all__ = ["Version", "history", "push_chain", "push_delta", "send", "sparse_history", "until"]

Version = list["Shard"]


def history(steps: int, seed: int = 0) -> list[Version]:
    """Return a version and those after it, each a small step from the one before."""
    versions = [every_dtype(seed)]
    for step in range(steps):
        versions.append(stepped(versions[-1], seed + step))
    return versions


def sparse_history(steps: int, shards: int = 2) -> list[Version]:
    """Return the same of large tensors of which few elements change."""
    data = bytes(range(256)) * 800
    tensors = [[(f"w{index}", "BF16", (len(data) // 2,), data)] for index in range(shards)]
    versions = [[make_shard(index, each) for index, each in enumerate(tensors)]]
    for step in range(steps):
        versions.append(stepped(versions[-1], step, 0.0005))
    return versions


async def send(
    here: World, shards: Sequence[Shard], version: int = 0, commit: str | None = "", **fields: Any
) -> pb.PushWeightsResponse:
    """Push shards as they are on one stream."""
    return await here.pushes.stream(one_stream(shards, version=version, commit=commit, **fields))


async def push_delta(
    here: World, base: Version, new: Version, version: int = 0, **fields: Any
) -> pb.CommitPushResponse:
    """Push what changes from one version to another, and commit it."""
    begin = delta_begin(base, **fields)
    return (await send(here, delta_of(base, new), version, content(new), **begin)).commit


async def push_chain(here: World, versions: Sequence[Version], first: int = 1) -> None:
    """Push the first version in full and the others as deltas, numbered from `first` on."""
    await here.push(versions[0], first)
    for at in range(1, len(versions)):
        await push_delta(here, versions[at - 1], versions[at], first + at)


async def until(true: Callable[[], bool]) -> None:
    """Return when something has come true."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)
