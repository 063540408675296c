"""What writers changed in their boxes is laid over these as their bases have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.boxes import box_name
from weightsync_server.ops.tasks import all_done
from weightsync_server.workers.fetch.fetch_api import PatchOrder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from weightsync.shm.segments import Segment
    from weightsync_server.push.box_upload import BoxUpload, TensorBox
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["lay_changes"]

#: What changes that are wrong in themselves show themselves as.
_WRONG = frozenset({Reason.SHARD_INVALID, Reason.DIGEST_MISMATCH, Reason.LAYOUT_INVALID})


async def lay_changes(fetch: FetchApi, shard: ShardState, segment: Segment) -> None:
    """Make the boxes of writers of those of their bases, where they sent what changed in them.

    Raises:
        WeightSyncError: SHARD_INVALID, DIGEST_MISMATCH, naming a writer. FETCHER_FAILED,
            SHUTTING_DOWN.
    """
    uploads = sorted(shard.writers.boxes.values(), key=lambda upload: upload.writer)
    seen: set[TensorBox] = set()
    laid = []
    for upload in uploads:
        # A box that several send is laid once: two that change it at a time make neither.
        laid.append(_lay(fetch, shard, upload, segment, frozenset(seen)))
        seen |= set(upload.sent)
    await all_done(laid)


async def _lay(
    fetch: FetchApi,
    shard: ShardState,
    upload: BoxUpload,
    segment: Segment,
    skipped: AbstractSet[TensorBox],
) -> None:
    patch, tensors = upload.patch, shard.tensors or ()
    if patch is None:
        return
    kinds: dict[str, tuple[str, Sequence[int]]] = {}
    names: dict[str, str] = {}
    boxes = []
    for one, span in zip(upload.sent, upload.spans, strict=True):
        tensor = tensors[one.tensor]
        name = box_name(tensor.name, one.box)
        kinds[name] = tensor.dtype, one.box.sizes
        names[name] = f"{tensor.name}{one.box}"
        if one not in skipped:
            boxes.append((name, span))
    order = PatchOrder(patch.size, patch.base_content_digest, kinds, boxes)
    try:
        await fetch.patch_boxes(segment, patch.base, patch.segment, order)
    except WeightSyncError as error:
        if error.reason not in _WRONG:
            raise
        raise WeightSyncError(
            error.reason,
            f"the changes of writer {upload.writer} in shard {shard.index}: "
            f"{_readable(error.message, names)}",
            metadata={"writer": str(upload.writer)},
        ) from error
    patch.discard()
    upload.patch = None


def _readable(message: str, names: Mapping[str, str]) -> str:
    """Return a sentence with boxes named by their tensor and its rows, as people do."""
    for name in sorted(names, key=len, reverse=True):
        message = message.replace(name, names[name])
    return message
