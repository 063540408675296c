"""A fleet that has nothing but a bucket."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import FileHost, make_member, version
from tests.support.fleet_tasks import LIMITS, until
from tests.support.object_servers import moto
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_plan import Kind, Verdict
from weightsync_server.register import open_register
from weightsync_server.store.objects.object_client import connect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        connect.cache_clear()
        yield f"{server.url}/fleet"
    connect.cache_clear()


async def test_a_bucket_is_enough(url: str, tmp_path: Path) -> None:
    limits = replace(LIMITS, member_ttl_s=3, undecided_s=20.0, grace_s=5.0, prepare_s=30.0)
    members = [make_member(open_register(url), tmp_path / name, limits) for name in ("a", "b")]
    tasks = [asyncio.create_task(member.run()) for member in members]
    await until(lambda: all(member.view.history for member in members))
    coordinator = Coordinator(open_register(url), "coordinator", limits)
    for number, kind in ((2, Kind.BARRIER), (3, Kind.ROLLING)):
        outcome = await coordinator.apply(version(number), kind)
        assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ())
        assert [FileHost(tmp_path / name).serves for name in ("a", "b")] == [number, number]
    assert (await coordinator.rollback(Kind.BARRIER)).target == version(2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
