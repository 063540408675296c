"""Rights in etcd by the page on rights: coordination works with them, and only with them."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.certificates import Authority
from tests.support.etcd import Etcd, ProtectedEtcd
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination import open_register
from weightsync_server.coordination.etcd_channels import EtcdTls
from weightsync_server.decide import ApplyPhase
from weightsync_server.fleet import fleet_records
from weightsync_server.fleet.fleet_records import (
    coordinator_key,
    decision_key,
    floor_key,
    member_key,
    pause_key,
    plan_key,
    rejected_key,
    report_key,
    roster_key,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from weightsync_server.coordination.coordination import CoordinationStore

pytestmark = pytest.mark.timeout(120)

PREFIX = "weightsync/prod"
PAGE = Path(__file__).parents[2] / "docs/how-to/bucket-and-etcd-rights.md"
TTL_S = 2
PATIENCE_S = 40.0
_REFUSED = (
    r"was refused by etcd: .*permission.*the rights that docs/how-to/bucket-and-etcd\S+ lists"
)


def commands() -> str:
    """Return the commands of the page."""
    (block,) = re.findall(r"```sh\n(fleet=.*?)```", PAGE.read_text(), re.DOTALL)
    assert f"fleet=/{PREFIX}\n" in block
    return str(block)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def guarded(
    etcd: str,
    program: Callable[[str, str], str],
    authority: Authority,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ProtectedEtcd]:
    """Return an etcd in which the page's commands were run, and nothing else."""
    program("etcdctl", "etcd-client")
    root = authority.sign("root")
    cluster = ProtectedEtcd(etcd, tmp_path_factory.mktemp("etcd"), authority, root)
    environment = os.environ | {
        "ETCDCTL_API": "3",
        "ETCDCTL_ENDPOINTS": cluster.addresses[0],
        "ETCDCTL_CACERT": str(authority.ca),
        "ETCDCTL_CERT": str(root.certificate),
        "ETCDCTL_KEY": str(root.key),
    }
    try:
        subprocess.run(
            ["bash", "-euc", commands()], env=environment, check=True, capture_output=True
        )
        yield cluster
    finally:
        cluster.close()


@asynccontextmanager
async def register_of(
    cluster: ProtectedEtcd, authority: Authority, user: str, prefix: str = PREFIX
) -> AsyncIterator[CoordinationStore]:
    """Open the register as a user of etcd."""
    pair = authority.sign(user)
    tls = EtcdTls(authority.ca, pair.certificate, pair.key)
    register = open_register(cluster.url(prefix), tls, timeout_s=PATIENCE_S)
    yield register
    await register.close()


DECIDING = {decision_key(1, 1), report_key(1, ApplyPhase.DONE, "host1")}
COORDINATING = DECIDING | {
    plan_key(1),
    pause_key(1),
    roster_key("nonce", 0),
    floor_key(1),
    rejected_key("digest"),
}
#: Who may create what.
CREATES = {
    "operator": COORDINATING,
    "host1": DECIDING | {plan_key(1), pause_key(1)},
    "host2": COORDINATING,
    "stranger": set[str](),
}
#: Who may be what on a lease.
LEASES = {
    "operator": {coordinator_key("nonce")},
    "host1": {member_key("host1")},
    "host2": {coordinator_key("nonce"), member_key("host2")},
    "stranger": set[str](),
}


async def refusal(register: CoordinationStore, key: str, *, member: bool) -> WeightSyncError | None:
    """Return what etcd answers to who wants to write a key; None: it was written."""
    try:
        if member:
            await (await register.member(key, b"", TTL_S)).close()
        else:
            await register.create(key, b"")
    except WeightSyncError as error:
        return error
    return None


def test_every_kind_of_key_has_its_right() -> None:
    kinds = {key.partition("/")[0] for key in (*CREATES["host2"], *LEASES["host2"])}
    told = re.findall(r"(?m)^    ([a-z]+)/", str(fleet_records.__doc__))
    assert kinds == set(told)


@pytest.mark.parametrize("user", CREATES)
async def test_each_user_may_write_what_is_its_own_and_nothing_else(
    guarded: ProtectedEtcd, authority: Authority, user: str
) -> None:
    # A name that begins with another's is not that other.
    leases = {key for keys in LEASES.values() for key in keys} | {member_key("host10")}
    created = {key for keys in CREATES.values() for key in keys} | {"elsewhere"}
    async with register_of(guarded, authority, user) as register:
        for allowed, wanted, member in ((CREATES, created, False), (LEASES, leases, True)):
            found = {key: await refusal(register, key, member=member) for key in wanted}
            refusals = [error for error in found.values() if error is not None]
            assert {key for key, error in found.items() if error is None} == allowed[user]
            assert {error.reason for error in refusals} == {Reason.PERMISSION_DENIED}
            for error in refusals:
                assert re.search(_REFUSED, error.message)
                assert "\n" not in error.message


async def test_who_coordinates_removes_what_is_old_and_others_do_not(
    guarded: ProtectedEtcd, authority: Authority
) -> None:
    async with register_of(guarded, authority, "host1") as member:
        await member.create(plan_key(2), b"")
        with pytest.raises(WeightSyncError, match=r"rights that docs/how-to/bucket-and") as caught:
            await member.delete([floor_key(1)])
        assert caught.value.reason is Reason.PERMISSION_DENIED
    async with register_of(guarded, authority, "operator") as operator:
        await operator.delete([plan_key(2), floor_key(1), roster_key("nonce", 0)])
        assert await operator.get(plan_key(2)) is None


@pytest.mark.parametrize("user", ["operator", "host1", "host2"])
async def test_every_process_of_the_fleet_reads_and_watches_it(
    guarded: ProtectedEtcd, authority: Authority, user: str
) -> None:
    async with register_of(guarded, authority, "operator") as operator:
        await operator.create(rejected_key("bad"), b"why")
    async with register_of(guarded, authority, user) as register:
        assert await register.get(rejected_key("bad")) == b"why"
        assert (await register.list(""))[rejected_key("bad")] == b"why"
        assert await register.list("members/") == {}
        hints = register.watch("")
        assert await anext(hints) == frozenset()
        await hints.aclose()


@pytest.mark.parametrize(
    ("user", "prefix"),
    [("stranger", PREFIX), ("host1", "weightsync/production"), ("host1", "weightsync/other")],
)
async def test_nobody_reads_another_fleet(
    guarded: ProtectedEtcd, authority: Authority, user: str, prefix: str
) -> None:
    async with register_of(guarded, authority, user, prefix) as register:
        for attempt in (register.get("a"), register.list(""), anext(register.watch(""))):
            with pytest.raises(WeightSyncError, match=_REFUSED) as caught:
                await attempt
            assert caught.value.reason is Reason.PERMISSION_DENIED


async def test_who_shows_no_certificate_is_refused_at_once(etcd: str, tmp_path: Path) -> None:
    cluster = Etcd(etcd, tmp_path)
    register = open_register(cluster.url(PREFIX), timeout_s=PATIENCE_S)
    try:
        cluster.ask("auth/user/add", name="root", password="secret")
        cluster.ask("auth/role/add", name="root")
        cluster.ask("auth/user/grant", user="root", role="root")
        cluster.ask("auth/enable")
        for attempt in (
            register.create("a", b""),
            register.get("a"),
            register.list(""),
            register.member("a", b"", TTL_S),
            anext(register.watch("")),
        ):
            with pytest.raises(WeightSyncError, match="use a client certificate") as caught:
                await attempt
            assert caught.value.reason is Reason.UNAUTHENTICATED
    finally:
        await register.close()
        cluster.close()
