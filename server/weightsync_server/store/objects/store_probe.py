"""What is asked of a bucket before anything is kept in it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.documents import decode_document, encode_document
from weightsync_server.store.objects.object_keys import MARKER

if TYPE_CHECKING:
    from weightsync_server.store.objects.object_client import ObjectClient

__all__ = ["claim", "probe"]


async def claim(client: ObjectClient, kind: str = "store", marker: str = MARKER) -> None:
    """Make a place a store of ours, or find that it is one.

    Args:
        client: The place.
        kind: What is to be there.
        marker: Key of the object that says so.

    Raises:
        WeightSyncError: NOT_SUPPORTED: of a newer release, or damaged; REQUEST_INVALID: something
            else is there.
    """
    ours = encode_document({"format": 1})
    body = await client.get(marker)
    if body is None:
        # Another server may have made it a store meanwhile.
        if not await client.is_empty() and (body := await client.get(marker)) is None:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{client.url} is no WeightSync {kind} and not empty; name a prefix of its own",
            )
        body = body or await client.create(marker, ours)
    try:
        known = decode_document(body).get("format")
    except ValueError:
        known = None
    if known != 1:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"{client.url}/{marker} has format {known!r}: it is damaged, or of a newer release of "
            "this server; use that release",
        )


async def probe(client: ObjectClient) -> None:
    """Refuse a store that creates a key which exists: two writers would both have committed.

    Raises:
        WeightSyncError: NOT_SUPPORTED.
    """
    # No model has such a name.
    key, first = f"_probe/{secrets.token_hex(16)}", b"first"
    try:
        await client.try_create(key, first)
        again = await client.try_create(key, b"second")
        if again or await client.get(key) != first:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                f"the store at {client.url} wrote over an object although it was asked to create "
                "it only where there is none (If-None-Match: *); use a store that keeps this "
                "promise, such as Amazon S3, Google Cloud Storage, Azure or MinIO",
            )
    finally:
        await client.delete([key])
