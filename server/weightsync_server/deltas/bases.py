"""Which version a delta may be based on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable

__all__ = ["find_base", "mismatch"]

_RUN = "run_id"


def find_base(versions: VersionTable, content_digest: str, run_id: str) -> VersionRecord:
    """Return the newest version with this content that a delta can be based on.

    Args:
        versions: All versions of the model.
        content_digest: Of the base, as the trainer names it.
        run_id: Of the trainer's run; empty: it does not say.

    Raises:
        WeightSyncError: BASE_MISMATCH, telling what is held.
    """
    why = f"no version here has content {content_digest}"
    # What this host alone has comes last: nobody else has it for a base.
    for base in sorted(versions.list(), key=lambda record: -record.order):
        if base.commit is None or base.content_digest != content_digest:
            continue
        damaged = next((record for record in base.chain if record.damaged), None)
        other = base.metadata.get(_RUN, "")
        if damaged is not None:
            why = f"version {damaged.version} is damaged in the store"
        elif run_id and other and run_id != other:
            why = f"version {base.version} is of run {other[:100]!a}"
        else:
            return base
    raise mismatch(versions, why)


def mismatch(versions: VersionTable, why: str) -> WeightSyncError:
    """Return the refusal of a delta whose base cannot be had."""
    newest = versions.find(versions.newest)
    digest = newest.content_digest if newest is not None else ""
    return WeightSyncError(
        Reason.BASE_MISMATCH,
        f"the delta has no base: {why}, the newest is version {versions.newest} with content "
        f"{digest or '(none)'}; push this version in full",
        metadata={"held_version": str(versions.newest), "held_content_digest": digest},
    )
