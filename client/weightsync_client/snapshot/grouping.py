"""Which tensors make one shard of a delta."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightsync_client.source.source import Flow
    from weightsync_client.source.tensors import SourceTensor

__all__ = ["as_they_come", "by_size"]

#: Bytes of one shard, or a sixteenth of all source bytes: the first is on its way early, and a
#: large model is no heap of little files. A thousand hosts that follow a bucket ask for each
#: object, and a bucket answers so many requests in a second and no more.
_GROUP_BYTES, _GROUPS = 64 << 20, 16
#: Below it a sample says that next to nothing has changed.
_LEAST_RATIO = 1e-4


def by_size(
    tensors: Iterable[SourceTensor], threads: int, ratio: float = 1.0
) -> Iterator[list[SourceTensor]]:
    """Yield groups for one shard each, largest tensors first.

    A group holds enough beside its largest tensor, which is one thread's work, for the others.

    Args:
        tensors: All of them.
        threads: That encode one group.
        ratio: Bytes that its shard will take over those of a group, as a sample has it.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.size)
    worth = int(_GROUP_BYTES / max(ratio, _LEAST_RATIO))
    least = max(worth, sum(tensor.size for tensor in ordered) // _GROUPS)
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


def as_they_come(flow: Flow, total: int) -> Iterator[list[SourceTensor]]:
    """Yield groups in the order of an iterable; only the one that is being filled is held.

    Args:
        flow: The tensors.
        total: Bytes of all of them, roughly.
    """
    least = min(max(_GROUP_BYTES, total // _GROUPS), flow.shard_bytes)
    group: list[SourceTensor] = []
    size = 0
    for tensor in flow:
        group.append(tensor)
        size += tensor.size
        if size >= least:
            yield group
            group, size = [], 0
    if group:
        yield group
