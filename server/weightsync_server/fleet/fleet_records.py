"""Keys, records and decisions of a fleet: JSON with a format number, below 4 KB.

A record is written in the oldest format that says what it means, so that members of this release
and of the one before are one fleet. What a release cannot read it refuses with `NOT_SUPPORTED`: its
member reports that it is not ready, and takes part in nothing that it does not understand. Keys and
decisions, and what these mean, are the same in every format.

    members/<name>                     on a lease: who is there, and what it serves
    coordinators/<nonce>               on a lease: the coordinator of a plan lives
    rosters/<nonce>/<part>             names of a plan's members
    applies/<n>/plan                   what is to be done
    applies/<n>/pause                  of a barrier: all have prepared
    applies/<n>/decisions/<k>          COMMIT or ABORT
    reports/<n>/<phase>/<member>       what a member says
    reports/rollbacks/<digest of key>  what became of a rollback, for who repeats its call
    floors/<n>                         what is below counts for nothing and may be removed
    rejected/<digest>                  nobody applies this content, before any of the next two
    rejected/since/<n>/<digest>        nobody applies it after the COMMIT of an apply
    rejected/until/<n>/<digest>        it is accepted again after the COMMIT of an apply

All but the first two are created once and never change. What is said of a plan names its nonce: in
a register that was put back, it may be of another plan of that number.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from weightsync import __version__, clock, failpoints
from weightsync.engine import CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import traceparent
from weightsync_server.coordination.coordination import (
    MAX_VALUE_BYTES,
    CoordinationStore,
    Membership,
)
from weightsync_server.decide import (
    ApplyOrder,
    ApplyPhase,
    DecisionPlan,
    FleetVersion,
    ParticipantReport,
    Reports,
    Verdict,
)
from weightsync_server.store.store_records import decode_document, encode_document

logger = logging.getLogger(__name__)


#: What this release reads. The newest rises when an older release would misread a record: 2 says
#: how members pause, 3 that a rejected content is accepted again, 4 how probes are scored where
#: that is chosen. The oldest rises once the release
#: before this one writes none of it.
OLDEST_FORMAT, FORMAT = 1, 4
_CHOSEN_PAUSE, _CLEARED, _GATED = 2, 3, 4
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
    """Return the name of a member, or of what `of` says, if it may be one."""
    if not _NAME.fullmatch(name):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"{name[:80]!r} is not a valid name of a {of}; use up to 64 letters, digits, '.', '_' "
            "and '-', the first a letter or a digit",
        )
    return name


def encode_roster(waves: Iterable[Sequence[str]]) -> list[bytes]:
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


def encode_plan(plan: DecisionPlan, parts: int) -> bytes:
    """Return a plan without its roster, which is there before it."""
    previous, pause = plan.previous, plan.pause
    chosen: dict[str, Any] = {}
    if pause is not None:
        # A release that does not know SHARE reads no old keys.
        shares = pause.cache is CacheUse.SHARE
        cache = str(pause.cache) if shares else pause.cache is CacheUse.RECOMPUTE
        spec = [pause.mode, cache, pause.wait_timeout_s, pause.after_wait]
        chosen = {"format": _CHOSEN_PAUSE, "pause": spec}
    if plan.clears:
        chosen |= {"format": _CLEARED, "clears": True}
    if plan.gate:
        chosen |= {"format": _GATED, "gate": plan.gate}
    if plan.reason:
        # For people: a release that does not know it misses nothing else.
        chosen["reason"] = _cut(plan.reason)
    if plan.traceparent:
        chosen["traceparent"] = plan.traceparent
    return _encode(
        **chosen,
        number=plan.number,
        nonce=plan.nonce,
        kind=plan.order.value,
        target=[plan.target.number, plan.target.digest],
        previous=[previous.number, previous.digest] if previous else None,
        decisions=plan.decisions,
        rejects=plan.rejects,
        key=plan.key,
        parts=parts,
    )


def decode_plan(data: bytes, roster: Mapping[str, bytes] | None = None) -> DecisionPlan:
    """Return a plan; without a `roster`, parts sorted by key, it has no waves.

    Raises:
        WeightSyncError: NOT_SUPPORTED for another format; DATA_CORRUPT for damage or missing parts.
    """
    with _decoded(data, "plan") as record:
        waves = decode_roster(roster, int(record["parts"])) if roster is not None else ()
        previous = record["previous"]
        return DecisionPlan(
            number=int(record["number"]),
            nonce=str(record["nonce"]),
            order=ApplyOrder(record["kind"]),
            target=_version(*record["target"]),
            previous=_version(*previous) if previous else None,
            waves=waves,
            decisions=int(record["decisions"]),
            rejects=str(record["rejects"]),
            # Older releases write none.
            key=str(record.get("key", "")),
            pause=_pause(*record["pause"]) if "pause" in record else None,
            reason=str(record.get("reason", "")),
            clears=bool(record.get("clears", False)),
            traceparent=traceparent(str(record.get("traceparent", ""))),
            gate=str(record.get("gate", "")),
        )


def encode_verdict(verdict: Verdict, by: str, reason: str = "", nonce: str = "") -> bytes:
    return _encode(**_of(nonce), verdict=verdict.value, by=by, reason=_cut(reason))


def decode_verdict(data: bytes, nonce: str = "") -> tuple[Verdict, str]:
    """Return what is decided on the plan with this nonce; a verdict on another one is an ABORT."""
    with _decoded(data, "decision") as record:
        if _is_of_another(record, nonce):
            return Verdict.ABORT, ANOTHER
        return Verdict(record["verdict"]), str(record["reason"])


def encode_pause(nonce: str) -> bytes:
    return _encode(**_of(nonce))


def is_pause_of(data: bytes, nonce: str) -> bool:
    """Return whether a barrier with this nonce has the word to pause; older releases name none."""
    try:
        with _decoded(data, "word to pause") as record:
            return not _is_of_another(record, nonce)
    except WeightSyncError:
        return True


def encode_rollback(plan: DecisionPlan, verdict: Verdict, reason: str) -> bytes:
    target = [plan.target.number, plan.target.digest]
    return _encode(number=plan.number, target=target, verdict=verdict.value, reason=_cut(reason))


def decode_rollback(data: bytes) -> tuple[int, FleetVersion, Verdict, str]:
    with _decoded(data, "rollback") as record:
        verdict, reason = Verdict(record["verdict"]), str(record["reason"])
        return int(record["number"]), _version(*record["target"]), verdict, reason


def encode_report(report: ParticipantReport, nonce: str = "") -> bytes:
    return _encode(**_of(nonce), ok=report.ok, reason=_cut(report.reason))


def decode_report(data: bytes, nonce: str = "") -> ParticipantReport:
    """Return what is said of the plan with this nonce; of another one, that it is not done."""
    with _decoded(data, "report") as record:
        if _is_of_another(record, nonce):
            return ParticipantReport(ok=False, reason=ANOTHER)
        return ParticipantReport(bool(record["ok"]), str(record["reason"]))


#: What stands where something is said of another plan.
ANOTHER = (
    "apply again: the register has a record of another plan with this number, as a restored "
    "register has"
)


def _of(nonce: str) -> dict[str, str]:
    # A release that does not know it takes what is said for that of the plan that it reads.
    return {"nonce": nonce} if nonce else {}


def _is_of_another(record: Mapping[str, Any], nonce: str) -> bool:
    return bool(nonce) and str(record.get("nonce", nonce)) != nonce


def parse_reports(number: int, keys: Mapping[str, bytes], nonce: str = "") -> Reports:
    """Return the reports on a plan; one that cannot be read says that nothing was done."""
    found: dict[ApplyPhase, dict[str, ParticipantReport]] = {}
    for key, value in keys.items():
        if not is_ours(key):
            continue
        phase, _, name = key.removeprefix(reports_prefix(number)).partition("/")
        try:
            report = decode_report(value, nonce)
        except WeightSyncError as error:
            report = ParticipantReport(ok=False, reason=error.message)
        found.setdefault(ApplyPhase(phase), {})[name] = report
    return Reports(found)


def encode_member(
    live: FleetVersion | None,
    mode: str,
    address: str,
    boot: str = "",
    why: str = "",
    *,
    refuses: bool = False,
) -> bytes:
    """Return what a member says of itself, for status.

    `boot` tells processes of one name apart. `why` says for people why it serves nothing, or
    `refuses` what the register says; if empty, it serves.
    """
    # A release that does not know it misses nothing else.
    said: dict[str, Any] = {}
    if why:
        said["why"] = why.encode()[:_WHY_BYTES].decode(errors="ignore")
    if refuses:
        said["refuses"] = True
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
    with _decoded(data, "member") as record:
        live = record["live"]
        return _version(*live) if live else None, str(record["mode"]), str(record["address"])


def decode_refusal(data: bytes) -> str:
    """Return why a member does not follow the register; "": it does, or does not say."""
    with _decoded(data, "member") as record:
        return str(record["why"]) if record.get("refuses") else ""


def refusals(members: Mapping[str, bytes]) -> dict[str, str]:
    """Return why members do not follow the register, by name, of those that do not."""
    found = {}
    for key, value in members.items():
        with contextlib.suppress(WeightSyncError):
            if why := decode_refusal(value):
                found[key.removeprefix(MEMBERS)] = why
    return found


def decode_boot(data: bytes) -> str:
    """Return which process says something of a member; "": an older release's."""
    with _decoded(data, "member") as record:
        return str(record.get("boot", ""))


