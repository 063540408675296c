"""A bucket: stores that break their promise, lose replies and throttle; members and clocks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.object_proxy import Fault, object_proxy
from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination import bucket_keys, open_register
from weightsync_server.coordination.bucket_keys import BucketMembers
from weightsync_server.coordination.coordination import Creation
from weightsync_server.store import open_store
from weightsync_server.store.objects.object_client import ObjectClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.object_servers import ObjectServer

KEY = "applies/1/decision"


async def test_a_store_that_overwrites_decides_nothing(
    overwriting: ObjectServer, place: Callable[..., str]
) -> None:
    register = open_register(place(overwriting))
    for attempt in (register.create(KEY, b"COMMIT"), register.get(KEY), register.list("")):
        with pytest.raises(WeightSyncError, match="wrote over an object although") as caught:
            await attempt
        assert caught.value.reason == Reason.NOT_SUPPORTED


async def test_a_place_that_has_something_else_is_refused(
    s3: ObjectServer, place: Callable[..., str]
) -> None:
    url = place(s3)
    await open_store(url).open()
    with pytest.raises(WeightSyncError, match="is not a WeightSync register, and not empty"):
        await open_register(url).get(KEY)


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.THROTTLE])
async def test_one_of_two_wins_through_a_store_that_fails(
    s3: ObjectServer, place: Callable[..., str], fault: Fault
) -> None:
    with object_proxy(s3.port) as proxy:
        url = place(s3, proxy.port)
        first, second = open_register(url), open_register(url)
        await asyncio.gather(first.get(KEY), second.get(KEY))
        proxy.fault = lambda number, method, _: (
            fault if method == "PUT" and number % 3 == 0 else Fault.NONE
        )
        for turn in range(8):
            key = f"applies/{turn}/decision"
            found = await asyncio.gather(first.create(key, b"one"), second.create(key, b"two"))
            assert found[0].value == found[1].value == await first.get(key)
            assert sum(one.created for one in found) <= 1
        assert proxy.met[fault] > 0


async def test_an_answer_that_never_comes_leaves_the_outcome_unknown(
    s3: ObjectServer, place: Callable[..., str]
) -> None:
    with object_proxy(s3.port) as proxy:
        register = open_register(place(s3, proxy.port), timeout_s=1.0)
        await register.get(KEY)
        proxy.fault = lambda _number, method, _path: Fault.STALL if method == "PUT" else Fault.NONE
        with pytest.raises(
            WeightSyncError, match=r"creating .* may or may not have been done"
        ) as caught:
            await register.create(KEY, b"COMMIT")
        assert caught.value.reason == Reason.DEADLINE_EXCEEDED
        proxy.fault = lambda *_: Fault.NONE
        assert await register.create(KEY, b"ABORT") == Creation(False, b"COMMIT")


async def test_who_looks_for_the_first_time_goes_by_the_stores_clock(
    s3: ObjectServer, place: Callable[..., str]
) -> None:
    client = ObjectClient(place(s3))
    dead = await BucketMembers(client).lease("members/m1", b"v1", 2)
    assert await BucketMembers(client).read("members/m1") == b"v1"
    await asyncio.sleep(4)
    assert await BucketMembers(client).read("members/m1") is None
    await dead.renew()
    assert await BucketMembers(client).read("members/m1") == b"v1"


async def test_who_has_looked_before_goes_by_its_own_clock(
    s3: ObjectServer, place: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ObjectClient(place(s3))
    members = BucketMembers(client)
    lease = await members.lease("members/m1", b"v1", 100)
    assert await members.read("members/m1") == b"v1"
    # The wall clocks of hosts are not asked.
    monkeypatch.setattr(clock, "wall", lambda: 0.0)
    now = clock.monotonic()
    for passed, there in ((99.0, True), (103.0, False)):
        monkeypatch.setattr(clock, "monotonic", lambda passed=passed: now + passed)
        assert (await members.read("members/m1") is not None) == there
    await asyncio.sleep(1.1)
    await lease.renew()
    assert await members.read("members/m1") == b"v1"


async def test_a_member_that_is_long_gone_is_removed(
    s3: ObjectServer, place: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ObjectClient(place(s3))
    await BucketMembers(client).lease("members/m1", b"v1", 1)
    await asyncio.sleep(4)
    assert await BucketMembers(client).read("members/m1") is None
    assert await client.list_under("members")
    monkeypatch.setattr(bucket_keys, "_KEPT_S", 0.5)
    assert await BucketMembers(client).read("members/m1") is None
    assert not await client.list_under("members")
    assert not await client.list_under("clocks")
