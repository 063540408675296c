"""What every register promises, on each kind."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.registers import hints, member_process, until_gone, until_there
from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination import (
    coordination,
    etcd_channels,
    etcd_keys,
)
from weightsync_server.coordination.coordination import MAX_VALUE_BYTES, Creation, MemberList

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_server.coordination.coordination import CoordinationStore

#: The least that etcd grants.
TTL_S = 2


async def test_the_first_value_stays(
    register: CoordinationStore, another: Callable[[], CoordinationStore]
) -> None:
    assert await register.get("applies/1/decision") is None
    assert await register.create("applies/1/decision", b"COMMIT") == Creation(True, b"COMMIT")
    for other in (register, another()):
        assert await other.create("applies/1/decision", b"ABORT") == Creation(False, b"COMMIT")
        assert await other.get("applies/1/decision") == b"COMMIT"


async def test_one_of_16_creators_wins_and_all_read_it(
    another: Callable[[], CoordinationStore],
) -> None:
    racers = [another() for _ in range(16)]
    for turn in range(15):
        key = f"applies/{turn}/decision"
        results = await asyncio.gather(
            *(racer.create(key, b"by %d" % number) for number, racer in enumerate(racers))
        )
        (winner,) = (number for number, result in enumerate(results) if result.created)
        assert {result.value for result in results} == {b"by %d" % winner}
        assert set(await asyncio.gather(*(racer.get(key) for racer in racers))) == {
            b"by %d" % winner
        }


async def test_a_list_is_whole_and_keeps_to_its_prefix(register: CoordinationStore) -> None:
    keys = [f"applies/1/done/m{number:03}" for number in range(300)]
    for key in ["applies/1/plan", "applies/10/plan", "applies/1.0"]:
        await register.create(key, b"")
    await asyncio.gather(*(register.create(key, key.encode()) for key in keys))
    assert await register.list("applies/1/done/") == {key: key.encode() for key in keys}
    assert list(await register.list("applies/1/done/")) == keys
    assert set(await register.list("applies/1/")) == {*keys, "applies/1/plan"}
    assert len(await register.list("")) == 303
    assert await register.list("versions/") == {}
    odd = ["rejected/o-b", "rejected/o.b", "rejected/o/b"]
    for key in reversed(odd):
        await register.create(key, b"")
    assert list(await register.list("rejected/")) == odd


async def test_several_lists_at_once_are_whole_too(register: CoordinationStore) -> None:
    applies = [f"applies/{number:03}/plan" for number in range(300)]
    reports = [f"reports/{number:03}/done" for number in range(150)]
    others = ["floors/1", "members.1", "rejected/1"]
    keys = applies + reports
    for at in range(0, len(keys), 50):
        # A server for tests answers one after the other, and each has 10 s.
        await asyncio.gather(*(register.create(key, key.encode()) for key in keys[at : at + 50]))
    await asyncio.gather(*(register.create(key, b"") for key in others))
    found = await register.list_each(("applies/", "floors/", "reports/", "versions/"))
    expected = {key: key.encode() for key in keys} | {"floors/1": b""}
    assert found == expected
    assert await register.list_each(()) == {}
    with pytest.raises(WeightSyncError, match="ends within a name"):
        await register.list_each(("applies/", "flo"))


async def test_what_is_removed_is_gone_and_nothing_else(register: CoordinationStore) -> None:
    keys = [f"applies/1/done/m{number:03}" for number in range(200)]
    await asyncio.gather(*(register.create(key, b"") for key in [*keys, "applies/1/plan"]))
    await register.delete([*keys[1:], "applies/2/plan"])
    assert list(await register.list("")) == [keys[0], "applies/1/plan"]
    await register.delete([])
    with pytest.raises(WeightSyncError, match="a register cannot have the key"):
        await register.delete([keys[0], "a/../b"])
    assert await register.get(keys[0]) == b""


async def test_a_value_over_4_kb_is_refused(register: CoordinationStore) -> None:
    most = bytes(range(256)) * 16
    assert len(most) == MAX_VALUE_BYTES
    for attempt in (register.create("a", most + b"!"), register.member("a", most + b"!", TTL_S)):
        with pytest.raises(
            WeightSyncError, match=r"has 4097 bytes, .* takes at most 4096; put"
        ) as caught:
            await attempt
        assert caught.value.reason == Reason.REQUEST_INVALID
    assert await register.get("a") is None
    assert (await register.create("a", most)).created
    assert await register.get("a") == most


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "a+b", "a b", "ä", "a\n", "a" * 201]
)
async def test_a_key_that_is_no_name_is_refused(register: CoordinationStore, key: str) -> None:
    for attempt in (register.create(key, b""), register.get(key), register.member(key, b"", TTL_S)):
        with pytest.raises(WeightSyncError, match="a register cannot have the key") as caught:
            await attempt
        assert caught.value.reason == Reason.REQUEST_INVALID


async def test_the_longest_key_and_a_wrong_prefix(register: CoordinationStore) -> None:
    key = "/".join(["a"] * 100) + "b"
    assert (await register.create(key, b"1")).created
    assert await register.list("a/a/") == {key: b"1"}
    with pytest.raises(WeightSyncError, match="ends within a name; add a '/'"):
        await register.list("a/a")
    with pytest.raises(WeightSyncError, match="ends within a name; add a '/'"):
        await anext(register.watch("a/a"))


async def test_a_watch_hears_of_what_is_below_its_prefix(
    register: CoordinationStore, another: Callable[[], CoordinationStore]
) -> None:
    writer = another()
    async with hints(register, "applies/") as queue:
        await writer.create("versions/1", b"")
        await writer.create("applies/1/plan", b"")
        assert await queue.get() == {"applies/1/plan"}
        member = await writer.member("applies/1/ready/m1", b"", TTL_S)
        assert await queue.get() == {"applies/1/ready/m1"}
        await member.close()
        assert await queue.get() == {"applies/1/ready/m1"}


async def test_a_watch_asks_for_all_to_be_read_now_and_then(
    register: CoordinationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_keys, "_WATCH_S", 0.5)
    # Which a watch that ends by its deadline does without.
    monkeypatch.setattr(etcd_keys, "_PAUSE_S", 3600.0)
    monkeypatch.setattr(coordination, "_BACKSTOP_S", 0.5)
    # Nor does that have all other calls go to another member of etcd.
    monkeypatch.setattr(etcd_channels.EtcdChannels, "leave", lambda *_: pytest.fail("it has left"))
    async with hints(register, "applies/") as queue:
        for _ in range(3):
            assert await queue.get() == frozenset()


async def test_a_member_stays_until_it_is_closed(
    register: CoordinationStore, another: Callable[[], CoordinationStore]
) -> None:
    reader = another()
    member = await register.member("members/m1", b"v1", TTL_S)
    begin = clock.boottime()
    while clock.boottime() < begin + 2.5 * TTL_S:
        assert await reader.get("members/m1") == b"v1"
        assert await reader.list("members/") == {"members/m1": b"v1"}
        await asyncio.sleep(0.1)
    assert member.valid_until > begin + TTL_S
    await member.close()
    await member.close()
    assert await reader.get("members/m1") is None
    assert await reader.list("members/") == {}


async def test_the_second_member_of_a_name_takes_its_place(register: CoordinationStore) -> None:
    first = await register.member("members/m1", b"first", TTL_S)
    second = await register.member("members/m1", b"second", TTL_S)
    await asyncio.sleep(TTL_S)
    assert await register.get("members/m1") == b"second"
    await first.close()
    assert await register.get("members/m1") == b"second"
    await second.close()
    assert await register.get("members/m1") is None


async def test_a_member_whose_key_another_one_has_is_seen_by_nobody(
    register: CoordinationStore, another: Callable[[], CoordinationStore]
) -> None:
    first = await register.member("members/a", b"1", TTL_S)
    second = await another().member("members/a", b"2", TTL_S)
    await first.renew()
    assert not first.is_seen_since(clock.boottime())
    assert second.is_seen_since(clock.boottime())
    await first.close()
    await second.close()


async def test_what_a_member_has_is_not_created(register: CoordinationStore) -> None:
    member = await register.member("members/m1", b"v1", TTL_S)
    with pytest.raises(WeightSyncError, match="belongs to a member; create another key") as caught:
        await register.create("members/m1", b"v2")
    assert caught.value.reason == Reason.REQUEST_INVALID
    await member.close()
    assert (await register.create("members/m1", b"v2")).created


async def test_a_key_is_created_among_those_that_are_there(
    register: CoordinationStore, another: Callable[[], CoordinationStore]
) -> None:
    one = await register.member("members/m1", b"v1", TTL_S)
    known = ("members/m1", "members/m9")
    made = await another().create_among("decisions/1", b"COMMIT", "members/", known)
    assert made == Creation(created=True, value=b"COMMIT")
    two = await another().member("members/m2", b"v2", TTL_S)
    assert await register.create_among("decisions/2", b"COMMIT", "members/", known) is None
    assert await register.get("decisions/2") is None
    # What is decided stays so, whoever is there.
    again = await register.create_among("decisions/1", b"ABORT", "members/", known)
    assert again == Creation(created=False, value=b"COMMIT")
    # One that renews, and one that is put there with another value, is no other one.
    await one.renew()
    newer = await register.member("members/m1", b"v3", TTL_S)
    await two.close()
    made = await register.create_among("decisions/2", b"COMMIT", "members/", known)
    assert made == Creation(created=True, value=b"COMMIT")
    for member in (one, newer):
        await member.close()


@pytest.mark.parametrize("url", ["etcd"], indirect=True)
async def test_who_comes_between_a_look_and_a_create_is_seen(
    register: etcd_keys.EtcdKeys, another: Callable[[], CoordinationStore]
) -> None:
    look = register._look
    came: list[Any] = []

    async def look_and_be_late(prefix: str) -> object:
        seen = await look(prefix)
        if not came:
            came.append(await another().member("members/m2", b"v2", TTL_S))
        return seen

    register._look = look_and_be_late  # type: ignore[method-assign,assignment]  # it takes its time
    assert await register.create_among("decisions/1", b"COMMIT", "members/", ()) is None
    assert await register.get("decisions/1") is None
    await came[0].close()
    made = await register.create_among("decisions/1", b"COMMIT", "members/", ())
    assert made is not None


async def test_keys_that_nobody_renews_are_told_apart(register: CoordinationStore) -> None:
    await register.create("members/zz", b"by hand")
    await register.create("other/m1", b"")
    one = await register.member("members/m1", b"v1", TTL_S)
    assert await register.members("members/") == MemberList(
        {"members/m1": b"v1"}, frozenset({"members/zz"})
    )
    made = await register.create_among("decisions/3", b"COMMIT", "members/", ["members/m1"])
    assert made is not None
    await one.close()


async def test_no_fault_ends_the_renewal_of_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = asyncio.Event()
    calls = 0

    class Faulty:
        key = "members/m1"

        async def renew(self) -> coordination.Renewal:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyError("a fault that nobody has thought of")
            if calls > 2:
                renewed.set()
            return coordination.Renewal(1, kept=True)

        async def release(self) -> None: ...

    monkeypatch.setattr(coordination, "_RENEWALS", 100)
    member = await coordination.Membership(Faulty(), 1).start()
    await renewed.wait()
    await member.close()


async def test_a_member_never_takes_a_key_that_was_created(register: CoordinationStore) -> None:
    await register.create("applies/1/decision", b"COMMIT")
    with pytest.raises(WeightSyncError, match="was created and does not belong to a member"):
        await register.member("applies/1/decision", b"ABORT", TTL_S)
    assert await register.get("applies/1/decision") == b"COMMIT"
    with pytest.raises(WeightSyncError, match="give it a second or more"):
        await register.member("members/m1", b"", 0)


async def test_a_killed_member_is_gone_after_its_time(
    register: CoordinationStore, url: str
) -> None:
    with member_process(url, "members/m1", "v1", TTL_S) as process:
        async with hints(register, "members/") as queue:
            process.kill()
            process.wait(10)
            # The last renewal was at most a third of its time ago.
            assert await register.get("members/m1") == b"v1"
            assert await queue.get() == {"members/m1"}
            await until_gone(register, "members/m1")
            assert await register.list("members/") == {}


async def test_a_stopped_member_is_gone_and_comes_back(
    register: CoordinationStore, url: str
) -> None:
    with member_process(url, "members/m1", "v1", TTL_S) as process:
        process.send_signal(signal.SIGSTOP)
        await until_gone(register, "members/m1")
        process.send_signal(signal.SIGCONT)
        await until_there(register, "members/m1")
        assert await register.get("members/m1") == b"v1"


def test_a_key_in_etcd_that_is_no_text_is_named_all_the_same() -> None:
    register = etcd_keys.EtcdKeys(None, "etcd://e0:2379/ws", "ws")  # type: ignore[arg-type]  # it asks nobody
    assert register._key(b"/ws/applies/\xff") == "applies/\N{REPLACEMENT CHARACTER}"
