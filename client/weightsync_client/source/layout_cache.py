"""How tensors lie in shards, worked out once: a trainer pushes the same ones again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.model.layout import check_count, check_version
from weightsync_client.errors import typed_errors
from weightsync_client.source.shards import Frame, Shard, cut, frame_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.model.manifest import Layout
    from weightsync_client.source.tensors import SourceTensor

__all__ = ["LayoutCache"]


class _Outline(NamedTuple):
    shard_bytes: int
    #: Name, dtype and shape of every tensor.
    signature: list[tuple[str, str, tuple[int, ...]]]
    frames: list[Frame]
    layout: Layout

    def filled(self, tensors: Sequence[SourceTensor]) -> list[Shard]:
        shards, begin = [], 0
        for frame in self.frames:
            end = begin + len(frame.tensors)
            shards.append(frame.filled(tensors[begin:end]))
            begin = end
        return shards


class LayoutCache:
    """Knows how the tensors of the last call lay; threads may share it. It keeps no tensor."""

    def __init__(self) -> None:
        self._last: _Outline | None = None

    def shards_of(
        self, tensors: Sequence[SourceTensor], shard_bytes: int
    ) -> tuple[list[Shard], Layout]:
        """Return the shards that hold the tensors, in their order, and the checked layout.

        Args:
            tensors: Of a version.
            shard_bytes: Most bytes of tensors in a shard that holds more than one.

        Raises:
            InvalidError: The layout is wrong.
        """
        with typed_errors():
            check_count(len(tensors))
        signature = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        outline = self._last
        if outline is None or outline.shard_bytes != shard_bytes or outline.signature != signature:
            frames = _framed(tensors, shard_bytes)
            with typed_errors():
                layout = check_version([f.entry for f in frames], [f.tensors for f in frames])
            self._last = outline = _Outline(shard_bytes, signature, frames, layout)
        return outline.filled(tensors), outline.layout


def _framed(tensors: Sequence[SourceTensor], shard_bytes: int) -> list[Frame]:
    groups = list(cut(tensors, shard_bytes))
    names = ["model.safetensors"]
    if len(groups) != 1:
        names = [f"model-{at + 1:05}-of-{len(groups):05}.safetensors" for at in range(len(groups))]
    return [frame_of(group, at, names[at]) for at, group in enumerate(groups)]
