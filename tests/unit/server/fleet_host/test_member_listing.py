"""What `fleet status` shows of members of other releases: all that is known, and that they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import in_format
from weightsync import __version__
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.decide import ApplyOrder
from weightsync_server.fleet.fleet_records import FORMAT, encode_member, member_key
from weightsync_server.fleet_host import fleet_status
from weightsync_server.fleet_host.fleet_status import FleetStatusReader, list_member
from weightsync_server.store.store_records import decode_document, encode_document

if TYPE_CHECKING:
    from tests.support.fleet_tasks import Fleet


def written(**changes: Any) -> bytes:
    """Return a member's record with fields that are others, or None: not there."""
    record = decode_document(encode_member(version(41), "serving", "c:1", "boot")) | changes
    return encode_document({key: value for key, value in record.items() if value is not None})


def before() -> bytes:
    """Return what the release before this one writes."""
    return written(boot=None, release=None, reads=None)


async def test_an_older_member_is_listed_with_all_that_it_says(fleet: Fleet) -> None:
    await fleet.start("a")
    assert (await fleet.coordinator().apply(version(41), ApplyOrder.BARRIER)).verdict
    older = await fleet.register.member(member_key("c"), before(), 10)
    reader = FleetStatusReader(fleet.register)
    while (status := await reader.status()).members[0].live_version != 41:  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.01)
    a, c = status.members
    assert (a.name, a.release, a.older) == ("a", __version__, False)
    assert c == pb.FleetMember(
        name="c",
        address="c:1",
        live_version=41,
        content_digest=version(41).digest,
        state="serving",
        older=True,
    )
    assert status.skew == 0
    await older.close()


@pytest.mark.parametrize(
    ("value", "older"),
    [
        (written(), False),
        (written(reads=FORMAT - 1), True),
        (written(reads=FORMAT + 1, release="0.0.1"), False),
        (in_format(FORMAT + 1, written(reads=FORMAT + 1)), False),
        (in_format(0, before()), True),
        (written(release="0.0.9"), True),
        (written(release="1000.0.0"), False),
    ],
)
def test_the_older_of_two_releases_is_known(value: bytes, *, older: bool) -> None:
    member = list_member("c", value)
    assert member.older is older
    assert (member.address, member.live_version, member.state) == ("c:1", 41, "serving")


@pytest.mark.parametrize("release", ["0.9.0", "0.10.0rc1", "0.9.12"])
def test_numbers_of_releases_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setattr(fleet_status, "__version__", "0.10.1")
    assert list_member("c", written(release=release)).older


@pytest.mark.parametrize(
    "changes",
    [
        {"live": None},
        {"live": [0, ""]},
        {"live": [1 << 70, "d"]},
        {"live": "41"},
        {"mode": 7, "address": ["c"]},
        {"mode": "\ud800", "address": "\ud800", "live": [41, "\ud800"]},
    ],
)
def test_what_cannot_be_told_is_left_out(changes: dict[str, Any]) -> None:
    assert list_member("c", written(**changes)).name == "c"


def test_a_damaged_record_hides_nobody() -> None:
    for value in (b"", b"[]", b"{}", written()[:-3]):
        member = list_member("c", value)
        assert (member.name, member.live_version) == ("c", 0)
        assert "is damaged" in member.state
