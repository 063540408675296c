"""A register in three members of etcd that die, freeze and lose their quorum, and behind TLS."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.certificates import Authority, Pair
from tests.support.etcd import Etcd, ProtectedEtcd, free_ports
from tests.support.proxy import FaultProxy
from tests.support.registers import hints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination import etcd_keys, open_register
from weightsync_server.coordination.coordination import Creation
from weightsync_server.coordination.etcd_channels import EtcdTls
from weightsync_server.coordination.etcd_keys import EtcdLease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from weightsync_server.coordination.coordination import CoordinationStore

pytestmark = pytest.mark.timeout(120)

#: Longer than any election on a busy host.
PATIENCE_S = 40.0
PREFIX = "weightsync/fleet"


@pytest.fixture
def prefix() -> str:
    """Of the test's own keys."""
    return f"{PREFIX}/{secrets.token_hex(4)}"


@contextlib.asynccontextmanager
async def registers(url: str, count: int = 1) -> AsyncIterator[list[CoordinationStore]]:
    opened = [open_register(url, timeout_s=PATIENCE_S) for _ in range(count)]
    yield opened
    for one in opened:
        await one.close()


async def agree(racers: list[CoordinationStore], key: str) -> bytes:
    """Let all create a key at once; return what all of them were answered."""
    results = await asyncio.gather(
        *(racer.create(key, b"by %d" % number) for number, racer in enumerate(racers))
    )
    assert sum(result.created for result in results) <= 1
    (value,) = {result.value for result in results}
    return value


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
async def test_the_leader_leaves_in_mid_create(
    three: Etcd, prefix: str, how: signal.Signals
) -> None:
    async with registers(three.url(prefix), 4) as racers:
        await agree(racers, "k/warm")
        leader = three.leader()
        stopped = asyncio.Event()
        decided: dict[str, bytes] = {}

        async def decide(lane: int) -> None:
            # Some are under way when the leader leaves, and each lane goes on after it.
            for turn in itertools.count():
                if stopped.is_set():
                    return
                key = f"k/{lane}-{turn}"
                decided[key] = await agree(racers, key)

        lanes = [asyncio.create_task(decide(lane)) for lane in range(8)]
        while len(decided) < 16:  # noqa: ASYNC110 - the first 16 of many events
            await asyncio.sleep(0.01)
        three.signal(leader, how)
        before = len(decided)
        while len(decided) < before + 40:
            assert not any(lane.done() and lane.exception() for lane in lanes)
            await asyncio.sleep(0.01)
        stopped.set()
        await asyncio.gather(*lanes)
        if how == signal.SIGSTOP:
            three.signal(leader, signal.SIGCONT)
        else:
            three.start(leader)
        three.wait(leader)
        # What a frozen leader still had to do changes nothing.
        for racer in racers:
            found = await racer.list("k/")
            assert {key: found[key] for key in decided} == decided
            assert found.keys() == {*decided, "k/warm"}


async def test_without_a_quorum_nothing_is_believed(three: Etcd, prefix: str) -> None:
    hasty = open_register(three.url(prefix), timeout_s=2.0)
    async with registers(three.url(prefix)) as (patient,):
        await patient.create("applies/1/decision", b"COMMIT")
        for number in (0, 1):
            three.signal(number, signal.SIGKILL)
        errors = await asyncio.gather(
            hasty.get("applies/1/decision"),
            hasty.list("applies/"),
            hasty.create("applies/2/decision", b"COMMIT"),
            hasty.member("members/m1", b"", 2),
            return_exceptions=True,
        )
        for error in errors:
            assert isinstance(error, WeightSyncError), errors
            assert error.reason == Reason.DEADLINE_EXCEEDED
            assert "not answered by etcd within 2 s" in error.message
        for number in (0, 1):
            three.start(number)
        assert await patient.get("applies/1/decision") == b"COMMIT"
        # Done by then or not, the one that was given up is decided the same for everybody.
        final = await patient.create("applies/2/decision", b"ABORT")
        assert final in (Creation(True, b"ABORT"), Creation(False, b"COMMIT"))
        assert await patient.get("applies/2/decision") == final.value
    await hasty.close()


