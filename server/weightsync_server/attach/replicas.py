"""Parts of tensors that several ranks have, which must be the same on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync_server.engine.worker_reports import RankCommit

__all__ = ["check_agreed"]


def check_agreed(ranks: Sequence[RankCommit], name: str) -> None:
    """Accept what ranks have digested.

    Args:
        ranks: What each has answered.
        name: What each must call its content now.

    Raises:
        WeightSyncError: DATA_CORRUPT: a rank did not do it, or two hold other bytes of one part.
    """
    first: dict[str, RankCommit] = {}
    for rank in ranks:
        if rank.error or rank.content_digest != name:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"rank {rank.rank} did not digest what was written ({rank.error or 'no answer'})",
            )
        for part, digest in rank.parts.items():
            other = first.setdefault(part, rank)
            if other.parts[part] != digest:
                raise WeightSyncError(
                    Reason.DATA_CORRUPT,
                    f"ranks {other.rank} and {rank.rank} hold other bytes of the same part of "
                    f"{part.split(' ')[0]}; write every place of a tensor, as `write` does",
                )
