"""The tensors of a version that an update leaves out, as files beside those that it brings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.checkpoint_folder import CheckpointFile, packed, read_layout, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.model.manifest import Manifest, TensorEntry
    from weightsync.shm.segment_socket import OfferedFile
    from weightsync.shm.segments import Segment

__all__ = ["KeptTensors", "kept_files"]


class KeptTensors(NamedTuple):
    """What stays of a version.

    Attributes:
        files: The tensors that stay, in memory.
        alike: Names of those that neither come nor stay, for each was the same matrix as one that
            comes.
    """

    files: list[OfferedFile]
    alike: frozenset[str]


def kept_files(
    files: Sequence[OfferedFile], base: Manifest, segments: Sequence[Segment]
) -> KeptTensors:
    """Return the tensors of a version that files lack, in memory; the caller closes them.

    One that was the same matrix as a tensor that comes, as a tied head is that was written out, is
    left out: it would be the old one. An engine for which it is one by itself refuses that.

    Args:
        files: Name, size in bytes and descriptor of each safetensors file.
        base: The version.
        segments: Its shards.

    Raises:
        WeightSyncError: ENGINE_REFUSED: the files hold what the version has not, or has with
            another dtype or shape: nobody could say what it stands for. MEMORY_EXHAUSTED.
    """
    layout = base.layout
    known = {tensor.name: tensor for tensor in layout.tensors}
    brought = {tensor.name for tensor in _checked(files, known)}
    pairs = list(zip(layout.tensors, base.digests, strict=True))
    sent = {(t.dtype, t.shape, digest) for t, digest in pairs if t.name in brought}
    equal = {
        t.name for t, digest in pairs if len(t.shape) > 1 and (t.dtype, t.shape, digest) in sent
    }
    left_out = brought | equal
    kept: list[OfferedFile] = []
    try:
        shards = zip(layout.shards, layout.by_shard, segments, strict=True)
        for at, (entry, tensors, segment) in enumerate(shards):
            left = [tensor for tensor in tensors if tensor.name not in left_out]
            if not left:
                continue
            name = f"kept-{at:05}"
            file = CheckpointFile(name, entry.size, segment.fd, entry, tuple(left), (0, 0))
            fd = packed(file, left, "what the update leaves out")
            kept.append((name, os.fstat(fd).st_size, fd))
    except BaseException:
        for _, _, fd in kept:
            os.close(fd)
        raise
    return KeptTensors(kept, frozenset(equal - brought))


def _checked(files: Sequence[OfferedFile], known: dict[str, TensorEntry]) -> Sequence[TensorEntry]:
    tensors = read_layout(sorted(files)).tensors
    for tensor in tensors:
        before = known.get(tensor.name)
        if before is None or (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            what = f"has {before.dtype} {list(before.shape)} there" if before else "is not there"
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"send all tensors, or those of the version that is served as they are there: "
                f"{shown(tensor.name)}, {tensor.dtype} {list(tensor.shape)}, {what}",
            )
    return tensors