async def test_a_key_that_a_late_put_moved_is_put_back(three: Etcd, prefix: str) -> None:
    async with registers(three.url(prefix)) as (register,):
        assert isinstance(register, etcd_keys.EtcdKeys)

        def lease(value: bytes) -> EtcdLease:
            path = f"/{prefix}/members/m1".encode()
            return EtcdLease(register._channels, "members/m1", path, value, 30)

        # As a put of the same member does that was given up, and comes after the one that counts.
        ours, late = lease(b"v1"), lease(b"v1")
        await ours.renew()
        await late.renew()
        await ours.renew()
        await late.release()
        assert await register.get("members/m1") == b"v1"
        second = lease(b"v2")
        await second.renew()
        await ours.renew()
        assert await register.get("members/m1") == b"v2"
        await second.release()
        assert await register.get("members/m1") is None
        await ours.renew()
        assert await register.get("members/m1") == b"v1"


async def test_a_lost_answer_is_found_out(three: Etcd, prefix: str) -> None:
    proxy = FaultProxy(three.addresses[0])
    try:
        async with (
            registers(three.url(prefix)) as (direct,),
            registers(f"etcd://{proxy.address}/{prefix}") as (behind,),
        ):
            await behind.get("a")
            proxy.faults.lose_replies = True
            creation = asyncio.create_task(behind.create("a", b"COMMIT"))
            while await direct.get("a") is None:
                assert not creation.done()
                await asyncio.sleep(0.01)
            proxy.cut()
            proxy.faults.lose_replies = False
            assert await creation == Creation(False, b"COMMIT")
    finally:
        proxy.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
async def test_a_watch_and_a_member_survive_the_loss_of_each_node(
    three: Etcd, prefix: str, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by its backstop: the link to a frozen node has to be found dead.
    monkeypatch.setattr(etcd_keys, "_WATCH_S", 600.0)
    async with registers(three.url(prefix), 2) as (watcher, writer):
        member = await writer.member("members/m1", b"v1", 20)
        async with hints(watcher, "applies/") as queue:
            for number in range(3):
                three.signal(number, how)
                key = f"applies/{number}/plan"
                await writer.create(key, b"")
                seen: set[str] = set()
                while key not in seen:
                    # Empty: the watch was away, and all is to be read.
                    seen |= await queue.get() or set(await watcher.list("applies/"))
                if how == signal.SIGKILL:
                    three.start(number)
                else:
                    three.signal(number, signal.SIGCONT)
                await asyncio.to_thread(three.wait, number)
        assert await watcher.get("members/m1") == b"v1"
        await member.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def client(authority: Authority) -> Pair:
    return authority.sign("member")


@pytest.fixture(scope="module")
def protected(
    etcd: str, authority: Authority, client: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProtectedEtcd]:
    cluster = ProtectedEtcd(etcd, tmp_path_factory.mktemp("protected"), authority, client)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("wrong", ["ca", "no_certificate", "certificate", "plain"])
async def test_wrong_tls_is_said_within_the_time(
    protected: ProtectedEtcd, authority: Authority, client: Pair, tmp_path: Path, wrong: str
) -> None:
    url = protected.url(PREFIX)
    other = Authority(tmp_path / "other")
    stranger = other.sign("member")
    tls: EtcdTls | None = {
        "ca": EtcdTls(other.ca, client.certificate, client.key),
        "no_certificate": EtcdTls(authority.ca),
        "certificate": EtcdTls(authority.ca, stranger.certificate, stranger.key),
        "plain": None,
    }[wrong]
    if wrong == "plain":
        url = url.replace("etcds://", "etcd://")
    register = open_register(url, tls, timeout_s=1.0)
    errors = await asyncio.gather(
        register.create("b", b"COMMIT"), register.get("a"), return_exceptions=True
    )
    for error in errors:
        assert isinstance(error, WeightSyncError), errors
        assert error.reason == Reason.DEADLINE_EXCEEDED
        assert re.search(r"check that .* addresses and TLS are right", error.message)
    await register.close()


async def test_nobody_listens_there() -> None:
    (port,) = free_ports(1)
    register = open_register(f"etcd://127.0.0.1:{port}/{PREFIX}", timeout_s=1.0)
    with pytest.raises(WeightSyncError, match=r"not answered by etcd within 1 s .*refused"):
        await register.create("a", b"")
    await register.close()
