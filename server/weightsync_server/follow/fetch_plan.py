"""Which versions are fetched to have the newest one, or a wanted one, and in which form."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightsync_server.store.store_records import CommitRecord

__all__ = ["LONGEST_CHAIN", "Fetch", "fetch_plan"]

#: Deltas in a row that are fetched where the version in full would do.
LONGEST_CHAIN = 10


class Fetch(NamedTuple):
    """One version to fetch.

    Attributes:
        version: As the origin has it.
        delta: Only what changes from its base, which is here by then.
    """

    version: CommitRecord
    delta: bool


def fetch_plan(
    versions: Sequence[CommitRecord],
    highest: int,
    present: Callable[[CommitRecord], bool],
    base_here: Callable[[CommitRecord], bool],
    trusted: Callable[[CommitRecord], bool],
    wanted: CommitRecord | None = None,
) -> list[Fetch]:
    """Return what to fetch, in this order, to have one version; nothing else is.

    A chain of deltas from a version that is here, where it is short enough; else the version in
    full. Versions that no chain needs are left out.

    Args:
        versions: Those of the origin.
        highest: Highest number that was used here: what comes of a chain must lie above it.
        present: Whether a version is here, with the same content.
        base_here: Whether it is here in the same shards, too: those of a delta's version are its
            base's.
        trusted: Whether the delta of a version may be fetched.
        wanted: That version, one of `versions`, whatever its number; None: the newest, if it lies
            above all that was used here.
    """
    by_number = {version.version: version for version in versions}
    newest = by_number[max(by_number)] if by_number else None
    target = wanted or newest
    if target is None or present(target) or (wanted is None and target.version <= highest):
        return []
    chain: list[Fetch] = []
    at = target
    while (at is wanted or at.version > highest) and trusted(at) and len(chain) < LONGEST_CHAIN:
        base = by_number.get(at.base_version)
        if base is None or base.content_digest != at.base_content_digest:
            break
        chain.append(Fetch(at, delta=True))
        if base_here(base):
            return chain[::-1]
        at = base
    return [Fetch(target, delta=False)]
