"""Where a follower's versions come from, whatever that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_server.push.parts import Push
    from weightsync_server.replicate.fetch_plan import Fetch
    from weightsync_server.store.store_records import CommitRecord


class Origin(Protocol):
    """A server or a store that has the versions. Nothing of it is believed before it is proved.

    `patience_s` is how long a version that it lacks may yet come to it from where it has its own.
    """

    url: str
    patience_s: float

    async def versions(self) -> Sequence[CommitRecord]:
        """Return the committed versions that exist now, by number."""

    async def changed(self) -> None:
        """Return when versions may have changed since the last return of this, or after a while."""

    async def bring(self, push: Push, fetch: Fetch) -> None:
        """Bring all bytes of a version into the segments of its push, as far as they lack.

        `push` is open; it proves what comes, and fails where that is not what it should be.
        """

    async def probes(self, version: CommitRecord) -> pb.Probes | None:
        """Return the probes of a version; None: it has none."""

    async def close(self) -> None:
        """Let go of it."""
