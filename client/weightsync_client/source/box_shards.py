"""Shards of which a process holds boxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weightsync.model.digest import TensorDigester
from weightsync.model.manifest import ShardEntry, TensorEntry
from weightsync_client.source.shards import Shard, TensorReader
from weightsync_client.source.tensors import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync.model.boxes import Box
    from weightsync_client.source.sharded_tensors import BoxSource
    from weightsync_client.source.tensors import SourceTensor

__all__ = ["BoxShard", "LocalBox", "box_shards"]

#: Bytes that are digested at a time.
_PIECE = 4 << 20


class LocalBox(NamedTuple):
    """A box of one of a shard's tensors.

    Attributes:
        tensor: Position of the tensor in the shard.
        box: The part of it.
        bytes: What lies there.
    """

    tensor: int
    box: Box
    bytes: SourceTensor


@dataclass(frozen=True, slots=True)
class BoxShard(Shard):
    """A process's part of a shard: its bytes are those of the boxes that it sends, in a row.

    Attributes:
        whole: What all processes together push; it has no bytes.
        sent: Boxes that it sends; their bytes are `entry` and `tensors`.
        replicas: Boxes that a lower writer sends.
    """

    whole: Shard
    sent: tuple[LocalBox, ...]
    replicas: tuple[LocalBox, ...]

    @property
    def data_start(self) -> int:
        """The server makes the header."""
        return 0

    def other_digests(self) -> list[bytes]:
        """Return the digests of the replicas."""
        scratch = Scratch(views=True)
        return [_digest(local.bytes, scratch) for local in self.replicas]


def box_shards(shards: Iterable[Shard], sources: Sequence[BoxSource]) -> list[BoxShard]:
    """Return what a process sends of each shard.

    Args:
        shards: Of the whole version, without bytes.
        sources: All tensors, with what the process holds of them.
    """
    by_name = {source.whole.name: source for source in sources}
    return [
        _box_shard(shard, [by_name[tensor.name] for tensor in shard.tensors]) for shard in shards
    ]


def _box_shard(shard: Shard, sources: Sequence[BoxSource]) -> BoxShard:
    sent: list[LocalBox] = []
    replicas: list[LocalBox] = []
    for position, source in enumerate(sources):
        local = [LocalBox(position, box, tensor) for box, tensor in source.boxes]
        (replicas if source.replica else sent).extend(local)
    entries, begin = [], 0
    for box in sent:
        tensor, end = box.bytes, begin + box.bytes.size
        entries.append(
            TensorEntry(tensor.name, tensor.dtype, tensor.shape, shard.index, begin, end)
        )
        begin = end
    tensors = tuple(box.bytes for box in sent)
    return BoxShard(
        shard.index,
        ShardEntry(shard.entry.name, begin, 0),
        tuple(entries),
        lambda scratch: TensorReader(b"", tensors, scratch),
        shard,
        tuple(sent),
        tuple(replicas),
    )


def _digest(tensor: SourceTensor, scratch: Scratch) -> bytes:
    digester, read = TensorDigester(), tensor.reader(scratch)
    for begin in range(0, tensor.size, _PIECE):
        digester.update(read(begin, min(begin + _PIECE, tensor.size)))
    return digester.digest()
