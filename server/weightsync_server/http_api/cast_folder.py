"""A checkpoint folder in the dtypes that the engine has: what is sent of each of its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.float_casts import CastRangeError, cast_elements, casts
from weightsync.model.layout import build_header, check_shard, check_version
from weightsync.model.manifest import ShardEntry
from weightsync_server.http_api.weight_folder import changed
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from weightsync.model.manifest import Layout, TensorEntry
    from weightsync.shm.segment_socket import OfferedFile
    from weightsync_server.http_api.weight_folder import WeightFolder

__all__ = ["CastFolder"]

#: Bytes that are read at once, off the event loop; a multiple of every dtype's.
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class CastFolder:
    """What is sent of a folder.

    Attributes:
        folder: Its files, open.
        layout: Of what is sent.
        cast: Tensors that are cast.
        headers: Of each file of which a tensor is cast, by index: the bytes before its tensors'.
    """

    folder: WeightFolder
    layout: Layout
    cast: int
    headers: Mapping[int, bytes]

    @classmethod
    def of(cls, folder: WeightFolder, dtypes: Mapping[str, str]) -> CastFolder:
        """Return a folder, each tensor cast to the dtype of its name where that is a plain cast.

        Args:
            folder: What was posted.
            dtypes: Of the engine's tensors, by name; it may lack some.

        Raises:
            WeightSyncError: LAYOUT_INVALID: the result can be no version.
        """
        given = folder.layout
        wanted = {
            tensor.name: dtypes[tensor.name]
            for tensor in given.tensors
            if casts(tensor.dtype, dtypes.get(tensor.name, ""))
        }
        headers: dict[int, bytes] = {}
        shards: list[ShardEntry] = []
        groups: list[Sequence[TensorEntry]] = []
        for index, (shard, group) in enumerate(zip(given.shards, given.by_shard, strict=True)):
            sent: Sequence[TensorEntry] = group
            if any(tensor.name in wanted for tensor in group):
                kinds = ((t.name, wanted.get(t.name, t.dtype), t.shape) for t in group)
                header, sent = build_header(kinds, index)
                headers[index] = len(header).to_bytes(8, "little") + header
                size = len(headers[index]) + max(tensor.end for tensor in sent)
                shard = ShardEntry(shard.name, size, len(header))  # noqa: PLW2901 - in its place
                sent = check_shard(shard, sent)
            shards.append(shard)
            groups.append(sent)
        layout = check_version(shards, groups) if headers else given
        return cls(folder, layout, len(wanted), headers)

    async def blocks(self, index: int) -> AsyncIterator[tuple[int, memoryview]]:
        """Yield the bytes of a file as they are sent, in order, with their offsets.

        Raises:
            WeightSyncError: SHARD_INVALID: it became shorter; REQUEST_INVALID, naming a tensor of
                which a value would become infinite.
        """
        file = self.folder.files[index]
        header = self.headers.get(index)
        if header is None:
            for begin, end in _ranges(0, file[1]):
                yield begin, memoryview(await in_thread(_read, file, begin, end))
            return
        yield 0, memoryview(header)
        given = {tensor.name: tensor for tensor in self.folder.layout.by_shard[index]}
        start = self.folder.layout.shards[index].data_start
        for tensor in self.layout.by_shard[index]:
            before, at = given[tensor.name], len(header) + tensor.begin
            for begin, end in _ranges(before.begin, before.end):
                data = await in_thread(_read, file, start + begin, start + end)
                if before.dtype != tensor.dtype:
                    data = await in_thread(_cast, data, before, tensor.dtype, begin)
                yield at, memoryview(data)
                at += len(data)


def _ranges(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, _BLOCK_BYTES):
        yield at, min(at + _BLOCK_BYTES, end)


def _read(file: OfferedFile, begin: int, end: int) -> bytes:
    # Not mapped: a page of a file that got shorter would end the process.
    name, _, fd = file
    data = os.pread(fd, end - begin, begin)
    if len(data) != end - begin:
        raise changed(name)
    return data


def _cast(data: bytes, tensor: TensorEntry, wanted: str, begin: int) -> bytes:
    try:
        return cast_elements(np.frombuffer(data, np.uint8), tensor.dtype, wanted).tobytes()
    except CastRangeError as error:
        at = (begin - tensor.begin) * 8 // DTYPE_BITS[tensor.dtype] + error.index
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"write tensor {tensor.name[:100]!r} with values within the range of {wanted}, which "
            f"the engine has, or serve a checkpoint of {tensor.dtype}: element {at} is "
            f"{error.value:g}, which a cast would make infinite; post the folder then",
        ) from None