def _version(number: int, digest: str) -> FleetVersion:
    return FleetVersion(int(number), str(digest))


def decode_roster(roster: Mapping[str, bytes], parts: int) -> tuple[tuple[str, ...], ...]:
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


def _pause(mode: str, cache: bool | str, wait_timeout_s: float, after_wait: str) -> PauseSpec:  # noqa: FBT001 - as it is written
    if mode not in _PAUSES:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"the plan has members pause by {mode!r}, this release knows {', '.join(_PAUSES)}; "
            "update this member, or choose one of them",
        )
    use = CacheUse.RECOMPUTE if cache else CacheUse.KEEP
    if cache == CacheUse.SHARE:
        use = CacheUse.SHARE
    return PauseSpec(mode, use, float(wait_timeout_s), str(after_wait))


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
    except (ValueError, LookupError, TypeError, ArithmeticError):
        raise _damaged(what) from None


def _damaged(what: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT,
        f"a {what} in the register is damaged; abort this apply and begin another",
    )


APPLIES, FLOORS, MEMBERS, REJECTED = "applies/", "floors/", "members/", "rejected/"
REPORTS = "reports/"
REJECTED_SINCE, REJECTED_UNTIL = f"{REJECTED}since/", f"{REJECTED}until/"


#: What this package creates, but for leases and rosters; all else is no key of a fleet.
_OURS = re.compile(
    r"applies/[0-9]{12}/(plan|pause|decisions/[0-9]{6})"
    r"|floors/[0-9]{12}"
    r"|rejected/((since|until)/[0-9]{12}/)?[0-9A-Za-z]+"
    r"|reports/([0-9]{12}/(" + "|".join(ApplyPhase) + r")/[^/]+|rollbacks/[0-9a-f]{32})"
)


