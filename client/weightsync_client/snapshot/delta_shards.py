"""The shards of a delta: encoded one after the other while those before are on their way."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.delta import EncodedShard, Encoder
from weightsync.delta.coding import element_width
from weightsync.errors import Reason
from weightsync.model.digest import content_digest, tensor_digest
from weightsync_client.errors import refuse
from weightsync_client.push_reasons import PAYS_BELOW, Fallback, Unfit
from weightsync_client.snapshot.copy_budget import room_for
from weightsync_client.snapshot.host_tensor import all_bytes, snapshot_source
from weightsync_client.snapshot.snapshot import Snapshot
from weightsync_client.source.shards import Shard, blob_shard
from weightsync_client.source.tensors import Scratch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from weightsync_client.snapshot.host_tensor import SnapshotTensor
    from weightsync_client.snapshot.snapshot import BaseVersion
    from weightsync_client.source.tensors import SourceTensor

__all__ = ["DeltaShards", "default_threads"]

_MOST_THREADS = 8


def default_threads() -> int:
    """Return how many threads encode: the trainer's own work needs the rest of a large host."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


class DeltaShards(Iterable[Shard]):
    """What changed since a base. Shards stay until the commit: they are what the base becomes.

    Iterating makes the shards; iterating again gives those that were made, then makes the rest. The
    caller's tensors are not in use any more once all were made.

    Args:
        groups: The tensors of the new version, those of each shard together.
        base: What they are compared with; it must not change meanwhile.
        zstd: Whether streams are packed.
        most_changed: Share of changed elements from which on all is sent.
        partial: Tensors that the groups lack stay as they are in the base.
        every: Groups in which nothing changed make a shard as well.
    """

    def __init__(
        self,
        groups: Iterator[list[SourceTensor]],
        base: BaseVersion,
        *,
        zstd: bool,
        most_changed: float = 1.0,
        partial: bool = False,
        every: bool = False,
    ) -> None:
        self.threads = default_threads()
        self._base = base
        self._most_changed = most_changed
        self._partial = partial
        self._every = every
        self._groups = groups
        #: Taken from the groups and not encoded yet.
        self._taken: list[SourceTensor] = []
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
        while taken := next(self._groups, []):
            self._taken = taken
            # Nobody else holds the tensors of an iterable.
            del taken
            encoded = self._encode(self._taken)
            self._digests |= {stats.name: stats.digest for stats in encoded.stats}
            self._taken = []
            if self._every or any(stats.changed for stats in encoded.stats):
                self._made.append(encoded)
                return True
        if not self._partial:
            self._refuse_missing()
        self.whole = True
        if not self._made:
            # Nothing changed: one shard says so.
            self._made.append(self._encode([]))
            return True
        return False

    def _encode(self, group: list[SourceTensor]) -> EncodedShard:
        for tensor in group:
            self._refuse_other(tensor)
        size = sum(tensor.size for tensor in group)
        if not room_for(size):
            raise Unfit(Fallback.NO_ROOM, "memory is too short for the shards of a delta")
        encoded = self._encoder.encode_shard(
            self._base.items(group, Scratch()),
            base_content_digest=self._base.content_digest,
            layout_digest=self._base.signature,
            index=len(self._made),
        )
        self._compared += size
        self._size += encoded.blob.nbytes
        for stats in encoded.stats:
            self._changed += stats.nnz
            dtype = self._base.tensors[stats.name].dtype
            self._elements += stats.dense_bytes // element_width(dtype)
            self.codings[stats.coding] += 1
        if not self._partial:
            self._check_pays()
        return encoded

    def _check_pays(self) -> None:
        # A quarter of all bytes is a fair sample; and more than all is never sent.
        judged = self._compared * 4 >= self._base.size
        if judged and self._changed > self._most_changed * self._elements:
            raise Unfit(Fallback.TOO_DENSE, f"{self.changed_fraction:.0%} of what was seen changed")
        dense = self._compared if judged else self._base.size
        if self._compared and self._size > PAYS_BELOW * dense:
            raise Unfit(
                Fallback.TOO_DENSE,
                f"{self._size} bytes of changes in {self._compared} bytes are hardly fewer",
            )

    def _refuse_other(self, tensor: SourceTensor) -> None:
        old = self._base.tensors.get(tensor.name)
        if old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape):
            return
        if self._partial:
            kept = f"{old.dtype} {list(old.shape)}" if old is not None else "not at all"
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, in version "
                f"{self._base.version}, whose other tensors a partial push keeps, it is {kept}; "
                "leave it out, or push all tensors",
            )
        raise Unfit(
            Fallback.LAYOUT_CHANGED,
            f"version {self._base.version} has no {tensor.label} of that dtype and shape",
        )

    def _refuse_missing(self) -> None:
        missing = self._base.tensors.keys() - self._digests.keys()
        if missing:
            raise Unfit(
                Fallback.LAYOUT_CHANGED,
                f"version {self._base.version} has {min(missing)!r} as well",
            )

    @property
    def begun(self) -> bool:
        """True once a tensor was encoded."""
        return bool(self._digests)

    def read_again(self) -> tuple[dict[str, SnapshotTensor], list[SourceTensor]]:
        """Return what was taken from the groups, as if nothing had been.

        The base becomes what the tensors were that were encoded, and holds a mixture afterwards.

        Returns:
            Those, and all that was taken: from the base where it was encoded.

        Raises:
            ClientError: DATA_CORRUPT: the base was not what it was taken for.
        """
        base = self._base
        if not isinstance(base, Snapshot):
            raise TypeError("what is pushed in part is not read again")
        base.advance(self.blobs, self.threads)
        encoded = {name: base.tensors[name] for name in self._digests}
        sources = [snapshot_source(name, old) for name, old in encoded.items()]
        for tensor in sources:
            if tensor_digest(all_bytes(tensor, Scratch()).data) != self._digests[tensor.name]:
                raise refuse(
                    Reason.DATA_CORRUPT,
                    f"the copy of version {self._base.version} that this client compares with went "
                    f"bad in {tensor.name!r}; push again, and all is sent",
                )
        return encoded, sources + self._taken

    def close(self) -> None:
        """End the threads that encode, and let go of all tensors and shards."""
        self._encoder.close()
        self._base.forget()
        self._base = replace(self._base, tensors={})
        self._groups, self._taken, self._made = iter(()), [], []

    @property
    def blobs(self) -> list[NDArray[np.uint8]]:
        """The bytes of the shards that were made."""
        return [made.blob for made in self._made]

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of every shard that was made, by index."""
        return {made.index: made.blob.nbytes for made in self._made}

    @property
    def digests(self) -> Mapping[str, bytes]:
        """Digest of every tensor that was encoded, by name."""
        return self._digests

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
            (name, old.dtype, old.shape, self._digests.get(name, old.digest))
            for name, old in self._base.tensors.items()
        )

    @property
    def changed_fraction(self) -> float:
        """Share of the elements that changed."""
        return self._changed / self._elements if self._elements else 0.0
