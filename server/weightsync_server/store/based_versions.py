"""Which versions can be read: a delta needs its base, and the one that it was made on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync_server.store.store_records import CommitRecord

__all__ = ["based"]


def based(records: Iterable[CommitRecord]) -> tuple[list[CommitRecord], list[CommitRecord]]:
    """Return the versions that can be read, and those whose base is not there or another one.

    Args:
        records: Of one model, by version: a base was there before what is based on it.
    """
    good: dict[int, CommitRecord] = {}
    others = []
    for record in records:
        base = good.get(record.base_version)
        if record.base_version and (
            base is None
            or (base.content_digest, base.layout_digest)
            != (record.base_content_digest, record.layout_digest)
        ):
            others.append(record)
        else:
            good[record.version] = record
    return list(good.values()), others
