"""The register of a fleet of tasks: looked into, put back, and changed at a given moment."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, until
from weightsync_server.decide import ApplyOrder, Verdict
from weightsync_server.fleet import coordinator as coordinators
from weightsync_server.fleet.fleet_records import MEMBERS, decide, refusals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.support.fleet_tasks import Fleet

__all__ = ["at_commit", "path_of", "put_back", "put_back_past_a_commit", "records", "told"]


def path_of(fleet: Fleet, key: str) -> Path:
    return fleet.folder / "register" / "records" / key.replace("/", "+")


def records(fleet: Fleet) -> dict[Path, bytes]:
    return {one: one.read_bytes() for one in path_of(fleet, "").iterdir()}


def put_back(fleet: Fleet, copy: dict[Path, bytes]) -> None:
    for path in path_of(fleet, "").iterdir():
        path.unlink()
    for path, value in copy.items():
        path.write_bytes(value)


def at_commit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have something done just before the first COMMIT that is decided from now on."""
    done: list[object] = []

    async def deciding(*args: object, **given: object) -> Verdict | None:
        if Verdict.COMMIT in args and not done:
            done.append(act)
            found = act()
            if asyncio.iscoroutine(found):
                await found
        return await decide(*args, **given)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(coordinators, "decide", deciding)


async def told(fleet: Fleet, name: str) -> None:
    while name not in refusals((await fleet.register.members(MEMBERS)).alive):  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.01)


async def put_back_past_a_commit(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `a` serve version 3 and refuse a register that has no COMMIT of it; `b` is frozen."""
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    copy: dict[Path, bytes] = {}

    def cut() -> None:
        fleet.freeze("b")
        copy.update(records(fleet))

    at_commit(monkeypatch, cut)
    limits = replace(LIMITS, settle_s=0.2)
    outcome = await fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER)
    assert outcome.verdict is Verdict.COMMIT
    await fleet.until_serving(a=3, b=0)
    put_back(fleet, copy)
    await until(lambda: fleet.members["a"]._journal.refusal)
    await told(fleet, "a")
