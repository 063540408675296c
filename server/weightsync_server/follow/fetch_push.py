"""A fetch as the push that receives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from weightsync_server.follow.fetch_plan import Fetch

__all__ = ["begin_request", "push_key"]


def push_key(fetch: Fetch) -> str:
    """Return the idempotency key of the push that a fetch is, the same after a restart."""
    # With its number: an origin may have one content under several.
    version, form = fetch.version, "delta" if fetch.delta else "full"
    return f"follow-{version.version}-{version.content_digest}-{form}"


def begin_request(fetch: Fetch, key: str) -> pb.BeginPushRequest:
    """Return the call that opens the push of a version; the same one finds it again."""
    version = fetch.version
    request = pb.BeginPushRequest(
        model=version.model,
        version=version.version,
        kind=pb.PUSH_KIND_DELTA if fetch.delta else pb.PUSH_KIND_FULL,
        total_bytes=version.delta_bytes if fetch.delta else version.size_bytes,
        metadata=version.metadata,
        idempotency_key=key,
    )
    if fetch.delta:
        request.base_content_digest = version.base_content_digest
    else:
        request.shard_count = version.shard_count
    return request