def is_ours(key: str) -> bool:
    """Tell whether a fleet may have made a key: what others put there counts for nothing."""
    return _OURS.fullmatch(key) is not None


def number_in(key: str) -> int:
    """Return the number in a key of ours that has one below its room's name."""
    return int(next(part for part in key.split("/") if part.isdecimal()))


def apply_prefix(number: int) -> str:
    return f"{APPLIES}{number:012}/"


def plan_key(number: int) -> str:
    """Return the key of a plan; sorted keys are in the order of numbers."""
    return f"{apply_prefix(number)}plan"


def pause_key(number: int) -> str:
    return f"{apply_prefix(number)}pause"


def decision_key(number: int, step: int) -> str:
    """Return the key of a decision, the first of which is 1."""
    return f"{apply_prefix(number)}decisions/{step:06}"


def reports_prefix(number: int) -> str:
    return f"{REPORTS}{number:012}/"


def report_key(number: int, phase: ApplyPhase, member: str) -> str:
    return f"{reports_prefix(number)}{phase}/{member}"


def rollback_key(key: str) -> str:
    return f"{REPORTS}rollbacks/{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def roster_prefix(nonce: str) -> str:
    return f"rosters/{nonce}/"


def roster_key(nonce: str, part: int) -> str:
    return f"{roster_prefix(nonce)}{part:06}"


def member_key(name: str) -> str:
    return f"{MEMBERS}{name}"


def coordinator_key(nonce: str) -> str:
    return f"coordinators/{nonce}"


def floor_key(number: int) -> str:
    return f"{FLOORS}{number:012}"


def rejected_key(digest: str) -> str:
    return f"{REJECTED}{digest}"


def rejected_since_key(number: int, digest: str) -> str:
    return f"{REJECTED_SINCE}{number:012}/{digest}"


def rejected_until_key(number: int, digest: str) -> str:
    return f"{REJECTED_UNTIL}{number:012}/{digest}"


#: After these nobody knows whether the key exists, or will.
UNKNOWN_OUTCOMES = (Reason.DEADLINE_EXCEEDED, Reason.FAULT, Reason.DISK_EXHAUSTED)
_PAUSE_S = 0.2


