"""The messages of a PushWeights stream, made and digested one by one as the link takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from weightsync.model.digest import TensorDigester, tensor_digest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.source.shards import Part, Shard, ShardReader
from weightsync_client.source.slice_shards import SliceShard

if TYPE_CHECKING:
    from weightsync_client.source.shards import Keep


class _Digesting(Protocol):
    def update(self, piece: memoryview, /) -> object: ...
    def digest(self) -> bytes: ...


class RowCopy:
    """Digests bytes that lie in a row, and copies them to `begin` of `target` at once."""

    # Nothing is held of a target but the view that its owner releases.
    def __init__(self, target: memoryview, begin: int, size: int) -> None:
        from weightsync_client.transport.copying import copier_of

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

    Bytes may go by again after a cut link: what was digested is skipped. `keep` gets the bytes
    while they are still in the cache. `target` is memory for the shard, if it is to be copied,
    where bytes go by once and in order. Parts that end within a tensor end a multiple of
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
        return RowCopy(self._target, begin, end - begin)


#: A message of the stream; chunks come encoded.
Message = pb.PushWeightsRequest | bytes

# Both well below the 1 MiB that the contract allows a message.
_LAYOUT_BYTES = 256 << 10
_DIGESTS = 16_384
# Of a box with 32 dimensions at most 650 bytes.
_BOXES = 1024


def join_message(push_id: str, writer: int = 0) -> pb.PushWeightsRequest:
    return pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id, writer=writer))


def heartbeat_message() -> pb.PushWeightsRequest:
    return pb.PushWeightsRequest(heartbeat=pb.Heartbeat())


def layout_messages(shard: Shard) -> Iterator[pb.PushWeightsRequest]:
    tensors = iter(shard.tensors)
    last = False
    while not last:
        request = pb.PushWeightsRequest()
        part = request.layout
        part.shard = shard.index
        part.shard_name = shard.entry.name
        part.size_bytes = shard.entry.size
        part.header_bytes = shard.entry.header_size
        size = 0
        while size < _LAYOUT_BYTES:
            tensor = next(tensors, None)
            if tensor is None:
                last = True
                break
            part.tensors.add(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                begin=tensor.begin,
                end=tensor.end,
            )
            size += 4 * len(tensor.name) + 64 + 10 * len(tensor.shape)
        part.last = last
        yield request


def declaration(shard: Shard, *, layout_known: bool) -> Iterator[pb.PushWeightsRequest]:
    """Yield what comes before a shard's bytes: its layout, and which boxes of it are sent."""
    if isinstance(shard, SliceShard):
        if not layout_known:
            yield from layout_messages(shard.whole)
        yield from box_messages(shard)
    elif not layout_known:
        yield from layout_messages(shard)


def box_messages(shard: SliceShard) -> Iterator[pb.PushWeightsRequest]:
    boxes = [(True, box) for box in shard.sent] + [(False, box) for box in shard.replicas]
    for first in range(0, max(len(boxes), 1), _BOXES):
        request = pb.PushWeightsRequest()
        part = request.boxes
        part.shard = shard.index
        for sent, one in boxes[first : first + _BOXES]:
            (part.sent if sent else part.replicas).add(
                tensor=one.tensor, offsets=one.box.offsets, sizes=one.box.sizes
            )
        part.last = first + _BOXES >= len(boxes)
        if part.last and shard.changed is not None:
            part.patch_bytes = shard.entry.size
        yield request


def shard_bytes(
    shard: Shard,
    reader: ShardReader,
    digester: ShardDigester,
    offset: int,
    chunk_bytes: int,
    on_bytes: Callable[[int], None],
) -> Iterator[bytes]:
    """Yield encoded chunks of a shard from `offset`, digesting on the way.

    Each byte is read once from memory. Those before `offset` that were not digested yet are read
    and digested, not sent.
    """
    position = min(digester.position, offset)
    while position < offset:
        position, _ = _digested(reader, digester, position, min(position + chunk_bytes, offset))
    while position < shard.entry.size:
        begin = position
        stop = min(begin + chunk_bytes, shard.entry.size)
        position, parts = _digested(reader, digester, begin, stop)
        request = encode_chunk(shard.index, begin, parts)
        # Views of the source must not outlive its turn while the link is waited for.
        parts.clear()
        yield request
        on_bytes(stop - begin)
    # Empty tensors at the very end have no byte to go by.
    digester.update(position, b"")


def _digested(
    reader: ShardReader, digester: ShardDigester, begin: int, end: int
) -> tuple[int, list[Part]]:
    parts = reader.read(begin, end)
    for part in parts:
        digester.update(begin, part)
        begin += len(part)
    return begin, parts


def encode_chunk(shard: int, offset: int, parts: Sequence[Part]) -> bytes:
    """Return PushWeightsRequest(chunk=...) encoded, with one copy; a message object makes three."""
    size = sum(map(len, parts))
    fields = bytearray()
    for tag, value in ((0x08, shard), (0x10, offset)):
        if value:
            fields.append(tag)
            fields += _varint(value)
    if size:
        fields += b"\x1a" + _varint(size)
    return b"".join((b"\x22", _varint(len(fields) + size), fields, *parts))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def serialize(message: Message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def digest_messages(shard: Shard, digests: list[bytes]) -> Iterator[pb.PushWeightsRequest]:
    for first in range(0, len(digests), _DIGESTS):
        part = b"".join(digests[first : first + _DIGESTS])
        yield pb.PushWeightsRequest(
            digests=pb.ShardDigests(shard=shard.index, first=first, digests=part)
        )
