"""What a call with a key is told, also by a server that was started after the call was carried out.

The first life of a call lies in `Calls`; what it changed and was told lies in the journal.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, TypeVar

import xxhash

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import replies
from weightsync_server.engine.journal import Answer
from weightsync_server.engine.outcome import Cause

if TYPE_CHECKING:
    from weightsync_server.engine.journal import Entry, Journal
    from weightsync_server.engine.outcome import PreparedVersion

__all__ = ["Reply", "Request", "cause", "recovered", "refused", "replied", "told"]

Request = pb.ApplyVersionRequest | pb.RollbackRequest
Reply = TypeVar("Reply", pb.ApplyVersionResponse, pb.RollbackResponse)

#: Bounds of what the journal keeps of one answer, bytes.
_MAX_REPLY, _MAX_MESSAGE = 16 << 10, 4 << 10


def cause(request: Request, *, rejects: int = 0, reason: str = "") -> Cause:
    """Return why an apply is made, as the journal tells it."""
    key = request.idempotency_key
    return Cause(key, _digest(request) if key else "", rejects, reason)


def told(journal: Journal, request: Request, kind: type[Reply]) -> Reply | None:
    """Return what an earlier call with this key was told; None: nothing, or it had no effect.

    Raises:
        WeightSyncError: What it was told, if that was a refusal. REQUEST_INVALID: it asked for
            something else.
    """
    entry = journal.answered(request.idempotency_key) if request.idempotency_key else None
    if entry is None or entry.answer is None:
        return None
    if entry.cause.request != _digest(request):
        raise another()
    if not entry.answer.reply:
        facts = {"apply_id": entry.apply_id}
        raise WeightSyncError(Reason.APPLY_RESTORED, entry.answer.refusal, metadata=facts)
    return kind.FromString(base64.b64decode(entry.answer.reply))


def another() -> WeightSyncError:
    """Return the refusal of a key that came with another request before."""
    return WeightSyncError(
        Reason.REQUEST_INVALID,
        "idempotency_key belongs to another request; use a key once, or repeat its request",
    )


def replied(reply: Reply) -> Answer:
    """Return a reply as the journal keeps it; one that is too large goes without its ranks."""
    kept = type(reply)()
    kept.CopyFrom(reply)
    if kept.ByteSize() > _MAX_REPLY:
        del kept.report.ranks[:]
    return Answer(reply=base64.b64encode(kept.SerializeToString()).decode())


def refused(message: str) -> Answer:
    """Return the refusal of an apply that was restored as the journal keeps it."""
    return Answer(refusal=message.encode()[:_MAX_MESSAGE].decode(errors="ignore"))


def recovered(intent: Entry, held: PreparedVersion, *, rejected: bool) -> Answer:
    """Return the answer to a call that lost its server, or its engine, after its last write.

    Args:
        intent: What it was about to do.
        held: What every rank was found to hold, which is just that.
        rejected: Whether the version that a rollback left is rejected.
    """
    report = replies.recovered(intent, held)
    left = intent.cause.rejects
    if left:
        return replied(pb.RollbackResponse(report=report, rejected_version=left * rejected))
    return replied(pb.ApplyVersionResponse(report=report))


def _digest(request: Request) -> str:
    # With its name: the fields of one request may be read as those of another.
    name = request.DESCRIPTOR.full_name.encode()
    return xxhash.xxh3_128_hexdigest(name + b"\0" + request.SerializeToString(deterministic=True))