async def decide(
    coordination: CoordinationStore,
    number: int,
    step: int,
    verdict: Verdict,
    by: str,
    reason: str = "",
    nonce: str = "",
    *,
    among: Collection[str] = (),
) -> Verdict | None:
    """Return what is decided on the plan with a nonce, by this call or by another that was first.

    A time-out decides nothing: the create is repeated until the register answers; the caller bounds
    that. A call that is given up may still decide later. While a member is there that `among` does
    not name, nothing is decided: None. An empty `among` allows any.

    Raises:
        WeightSyncError: PERMISSION_DENIED, UNAUTHENTICATED, NOT_SUPPORTED: this caller decides
            nothing.
    """
    await failpoints.reach("fleet.decide")
    value = encode_verdict(verdict, by, reason, nonce)
    found = await create_until_answered(coordination, decision_key(number, step), value, among)
    await failpoints.reach("fleet.decided")
    return decode_verdict(found, nonce)[0] if found is not None else None


@overload
async def create_until_answered(
    coordination: CoordinationStore, key: str, value: bytes
) -> bytes: ...
@overload
async def create_until_answered(
    coordination: CoordinationStore, key: str, value: bytes, among: Collection[str]
) -> bytes | None: ...
async def create_until_answered(
    coordination: CoordinationStore, key: str, value: bytes, among: Collection[str] = ()
) -> bytes | None:
    """Return what a key holds from now on, having created it where nobody had.

    Returns None, with no key created, if a member is there that `among` does not name. An empty one
    allows any.
    """
    while True:
        try:
            if not among:
                return (await coordination.create(key, value)).value
            keys = [member_key(name) for name in among]
            created = await coordination.create_among(key, value, MEMBERS, keys)
            return created.value if created is not None else None
        except WeightSyncError as error:
            if error.reason not in UNKNOWN_OUTCOMES:
                raise
            logger.warning(
                "the register did not confirm that it has %s, so it is asked again: %s", key, error
            )
        await asyncio.sleep(_PAUSE_S)


class MemberPresence:
    """Keeps a member's key in the register, and heeds what others say of that in theirs.

    Whoever begins a barrier waits for all whose keys are there. So what a member has read counts
    while its key has been there ever since: no barrier can have been committed without it.

    Attributes:
        boot: Which process this is.
        vetoed: Why others refuse what the register says, or empty.
        heeded_at: When they were asked last, by `clock.boottime`.
    """

    def __init__(self, coordination: CoordinationStore, name: str, ttl_s: int) -> None:
        self._coordination, self._key, self._ttl_s = coordination, member_key(name), ttl_s
        self._membership: Membership | None = None
        self._read_at = -1.0
        self.boot, self.vetoed, self.heeded_at = secrets.token_hex(8), "", 0.0

    async def announce(self, value: bytes) -> None:
        """Be there, with this value; others may not see that if this raises."""
        before = self._membership
        self._membership = await self._coordination.member(self._key, value, self._ttl_s)
        if before is not None:
            self._membership.follow(before)
            await before.close()

    async def renew(self) -> None:
        """Be there still, or again; nothing where it was never announced."""
        if self._membership is not None:
            await self._membership.renew()

    async def close(self) -> None:
        """Be gone, so that nothing that was read counts until this is announced again."""
        membership, self._membership = self._membership, None
        if membership is not None:
            await membership.close()

    async def heed_others(self) -> None:
        """Refuse what others refuse that have read more."""
        alive, _ = await self._coordination.members(MEMBERS)
        others = {key: value for key, value in alive.items() if key != self._key}
        self.heeded_at, self.vetoed = clock.boottime(), ""
        if found := refusals(others):
            name, why = min(found.items())
            self.vetoed = f"this host starts nothing, because {name} has read a newer state: {why}"
            raise WeightSyncError(Reason.DATA_CORRUPT, self.vetoed)

    async def found(self) -> bytes | None:
        return await self._coordination.get(self._key)

    def is_others(self, found: bytes) -> bool:
        try:
            return decode_boot(found) != self.boot
        except WeightSyncError:
            # Of another release.
            return True

    def has_read(self, asked_at: float) -> None:
        """Take note of when what is known now was asked for, by `clock.boottime`."""
        self._read_at = asked_at

    @property
    def counts(self) -> bool:
        """Whether others have seen this member at any time since then."""
        return self._membership is not None and self._membership.is_seen_since(self._read_at)

    @property
    def left_s(self) -> float:
        """For how many seconds from now others see this member at least."""
        until = self._membership.valid_until if self._membership is not None else 0.0
        return until - clock.boottime()
