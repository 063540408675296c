"""How records of a fleet are written: JSON with a format number, below 4 KB.

A format that a release does not know is refused with `NOT_SUPPORTED`, so that a member of an older
release reports that it is not ready, and takes part in nothing it does not understand.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_plan import FleetPlan, FleetVersion, Kind, MemberReport, Verdict
from weightsync_server.register.register import MAX_VALUE_BYTES
from weightsync_server.store.documents import decode_document, encode_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "FORMAT",
    "check_member",
    "decode_member",
    "decode_plan",
    "decode_report",
    "decode_verdict",
    "encode_member",
    "encode_plan",
    "encode_report",
    "encode_roster",
    "encode_verdict",
]

#: Rises when an older release would misread a record.
FORMAT = 1
#: Of a roster's part, so that names and frame stay below what a register takes.
_NAMES_BYTES = MAX_VALUE_BYTES - 512
#: A reason is cut there, in characters of up to 4 bytes, which JSON may double.
_REASON = 400
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_member(name: str) -> str:
    """Return the name of a member.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if not _NAME.fullmatch(name):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"{name[:80]!r} is no name of a member; use up to 64 letters, digits, '.', '_' and "
            "'-', the first a letter or a digit",
        )
    return name


def encode_roster(waves: Iterable[Sequence[str]]) -> list[bytes]:
    """Return the parts of a roster: the waves' members in order, split where a value ends."""
    parts: list[list[list[str]]] = [[]]
    room = _NAMES_BYTES
    for wave in waves:
        parts[-1].append([])
        for name in wave:
            if (room := room - len(name) - 4) < 0:
                # A wave goes on in the next part.
                parts.append([[]])
                room = _NAMES_BYTES
            parts[-1][-1].append(name)
        room -= 4
    return [_encode(continues=at > 0, waves=part) for at, part in enumerate(parts)]


def encode_plan(plan: FleetPlan, parts: int) -> bytes:
    """Return a plan without its roster, which is there before it."""
    previous = plan.previous
    return _encode(
        number=plan.number,
        nonce=plan.nonce,
        kind=plan.kind.value,
        target=[plan.target.number, plan.target.digest],
        previous=[previous.number, previous.digest] if previous else None,
        decisions=plan.decisions,
        rejects=plan.rejects,
        key=plan.key,
        parts=parts,
    )


def decode_plan(data: bytes, roster: Mapping[str, bytes] | None = None) -> FleetPlan:
    """Return a plan; without waves where its roster is not given.

    Args:
        data: What `encode_plan` returned.
        roster: The parts, sorted by their keys.

    Raises:
        WeightSyncError: NOT_SUPPORTED: another format. DATA_CORRUPT: damaged, or parts are missing.
    """
    record = _decode(data, "plan")
    waves: list[list[str]] = []
    if roster is not None:
        for part in roster.values():
            found = _decode(part, "roster")
            if found["continues"]:
                waves[-1] += found["waves"].pop(0)
            waves += found["waves"]
        if len(roster) != record["parts"]:
            raise _damaged("roster")
    previous = record["previous"]
    return FleetPlan(
        number=int(record["number"]),
        nonce=str(record["nonce"]),
        kind=Kind(record["kind"]),
        target=FleetVersion(*record["target"]),
        previous=FleetVersion(*previous) if previous else None,
        waves=tuple(tuple(wave) for wave in waves),
        decisions=int(record["decisions"]),
        rejects=str(record["rejects"]),
        # Older releases write none.
        key=str(record.get("key", "")),
    )


def encode_verdict(verdict: Verdict, by: str, reason: str = "") -> bytes:
    """Return a decision.

    Args:
        verdict: What is decided.
        by: Who decides, for people.
        reason: Why, for people.
    """
    return _encode(verdict=verdict.value, by=by, reason=reason[:_REASON])


def decode_verdict(data: bytes) -> tuple[Verdict, str]:
    """Return what was decided, and why.

    Raises:
        WeightSyncError: As `decode_plan`.
    """
    record = _decode(data, "decision")
    return Verdict(record["verdict"]), str(record["reason"])


def encode_report(report: MemberReport) -> bytes:
    """Return a member's report."""
    return _encode(ok=report.ok, reason=report.reason[:_REASON])


def decode_report(data: bytes) -> MemberReport:
    """Return what `encode_report` encoded.

    Raises:
        WeightSyncError: As `decode_plan`.
    """
    record = _decode(data, "report")
    return MemberReport(bool(record["ok"]), str(record["reason"]))


def encode_member(live: FleetVersion | None, mode: str, address: str) -> bytes:
    """Return what a member says of itself, for status."""
    return _encode(
        live=[live.number, live.digest] if live else None, mode=mode, address=address[:256]
    )


def decode_member(data: bytes) -> tuple[FleetVersion | None, str, str]:
    """Return what a member serves, how it is, and its address.

    Raises:
        WeightSyncError: As `decode_plan`.
    """
    record = _decode(data, "member")
    live = record["live"]
    return FleetVersion(*live) if live else None, str(record["mode"]), str(record["address"])


def _encode(**record: Any) -> bytes:
    return encode_document({"format": FORMAT, **record})


def _decode(data: bytes, what: str) -> dict[str, Any]:
    try:
        record = decode_document(data)
    except ValueError:
        raise _damaged(what) from None
    if record.get("format") != FORMAT:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"the {what} has format {record.get('format')!r}, this release knows {FORMAT}; update "
            "this member, or apply with the older release",
        )
    return record


def _damaged(what: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT,
        f"a {what} in the register is damaged; abort this apply and begin another",
    )
