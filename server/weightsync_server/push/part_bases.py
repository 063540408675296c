"""Which version a push of some tensors by several writers keeps the others of: one, for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.deltas.bases import find_base, mismatch

if TYPE_CHECKING:
    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import Model
    from weightsync_server.push.state import PushState

__all__ = ["check_same_part", "part_base"]


def part_base(model: Model, request: pb.BeginPushRequest) -> VersionRecord:
    """Return the version that the first writer to come names, else the live one.

    Raises:
        WeightSyncError: VERSION_UNKNOWN; BASE_MISMATCH: it has other content, or is damaged.
    """
    table, digest = model.table, request.base_content_digest
    if digest and not request.base_version:
        return find_base(table, digest, request.metadata.get("run_id", ""))
    wanted = request.base_version or model.serving.live
    base = table.find(wanted)
    if base is None or base.commit is None:
        which = f"version {wanted}" if wanted else "a live version"
        raise WeightSyncError(
            Reason.VERSION_UNKNOWN,
            f"a partial push keeps the tensors of {which}, which the server has not got; name "
            "another one with base=, or push all tensors",
        )
    damaged = next((record for record in base.chain if record.damaged), None)
    if damaged is not None:
        raise mismatch(table, f"version {damaged.version} is damaged in the store")
    if digest not in ("", base.content_digest):
        raise mismatch(table, f"version {wanted} has content {base.content_digest}, not {digest}")
    return base


def check_same_part(state: PushState, request: pb.BeginPushRequest) -> None:
    """Refuse a writer that keeps other tensors than those who came before it.

    One that names no base takes that of the others.

    Raises:
        WeightSyncError: LAYOUT_INVALID, naming it.
    """
    first, base = state.request.writer, state.record.base
    if request.partial != state.request.partial:
        some, whole = (request.writer, first) if request.partial else (first, request.writer)
        raise _refused(
            request.writer,
            f"writer {some} pushes some tensors, writer {whole} all of them; all writers of a push "
            "do the same",
        )
    if not request.partial or base is None:
        return
    version, digest = request.base_version, request.base_content_digest
    if version in (0, base.version) and digest in ("", base.content_digest):
        return
    named = f"version {version}" if version else "a version"
    content = f" with content {digest}" if digest else ""
    raise _refused(
        request.writer,
        f"writer {request.writer} keeps the other tensors of {named}{content}, writer {first} "
        f"those of version {base.version} with content {base.content_digest}; all writers of a "
        "push name one base with base=, or none",
    )


def _refused(writer: int, problem: str) -> WeightSyncError:
    return WeightSyncError(Reason.LAYOUT_INVALID, problem, metadata={"writer": str(writer)})
