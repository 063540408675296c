"""A version besides the newest that somebody waits for: the origin's, by number or content."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync_server.store.store_records import CommitRecord

__all__ = ["Wanted"]


class Wanted(NamedTuple):
    """A version that is to come from the origin.

    Attributes:
        version: Its number.
        content_digest: Its content, 32 hexadecimal digits; empty: whatever the origin has under
            that number.
    """

    version: int
    content_digest: str = ""

    def among(self, versions: Sequence[CommitRecord]) -> CommitRecord | None:
        """Return it of those of an origin, by number, or the newest other one with its content."""
        numbered = [one for one in versions if one.version == self.version]
        if not self.content_digest:
            return next(iter(numbered), None)
        same = [one for one in versions if one.content_digest == self.content_digest]
        return next((one for one in numbered if one in same), same[-1] if same else None)

    def refusal(self, versions: Sequence[CommitRecord], url: str) -> WeightSyncError:
        """Return why it cannot come from an origin that has these versions, by number."""
        newest = versions[-1].version if versions else 0
        numbered = [one for one in versions if one.version == self.version]
        if numbered:
            lacks = (
                f"version {self.version} has content {numbered[0].content_digest} in {url}, not "
                f"{self.content_digest}, which is wanted"
            )
        else:
            lacks = f"version {self.version} is neither on this host nor in {url}"
        known = f"the newest there is {newest}" if newest else "there is none yet"
        again = "its content there again" if self.content_digest else "it there first"
        return WeightSyncError(
            Reason.VERSION_UNKNOWN,
            f"{lacks}: {known}; push {again}, or apply one that is there",
            metadata={"newest_version": str(newest)},
        )
