"""How records of a fleet are written: JSON with a format number, below 4 KB.

A record is written in the oldest format that says what it means, so that members of this release
and of the one before are one fleet. What a release cannot read it refuses with `NOT_SUPPORTED`: its
member reports that it is not ready, and takes part in nothing that it does not understand. Keys and
decisions, and what these mean, are the same in every format.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

from weightsync import __version__
from weightsync.engine import PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_plan import FleetPlan, FleetVersion, Kind, MemberReport, Verdict
from weightsync_server.register.register import MAX_VALUE_BYTES
from weightsync_server.store.documents import decode_document, encode_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "FORMAT",
    "OLDEST_FORMAT",
    "check_member",
    "decode_boot",
    "decode_member",
    "decode_plan",
    "decode_report",
    "decode_rollback",
    "decode_verdict",
    "encode_member",
    "encode_plan",
    "encode_report",
    "encode_rollback",
    "encode_roster",
    "encode_verdict",
]

#: What this release reads. The newest rises when an older release would misread a record: 2 says
#: how members pause, 3 that a rejected content is accepted again. The oldest rises once the release
#: before this one writes none of it.
OLDEST_FORMAT, FORMAT = 1, 3
_CHOSEN_PAUSE, _CLEARED = 2, 3
#: How an engine can be asked to pause.
_PAUSES = ("keep", "wait", "abort", "between_steps")
#: Of a roster's part, so that names and frame stay below what a register takes.
_NAMES_BYTES = MAX_VALUE_BYTES - 512
#: A reason is cut there: characters, and bytes as JSON, which has up to 12 for one of them.
_REASON, _REASON_BYTES = 400, 2400
#: Of why a member is fenced, which is renewed with its record.
_WHY_BYTES = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_member(name: str, of: str = "member") -> str:
    """Return the name of a member, or of a fleet.

    Args:
        name: The name.
        of: What has it, for people.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if not _NAME.fullmatch(name):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"{name[:80]!r} is no name of a {of}; use up to 64 letters, digits, '.', '_' and "
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
    previous, pause = plan.previous, plan.pause
    chosen: dict[str, Any] = {}
    if pause is not None:
        spec = [pause.mode, pause.clear_cache, pause.wait_timeout_s, pause.after_wait]
        chosen = {"format": _CHOSEN_PAUSE, "pause": spec}
    if plan.clears:
        chosen |= {"format": _CLEARED, "clears": True}
    if plan.reason:
        # For people: a release that does not know it misses nothing else.
        chosen["reason"] = _cut(plan.reason)
    return _encode(
        **chosen,
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
    with _decoded(data, "plan") as record:
        waves = _waves(roster, int(record["parts"])) if roster is not None else ()
        previous = record["previous"]
        return FleetPlan(
            number=int(record["number"]),
            nonce=str(record["nonce"]),
            kind=Kind(record["kind"]),
            target=FleetVersion(*record["target"]),
            previous=FleetVersion(*previous) if previous else None,
            waves=waves,
            decisions=int(record["decisions"]),
            rejects=str(record["rejects"]),
            # Older releases write none.
            key=str(record.get("key", "")),
            pause=_pause(*record["pause"]) if "pause" in record else None,
            reason=str(record.get("reason", "")),
            clears=bool(record.get("clears", False)),
        )


def encode_verdict(verdict: Verdict, by: str, reason: str = "") -> bytes:
    """Return a decision.

    Args:
        verdict: What is decided.
        by: Who decides, for people.
        reason: Why, for people.
    """
    return _encode(verdict=verdict.value, by=by, reason=_cut(reason))


def decode_verdict(data: bytes) -> tuple[Verdict, str]:
    """Return what was decided, and why.

    Raises:
        WeightSyncError: As `decode_plan`.
    """
    with _decoded(data, "decision") as record:
        return Verdict(record["verdict"]), str(record["reason"])


def encode_rollback(plan: FleetPlan, verdict: Verdict, reason: str) -> bytes:
    """Return what became of a rollback, once nothing else tells it.

    Args:
        plan: It.
        verdict: What was decided.
        reason: Why, for people.
    """
    target = [plan.target.number, plan.target.digest]
    return _encode(number=plan.number, target=target, verdict=verdict.value, reason=_cut(reason))


def decode_rollback(data: bytes) -> tuple[int, FleetVersion, Verdict, str]:
    """Return number, target, decision and reason of a rollback.

    Raises:
        WeightSyncError: As `decode_plan`.
    """
    with _decoded(data, "rollback") as record:
        verdict, reason = Verdict(record["verdict"]), str(record["reason"])
        return int(record["number"]), FleetVersion(*record["target"]), verdict, reason


def encode_report(report: MemberReport) -> bytes:
    """Return a member's report."""
    return _encode(ok=report.ok, reason=_cut(report.reason))


def decode_report(data: bytes) -> MemberReport:
    """Return what `encode_report` encoded.

    Raises:
        WeightSyncError: As `decode_plan`.
    """
    with _decoded(data, "report") as record:
        return MemberReport(bool(record["ok"]), str(record["reason"]))


def encode_member(
    live: FleetVersion | None, mode: str, address: str, boot: str = "", why: str = ""
) -> bytes:
    """Return what a member says of itself, for status.

    Args:
        live: What its host holds.
        mode: What its host does.
        address: Where its server is.
        boot: Names its process, so that two of one name can be told apart.
        why: Why it serves nothing, for people; "": it serves.
    """
    # A release that does not know it misses nothing else.
    said = {"why": why.encode()[:_WHY_BYTES].decode(errors="ignore")} if why else {}
    return _encode(
        **said,
        live=[live.number, live.digest] if live else None,
        mode=mode,
        address=address[:256],
        boot=boot,
        release=__version__,
        reads=FORMAT,
    )


def decode_member(data: bytes) -> tuple[FleetVersion | None, str, str]:
    """Return what a member serves, how it is, and its address.

    Raises:
        WeightSyncError: As `decode_plan`.
    """
    with _decoded(data, "member") as record:
        live = record["live"]
        return FleetVersion(*live) if live else None, str(record["mode"]), str(record["address"])


def decode_boot(data: bytes) -> str:
    """Return which process it is that says something of a member; "": an older release's.

    Raises:
        WeightSyncError: As `decode_plan`.
    """
    with _decoded(data, "member") as record:
        return str(record.get("boot", ""))


def _waves(roster: Mapping[str, bytes], parts: int) -> tuple[tuple[str, ...], ...]:
    waves: list[list[str]] = []
    for part in roster.values():
        with _decoded(part, "roster") as found:
            names = list(found["waves"])
            if found["continues"]:
                waves[-1] += names.pop(0)
            waves += names
    if len(roster) != parts:
        raise _damaged("roster")
    return tuple(tuple(wave) for wave in waves)


def _pause(mode: str, clear_cache: bool, wait_timeout_s: float, after_wait: str) -> PauseSpec:  # noqa: FBT001 - as it is written
    if mode not in _PAUSES:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"the plan has members pause by {mode!r}, this release knows {', '.join(_PAUSES)}; "
            "update this member, or choose one of them",
        )
    return PauseSpec(mode, bool(clear_cache), float(wait_timeout_s), str(after_wait))


def _cut(text: str) -> str:
    text = text[:_REASON]
    while len(json.dumps(text)) > _REASON_BYTES:
        text = text[: len(text) * 7 // 8]
    return text


def _encode(**record: Any) -> bytes:
    return encode_document({"format": OLDEST_FORMAT, **record})


@contextlib.contextmanager
def _decoded(data: bytes, what: str) -> Iterator[dict[str, Any]]:
    """Yield a record of a format that this release knows; what it then lacks is damage."""
    try:
        record = decode_document(data)
        written = record.get("format")
        if written not in range(OLDEST_FORMAT, FORMAT + 1):
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                f"the {what} has format {written!r}, this release knows {OLDEST_FORMAT} to "
                f"{FORMAT}; update this member, or apply with the older release",
            )
        yield record
    except (ValueError, KeyError, IndexError, TypeError):
        raise _damaged(what) from None


def _damaged(what: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT,
        f"a {what} in the register is damaged; abort this apply and begin another",
    )
