"""What changed in the boxes that one of several processes sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.model.layout import MAX_NAME_BYTES
from weightsync_client.push_reasons import Fallback, Unfit
from weightsync_client.source.box_shards import BoxShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightsync_client.snapshot.delta_shards import DeltaShards
    from weightsync_client.source.shards import Shard
    from weightsync_client.source.tensors import SourceTensor

__all__ = ["box_deltas", "of_boxes"]


def of_boxes(shards: Iterable[Shard]) -> Iterator[list[SourceTensor]]:
    """Yield the boxes that are sent of each shard, where there are any.

    Raises:
        Unfit: The name of one is too long for a delta.
    """
    for shard in shards:
        boxes = [local.bytes for local in shard.sent] if isinstance(shard, BoxShard) else []
        for box in boxes:
            if len(box.name.encode()) > MAX_NAME_BYTES:
                raise Unfit(Fallback.REFUSED, f"{box.name[:100]!r}... is too long a name")
        if boxes:
            yield boxes


def box_deltas(shards: Iterable[Shard], deltas: DeltaShards) -> list[Shard]:
    """Return shards sent as what changed; the caller's tensors are not in use any more.

    All is made first: once a process has declared what it sends of a shard, that stays so.

    Args:
        shards: Of which this process sends boxes.
        deltas: Of the groups that `of_boxes` makes of them, none of which was made yet.

    Raises:
        Unfit: It would not be much less than all.
    """
    made = iter(deltas)
    return [
        shard.as_changed(next(made), deltas.digests)
        if isinstance(shard, BoxShard) and shard.sent
        else shard
        for shard in shards
    ]
