"""What is known of a member, as people see it, also of one of another release."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from weightsync import __version__
from weightsync.model.manifest import MAX_VERSION
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.fleet import fleet_records
from weightsync_server.store.documents import decode_document

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["list_member", "no_member"]

_DAMAGED = "unknown: its record in the register is damaged; restart its server"


def list_member(name: str, value: bytes) -> pb.FleetMember:
    """Return all that can be told of a member, and whether its release is older than this one.

    Nothing rests on it: what a record does not say, or says in another way, is left out.

    Args:
        name: Of the member.
        value: What it says of itself in the register, in any format.
    """
    try:
        record = decode_document(value)
    except ValueError:
        return pb.FleetMember(name=name, state=_DAMAGED)
    member = pb.FleetMember(
        name=name,
        address=_text(record, "address"),
        state=_text(record, "mode") or "unknown",
        release=_text(record, "release"),
        older=_is_older(record),
        reason=_text(record, "why"),
    )
    match record.get("live"):
        case [int(number), str(digest)] if 0 < number <= MAX_VERSION:
            member.live_version, member.content_digest = number, _clean(digest)
    return member


def no_member(key: str, name: str) -> pb.FleetMember:
    """Return what is told of a key among theirs that no process has put there.

    Args:
        key: The key.
        name: That of a member to which it would belong.
    """
    return pb.FleetMember(
        name=name,
        state=f"no member: remove {key} from the register, where nobody renews it",
        reason="nobody waits for it",
    )


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    return _clean(value) if isinstance(value, str) else ""


def _clean(text: str) -> str:
    # JSON may have halves of characters, which no message takes.
    return text.encode(errors="replace").decode()


def _is_older(record: Mapping[str, Any]) -> bool:
    """Tell whether a release older than this one wrote a record; the first did not say which."""
    reads, newest = record.get("reads"), fleet_records.FORMAT
    if not isinstance(reads, int) or reads < newest:
        return True
    return reads == newest and _numbers(_text(record, "release")) < _numbers(__version__)


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]+", release)[:3]]
