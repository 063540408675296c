"""Records of a fleet: below 4 KB, the same after a round, refused where they are of another age."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fleet_tasks import in_format
from weightsync.engine import CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.coordination import MAX_VALUE_BYTES
from weightsync_server.decide import (
    ApplyOrder,
    DecisionPlan,
    FleetVersion,
    ParticipantReport,
    Verdict,
    divide,
)
from weightsync_server.fleet.fleet_records import (
    check_member,
    decode_member,
    decode_plan,
    decode_report,
    decode_verdict,
    encode_member,
    encode_plan,
    encode_report,
    encode_roster,
    encode_verdict,
)
from weightsync_server.store.store_records import decode_document, encode_document

#: As the first release with fleets wrote it.
_FIRST = (
    b'{"xxh3_128":"0e0be2b1dd4b8cc9936e71eab9a06680","document":{"format":1,"number":7,'
    b'"nonce":"aaaaaaaaaaaaaaaa","kind":"barrier","target":[2,"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"],'
    b'"previous":[1,"cccccccccccccccccccccccccccccccc"],"decisions":1,"rejects":"","key":"",'
    b'"parts":1}}'
)
OLD, NEW = FleetVersion(1, "0" * 32), FleetVersion(2**53 - 1, "f" * 32)


def planned(kind: ApplyOrder, members: int, size: int) -> DecisionPlan:
    names = [f"{'m' * 58}{number:06}" for number in range(members)]
    waves = divide(names, kind, size)
    return DecisionPlan(7, "a" * 16, kind, NEW, OLD, waves, len(waves), "0" * 32)


@pytest.mark.parametrize("kind", ApplyOrder)
@pytest.mark.parametrize(("members", "size"), [(1, 1), (3, 1), (1000, 1), (1000, 7), (1000, 400)])
def test_a_plan_of_any_size_fits_and_comes_back(kind: ApplyOrder, members: int, size: int) -> None:
    plan = planned(kind, members, size)
    parts = encode_roster(plan.waves)
    body = encode_plan(plan, len(parts))
    assert all(len(value) <= MAX_VALUE_BYTES for value in (body, *parts))
    roster = {f"rosters/a/{at:06}": part for at, part in enumerate(parts)}
    assert decode_plan(body, roster) == plan
    assert decode_plan(body).waves == ()
    if len(parts) > 1:
        roster.popitem()
        with pytest.raises(WeightSyncError, match="a roster in the register is damaged"):
            decode_plan(body, roster)


def test_small_records_come_back() -> None:
    long = "ä" * 5000
    assert decode_verdict(encode_verdict(Verdict.COMMIT, "m1")) == (Verdict.COMMIT, "")
    assert decode_verdict(encode_verdict(Verdict.ABORT, "m1", long))[0] is Verdict.ABORT
    assert decode_report(encode_report(ParticipantReport(ok=True))) == ParticipantReport(ok=True)
    report = decode_report(encode_report(ParticipantReport(ok=False, reason=long)))
    assert not report.ok
    assert long.startswith(report.reason)
    assert decode_member(encode_member(NEW, "serving", "a:1")) == (NEW, "serving", "a:1")
    assert decode_member(encode_member(None, "fenced", "")) == (None, "fenced", "")
    for value in (encode_verdict(Verdict.ABORT, "m1", long), encode_report(report)):
        assert len(value) <= MAX_VALUE_BYTES


@pytest.mark.parametrize("number", [0, 5, "2", None])
def test_another_format_is_refused_and_not_guessed(number: object) -> None:
    plan = planned(ApplyOrder.BARRIER, 3, 1)
    others = encode_plan(plan, 1), encode_verdict(Verdict.COMMIT, "m1")
    for decode, value in zip((decode_plan, decode_verdict), others, strict=True):
        with pytest.raises(WeightSyncError, match=f"has format {number!r}, this rel") as caught:
            decode(in_format(number, value))  # type: ignore[operator]  # they differ in what they return
        assert caught.value.reason == Reason.NOT_SUPPORTED
    assert "knows 1 to 4; update this member" in caught.value.message


@pytest.mark.parametrize(
    ("number", "chosen"),
    [
        (1, {}),
        (1, {"rejects": "3" * 32, "reason": "bad answers"}),
        (2, {"pause": PauseSpec("wait", cache=CacheUse.KEEP, wait_timeout_s=2.5)}),
        (2, {"pause": PauseSpec("wait", cache=CacheUse.SHARE)}),
        (3, {"clears": True}),
        (4, {"gate": "when: GATE_WHEN_BEFORE"}),
    ],
    ids=["nothing", "a reason", "a pause", "a pause that shares", "clearing", "a gate"],
)
def test_a_plan_has_the_oldest_format_that_says_it(number: int, chosen: dict[str, Any]) -> None:
    plan = replace(planned(ApplyOrder.ROLLING, 3, 1), **chosen)
    body = encode_plan(plan, 1)
    assert body == in_format(number, body)
    assert decode_plan(body) == replace(plan, waves=())


@pytest.mark.parametrize("letter", ["x", "\x01", "\U0001f600"])
def test_whatever_a_reason_is_written_in_it_fits(letter: str) -> None:
    plan = replace(planned(ApplyOrder.BARRIER, 1, 1), key="k" * 128, reason=1024 * letter)
    assert len(encode_plan(plan, 1)) <= MAX_VALUE_BYTES


def test_a_plan_of_the_first_release_is_read() -> None:
    assert decode_plan(_FIRST) == DecisionPlan(
        7, "a" * 16, ApplyOrder.BARRIER, FleetVersion(2, "b" * 32), FleetVersion(1, "c" * 32), (), 1
    )


def test_a_pause_that_this_release_does_not_know_is_refused() -> None:
    plan = replace(planned(ApplyOrder.ROLLING, 3, 1), pause=PauseSpec("sideways"))
    with pytest.raises(WeightSyncError, match="has members pause by 'sideways'") as caught:
        decode_plan(encode_plan(plan, 1))
    assert caught.value.reason == Reason.NOT_SUPPORTED


@pytest.mark.parametrize(
    "document",
    [
        {"nonce": None},
        {"kind": "sideways"},
        {"target": 7},
        {"target": [1]},
        {"decisions": "many"},
        {"pause": ["keep"]},
        {"parts": []},
    ],
)
def test_a_whole_record_with_nonsense_in_it_is_damaged(document: dict[str, object]) -> None:
    body = decode_document(encode_plan(planned(ApplyOrder.BARRIER, 3, 1), 1)) | document
    if document.get("nonce", "") is None:
        del body["nonce"]
    with pytest.raises(WeightSyncError, match="a plan in the register is damaged") as caught:
        decode_plan(encode_document(body), {} if "parts" in document else None)
    assert caught.value.reason == Reason.DATA_CORRUPT


@pytest.mark.parametrize("value", [b"", b"{}", b"[]", b"\xff", b'{"document":{},"xxh3_128":"0"}'])
def test_a_damaged_record_is_refused(value: bytes) -> None:
    for decode in (decode_report, decode_member):
        with pytest.raises(WeightSyncError, match="is damaged") as caught:
            decode(value)
        assert caught.value.reason == Reason.DATA_CORRUPT


def test_a_changed_byte_is_noticed() -> None:
    frame = json.loads(encode_verdict(Verdict.ABORT, "m1"))
    frame["document"]["verdict"] = "COMMIT"
    with pytest.raises(WeightSyncError, match="is damaged"):
        decode_verdict(json.dumps(frame).encode())


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "a\n", "a" * 65, "ä"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(WeightSyncError, match="is not a valid name of a member"):
        check_member(name)


_SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_plan_names_the_span_that_it_is_below() -> None:
    plan = replace(planned(ApplyOrder.BARRIER, 1, 1), traceparent=_SPAN)
    assert decode_plan(encode_plan(plan, 1)).traceparent == _SPAN
    assert b"traceparent" not in encode_plan(replace(plan, traceparent=""), 1)
    # What others wrote in its place names none.
    damaged = replace(plan, traceparent="x" * 200)
    assert decode_plan(encode_plan(damaged, 1)).traceparent == ""
