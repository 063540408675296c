"""The shards of a delta: encoded one after the other while those before are on their way."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from weightsync.delta import EncodedShard, Encoder
from weightsync.delta.coding import element_width
from weightsync.digest import content_digest
from weightsync_client.deltas.room import room_for
from weightsync_client.deltas.snapshot import Held
from weightsync_client.fallback import PAYS_BELOW, Fallback, Unfit
from weightsync_client.shards import Shard, blob_shard
from weightsync_client.tensors import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from weightsync_client.tensors import SourceTensor

__all__ = ["DeltaShards", "default_threads"]

#: Source bytes for one shard, or a sixteenth of all: the first is on its way early, and a large
#: model is no heap of little files.
_GROUP_BYTES, _GROUPS = 64 << 20, 16
_MOST_THREADS = 8


def default_threads() -> int:
    """Return how many threads encode: the trainer's own work needs the rest of a large host."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _groups(tensors: Iterable[SourceTensor], threads: int) -> Iterator[list[SourceTensor]]:
    """Yield groups for one shard each, largest tensors first.

    A group holds enough beside its largest tensor, which is one thread's work, for the others.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.size)
    least = max(_GROUP_BYTES, sum(tensor.size for tensor in ordered) // _GROUPS)
    group: list[SourceTensor] = []
    size = 0
    for tensor in ordered:
        group.append(tensor)
        size += tensor.size
        if size >= max(least, threads * group[0].size):
            yield group
            group, size = [], 0
    if group:
        yield group


class DeltaShards(Iterable[Shard]):
    """What changed since a base. Shards stay until the commit: they are what the base becomes.

    Iterating makes the shards; iterating again gives those that were made, then makes the rest. The
    caller's tensors are not in use any more once all were made.

    Args:
        tensors: The tensors of the new version; names, dtypes and shapes are those of the base.
        base: What they are compared with; it must not change meanwhile.
        layout_size: Bytes of a push in full.
        zstd: Whether streams are packed.
    """

    def __init__(
        self, tensors: Sequence[SourceTensor], base: Held, layout_size: int, *, zstd: bool
    ) -> None:
        self.threads = default_threads()
        self._base = base
        self._shapes = {t.name: (t.dtype, t.shape) for t in tensors}
        self._layout_size = layout_size
        self._groups = _groups(tensors, self.threads)
        self._encoder = Encoder(zstd=zstd, threads=self.threads)
        self._made: list[EncodedShard] = []
        self._digests: dict[str, bytes] = {}
        self._compared = self._size = self._elements = self._changed = 0
        self.whole = False
        #: Tensors by coding.
        self.codings: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Shard]:
        at = 0
        while at < len(self._made) or self._make():
            made = self._made[at]
            yield blob_shard(made.blob.data, at, f"delta-{at:05}.safetensors")
            at += 1

    def _make(self) -> bool:
        """Encode the next shard; returns False when there is none."""
        if self.whole:
            return False
        for group in self._groups:
            encoded = self._encode(group)
            if any(stats.changed for stats in encoded.stats):
                self._made.append(encoded)
                return True
        self.whole = True
        if not self._made:
            # Nothing changed: one shard says so.
            self._made.append(self._encode([]))
            return True
        return False

    def _encode(self, group: list[SourceTensor]) -> EncodedShard:
        size = sum(tensor.size for tensor in group)
        if not room_for(size):
            raise Unfit(Fallback.NO_ROOM, "memory is too short for the shards of a delta")
        scratch = Scratch()
        encoded = self._encoder.encode_shard(
            [self._base.tensors[tensor.name].item(tensor, scratch) for tensor in group],
            base_content_digest=self._base.content_digest,
            layout_digest=self._base.signature,
            index=len(self._made),
        )
        self._compared += size
        self._size += encoded.blob.nbytes
        for stats in encoded.stats:
            self._digests[stats.name] = stats.digest
            self._changed += stats.nnz
            self._elements += stats.dense_bytes // element_width(self._shapes[stats.name][0])
            self.codings[stats.coding] += 1
        self._check_pays()
        return encoded

    def _check_pays(self) -> None:
        # A quarter of all bytes is a fair sample; and more than all is never sent.
        judged = self._compared * 4 >= self._layout_size
        dense = self._compared if judged else self._layout_size
        if self._compared and self._size > PAYS_BELOW * dense:
            raise Unfit(
                Fallback.TOO_DENSE,
                f"{self._size} bytes of changes in {self._compared} bytes are hardly fewer",
            )

    def close(self) -> None:
        """End the threads that encode, and let go of what they have left."""
        self._encoder.close()
        self._base.forget()

    @property
    def blobs(self) -> list[NDArray[np.uint8]]:
        """The bytes of the shards that were made."""
        return [made.blob for made in self._made]

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of every shard that was made, by index."""
        return {made.index: made.blob.nbytes for made in self._made}

    @property
    def base_content_digest(self) -> str:
        """Content digest of the base."""
        return self._base.content_digest

    @property
    def base_version(self) -> int:
        """Number of the base."""
        return self._base.version

    @property
    def content_digest(self) -> str:
        """Content digest of the new version, from the digests of all its tensors."""
        return content_digest(
            (name, dtype, shape, self._digests[name])
            for name, (dtype, shape) in self._shapes.items()
        )

    @property
    def changed_fraction(self) -> float:
        """Share of the elements that changed."""
        return self._changed / self._elements if self._elements else 0.0
