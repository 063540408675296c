"""Shards of which a process holds boxes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from weightsync.model.digest import TensorDigester
from weightsync.model.manifest import ShardEntry, TensorEntry
from weightsync_client.source.shards import Shard, TensorReader
from weightsync_client.source.tensors import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
        changed: The digests of both, where it sends what changed in the boxes: its bytes are those
            of a delta shard then, and nothing is read of the boxes any more.
    """

    whole: Shard
    sent: tuple[LocalBox, ...]
    replicas: tuple[LocalBox, ...]
    changed: list[bytes] | None = None

    @property
    def data_start(self) -> int:
        """The server makes the header."""
        return 0

    def all_digests(self, sent: list[bytes]) -> list[bytes]:
        """Return the digests of all boxes.

        Args:
            sent: Of those whose bytes were read as they were sent.
        """
        if self.changed is not None:
            return self.changed
        scratch = Scratch(views=True)
        return sent + [_digest(local.bytes, scratch) for local in self.replicas]

    def as_changed(self, delta: Shard, digests: Mapping[str, bytes]) -> BoxShard:
        """Return the same, sent as what changed.

        Args:
            delta: A delta shard of the boxes that it sends.
            digests: Of these, by the names of the boxes.
        """
        entry = ShardEntry(self.entry.name, delta.entry.size, 0)
        every = self.all_digests([digests[local.bytes.name] for local in self.sent])
        return replace(self, entry=entry, tensors=(), open=delta.open, changed=every)


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
