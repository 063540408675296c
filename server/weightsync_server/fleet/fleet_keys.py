"""The keys of a fleet in its register.

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

All but the first two are created once and never change.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_server.fleet.fleet_plan import ApplyPhase

__all__ = [
    "APPLIES",
    "FLOORS",
    "MEMBERS",
    "REJECTED",
    "REJECTED_SINCE",
    "REJECTED_UNTIL",
    "REPORTS",
    "apply_prefix",
    "coordinator_key",
    "decision_key",
    "floor_key",
    "member_key",
    "pause_key",
    "plan_key",
    "rejected_key",
    "rejected_since_key",
    "rejected_until_key",
    "report_key",
    "reports_prefix",
    "rollback_key",
    "roster_key",
    "roster_prefix",
]

APPLIES, FLOORS, MEMBERS, REJECTED = "applies/", "floors/", "members/", "rejected/"
REPORTS = "reports/"
REJECTED_SINCE, REJECTED_UNTIL = f"{REJECTED}since/", f"{REJECTED}until/"


def apply_prefix(number: int) -> str:
    """Return what all that is planned and decided of an apply begins with."""
    return f"{APPLIES}{number:012}/"


def plan_key(number: int) -> str:
    """Return the key of a plan; its sorted names are in the order of numbers."""
    return f"{apply_prefix(number)}plan"


def pause_key(number: int) -> str:
    """Return the key that lets a barrier's members pause."""
    return f"{apply_prefix(number)}pause"


def decision_key(number: int, step: int) -> str:
    """Return the key of a decision, the first of which is 1."""
    return f"{apply_prefix(number)}decisions/{step:06}"


def reports_prefix(number: int) -> str:
    """Return what all reports on an apply begin with."""
    return f"{REPORTS}{number:012}/"


def report_key(number: int, phase: ApplyPhase, member: str) -> str:
    """Return the key of a member's report."""
    return f"{reports_prefix(number)}{phase}/{member}"


def rollback_key(key: str) -> str:
    """Return the key that outlasts a rollback.

    Args:
        key: Idempotency key of the call.
    """
    return f"{REPORTS}rollbacks/{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def roster_prefix(nonce: str) -> str:
    """Return what all parts of a roster begin with."""
    return f"rosters/{nonce}/"


def roster_key(nonce: str, part: int) -> str:
    """Return the key of a part of a roster."""
    return f"{roster_prefix(nonce)}{part:06}"


def member_key(name: str) -> str:
    """Return the key of a member."""
    return f"{MEMBERS}{name}"


def coordinator_key(nonce: str) -> str:
    """Return the key of the coordinator of a plan."""
    return f"coordinators/{nonce}"


def floor_key(number: int) -> str:
    """Return the key that says that applies below a number count no more."""
    return f"{FLOORS}{number:012}"


def rejected_key(digest: str) -> str:
    """Return the key that rejects a content."""
    return f"{REJECTED}{digest}"


def rejected_since_key(number: int, digest: str) -> str:
    """Return the key that rejects a content after the COMMIT of an apply."""
    return f"{REJECTED_SINCE}{number:012}/{digest}"


def rejected_until_key(number: int, digest: str) -> str:
    """Return the key that has a content accepted again after the COMMIT of an apply."""
    return f"{REJECTED_UNTIL}{number:012}/{digest}"
