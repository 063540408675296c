"""The digests of a shard's tensors, and its copy, while its bytes go by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weightsync.model.digest import TensorDigester, tensor_digest
from weightsync_client.transport.copying import copier_of

if TYPE_CHECKING:
    from weightsync_client.source.shards import Keep, Part, Shard

__all__ = ["ShardDigester"]


class _Digesting(Protocol):
    def update(self, piece: memoryview, /) -> object: ...
    def digest(self) -> bytes: ...


class _Copying:
    # Nothing is held of a target but the view that its owner releases.
    def __init__(self, target: memoryview, begin: int, size: int) -> None:
        self._target = target
        self._at = begin
        self._copier = copier_of(size)

    def update(self, piece: memoryview) -> None:
        end = self._at + len(piece)
        with self._target[self._at : end] as part:
            self._copier.update(piece, part)
        self._at = end

    def digest(self) -> bytes:
        return self._copier.digest()


class ShardDigester:
    """Digests a shard's tensors, and copies the shard, while its bytes go by.

    Bytes may go by again after a cut link: what was digested is skipped.

    Args:
        shard: The shard.
        keep: Gets the bytes that are digested, while they are still in the cache.
        target: Memory for the shard, if it is to be copied: what goes by, once and in order, is
            copied there. Parts that end within a tensor end a multiple of
            `weightsync_client.transport.copying.STEP` after its beginning.
    """

    def __init__(
        self, shard: Shard, keep: Keep | None = None, target: memoryview | None = None
    ) -> None:
        self._target = target
        self._names = [tensor.name for tensor in shard.tensors] if keep else []
        self._keep = keep
        start = shard.data_start
        self._bounds = [start + tensor.begin for tensor in shard.tensors]
        self._bounds.append(start + (shard.tensors[-1].end if shard.tensors else 0))
        self._count = len(shard.tensors)
        self._state: _Digesting | None = None
        self.digests: list[bytes] = []
        #: Offset up to which the shard has been digested.
        self.position = start

    @property
    def done(self) -> bool:
        """True when every tensor has its digest."""
        return len(self.digests) == self._count

    def update(self, offset: int, data: Part) -> None:
        """Take the bytes that begin at `offset`, which is not beyond `position`."""
        view = memoryview(data)
        limit = offset + len(data)
        if self._target is not None and offset < self._bounds[0]:
            header = view[: self._bounds[0] - offset]
            self._target[offset : offset + len(header)] = header
        for index in range(len(self.digests), self._count):
            begin, end = self._bounds[index], self._bounds[index + 1]
            stop = min(end, limit)
            if stop < self.position or stop == self.position < end:
                return
            piece = view[self.position - offset : stop - offset]
            if self._keep is not None:
                self._keep(self._names[index], self.position - begin, piece)
            whole = self.position == begin and stop == end
            if whole and self._target is None:
                self.digests.append(tensor_digest(piece))
            else:
                self._state = self._state or self._begin(begin, end)
                self._state.update(piece)
                if stop < end:
                    self.position = stop
                    return
                self.digests.append(self._state.digest())
                self._state = None
            self.position = stop

    def _begin(self, begin: int, end: int) -> _Digesting:
        if self._target is None:
            return TensorDigester()
        return _Copying(self._target, begin, end - begin)
