"""Keys and records in a fleet's register that are of others: left out, named, no traceback."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder, ApplyPhase, ParticipantReport, Verdict
from weightsync_server.fleet.fleet_history import HistoryReader, parse_history
from weightsync_server.fleet.fleet_records import (
    coordinator_key,
    decision_key,
    decode_plan,
    encode_report,
    floor_key,
    is_ours,
    parse_reports,
    pause_key,
    plan_key,
    rejected_key,
    rejected_since_key,
    rejected_until_key,
    report_key,
    rollback_key,
)
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet_host.fleet_status import FleetStatusReader
from weightsync_server.store.store_records import decode_document, encode_document

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fleet_tasks import Fleet

pytestmark = pytest.mark.timeout(30)

_STRAYS = [
    "applies/x",
    "applies/x/plan",
    "applies/7/plan",
    "applies/0000000000007/plan",
    "applies/000000000002/decisions/x",
    "applies/\N{REPLACEMENT CHARACTER}",
    "floors/x",
    "floors/-5",
    "rejected/since/x/ab",
    "rejected/until/zz",
]
_DEEP = b"[" * 100_000


async def test_a_fleet_goes_on_beside_keys_that_are_not_its_own(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    for key in [*_STRAYS, "reports/000000000002/foo/a"]:
        path = fleet.folder / "register" / "records" / key.replace("/", "+")
        path.write_bytes(b"{}")
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await until(lambda: "not a key of a fleet" in caplog.text)
    outcome = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    assert (outcome.number, outcome.verdict, outcome.lagging) == (2, Verdict.COMMIT, ())
    assert not fleet.members["a"].view.why
    # It is named once, and in the status for as long as it is there.
    assert caplog.text.count("not a key of a fleet") == 1
    status = await FleetStatusReader(fleet.register).status()
    async with asyncio.timeout(20):
        # Until the member has said what it holds now.
        while status.skew:
            await asyncio.sleep(0.05)
            status = await FleetStatusReader(fleet.register).status()
    named = {one.name: one.state for one in status.members}
    assert named.keys() == {"a", *_STRAYS}
    assert "remove floors/x from the register" in named["floors/x"]


def test_every_key_of_a_fleet_is_its_own() -> None:
    digest = version(1).digest
    keys = [plan_key(7), pause_key(7), decision_key(7, 1), floor_key(7), rejected_key(digest)]
    keys += [rejected_since_key(7, digest), rejected_until_key(7, digest), rollback_key("k")]
    keys += [report_key(7, phase, "host-1.example") for phase in ApplyPhase]
    assert all(map(is_ours, keys))
    assert not any(map(is_ours, [*_STRAYS, coordinator_key("n"), "applies/000000000007/plan/x"]))


def test_reports_of_no_phase_are_left_out() -> None:
    value = encode_report(ParticipantReport(ok=True))
    keys = {report_key(7, ApplyPhase.DONE, "a"): value, "reports/000000000007/foo/a": value}
    assert parse_reports(7, keys).by_phase.keys() == {ApplyPhase.DONE}


def test_json_that_is_too_deep_is_a_damaged_record() -> None:
    with pytest.raises(ValueError, match="its digest does not match"):
        decode_document(_DEEP)
    with pytest.raises(WeightSyncError, match="a plan in the register is damaged"):
        decode_plan(_DEEP)
    history = parse_history({plan_key(1): _DEEP}, None)
    assert "a plan in the register is damaged" in history.unreadable


@pytest.mark.parametrize(
    ("field", "value"), [("number", float("inf")), ("target", "x"), ("decisions", None)]
)
async def test_a_plan_with_a_field_of_another_kind_is_damaged(
    fleet: Fleet, field: str, value: object
) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    body = await fleet.register.get(plan_key(1))
    assert body is not None
    odd = encode_document(decode_document(body) | {field: value})
    path = fleet.folder / "register" / "records" / plan_key(1).replace("/", "+")
    path.write_bytes(odd)
    assert "damaged" in (await HistoryReader(fleet.register).read()).unreadable


@pytest.mark.parametrize("what", ["deep", "empty", "kind", "folder"])
def test_a_journal_that_is_none_is_named(tmp_path: Path, what: str) -> None:
    path = tmp_path / "fleet.json"
    if what == "folder":
        path.mkdir()
    elif what == "kind":
        path.write_bytes(encode_document({"stopped_in": None, "seen": 1}))
    else:
        path.write_bytes(_DEEP if what == "deep" else b"")
    with pytest.raises(WeightSyncError) as caught:
        MemberJournal(path)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert caught.value.message.startswith(f"remove {path} once")
