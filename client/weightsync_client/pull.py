"""A version back out: tensors one by one, or a folder of safetensors, every digest compared."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync.model.digest import TensorDigester
from weightsync.model.dtypes import torch_dtype
from weightsync.model.layout import MAX_HEADER_BYTES, check_header, check_shard
from weightsync.model.manifest import ShardEntry, TensorEntry
from weightsync.process_limits import write_remedy
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.extras import needing
from weightsync_client.errors import ClientError, invalid, passing, refuse, typed_errors
from weightsync_client.rpc.retry import RetryState
from weightsync_client.rpc.tensor_pages import version_tensors
from weightsync_client.types import PullResult, Version

if TYPE_CHECKING:
    import numpy as np
    import torch

    from weightsync_client.options import Retry
    from weightsync_client.rpc.channels import Link
    from weightsync_client.rpc.retry import Invoke


@dataclass(frozen=True, slots=True)
class PulledTensor:
    """One tensor of a version, its digest compared; `push` takes it as it is.

    Attributes:
        dtype: safetensors dtype name.
        data: Its bytes, row-major and little-endian.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a NumPy array over the bytes; bfloat16 and 8-bit floats need ml_dtypes."""
        import numpy as np

        name = _NUMPY.get(self.dtype)
        if name is None:
            raise refuse(
                Reason.NOT_SUPPORTED,
                f"tensor {self.name!r} is {self.dtype}, which NumPy lacks; use torch() or data",
            )
        return np.frombuffer(self.data, np.dtype(name)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """Return a PyTorch tensor over the bytes."""
        with typed_errors(), needing("torch()"):
            import torch

        shape, dtype = self.shape, torch_dtype(self.dtype)
        if self.dtype == "F4":
            # PyTorch counts pairs, safetensors elements.
            shape, dtype = (*shape[:-1], shape[-1] // 2), getattr(torch, "float4_e2m1fn_x2", None)
        if dtype is None:
            raise refuse(
                Reason.NOT_SUPPORTED,
                f"tensor {self.name!r} is {self.dtype}, which this PyTorch lacks; use data",
            )
        if not self.data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.data, dtype=torch.uint8).view(dtype).reshape(shape)


_NUMPY = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


#: Opens one PullWeights stream and yields its messages; every error is a ClientError.
OpenPull = Callable[[pb.PullWeightsRequest], Iterator[pb.PullWeightsResponse]]


class _Bytes:
    """Exact reads from a sequence of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes piece by piece; less only when the chunks end."""
        while size:
            if not self._rest:
                data = next(self._chunks, None)
                if data is None:
                    return
                self._rest = memoryview(data)
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            yield piece

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes, or what is left."""
        return b"".join(self.pieces(size))

    def ended(self) -> bool:
        """Return whether nothing is left."""
        return not self._rest and not self.take(1)


class Puller:
    """Reads one committed version, shard by shard; a cut link is taken up where it broke."""

    def __init__(
        self,
        link: Link,
        invoke: Invoke,
        open_pull: OpenPull,
        model: str,
        version: int,
        retry: Retry,
    ) -> None:
        self._link = link
        self._open = open_pull
        self._model = model
        self._retry = retry
        #: Bytes have come: what was begun is not given up for want of a slot.
        self._begun = False
        self.version, infos = version_tensors(invoke, link.timeouts, model, version)
        self._digests = {info.name: bytes.fromhex(info.digest) for info in infos}
        self._shards: list[list[TensorEntry]] = [[] for _ in range(self.version.shard_count)]
        for t in infos:
            entry = TensorEntry(t.name, t.dtype, t.shape, t.shard, t.begin, t.end)
            self._shards[t.shard].append(entry)

    def tensors(self) -> Iterator[PulledTensor]:
        """Yield every tensor, its digest compared; one is held at a time."""
        for index in range(self.version.shard_count):
            source, _, entries = self._shard(index)
            for entry in entries:
                data = bytearray()
                self._read(source, entry, data.extend)
                yield PulledTensor(entry.name, entry.dtype, entry.shape, data)
            self._end(source, index)

    def to_folder(self, path: Path, on_progress: Callable[[int, int], None]) -> PullResult:
        """Write the version; the folder appears whole and proved, or not at all."""
        started = time.monotonic()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise invalid(f"{path} exists and is not an empty folder; name another")
        work: Path | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            files = self._write(work, on_progress)
            # mkdtemp lets nobody else in; the folder gets the rights that mkdir would give.
            umask = os.umask(0)
            os.umask(umask)
            work.chmod(0o777 & ~umask)
            work.rename(path)
        except OSError as error:
            raise refuse(
                Reason.DISK_EXHAUSTED if error.errno in _FULL else Reason.REQUEST_INVALID,
                f"{path} cannot be written: {error.strerror}; {write_remedy(error)}",
            ) from None
        finally:
            if work is not None:
                shutil.rmtree(work, ignore_errors=True)
        size = sum(path.joinpath(name).stat().st_size for name in files)
        names = tuple(str(path / name) for name in files)
        return PullResult(self.version, names, size, time.monotonic() - started)

    def _write(self, folder: Path, on_progress: Callable[[int, int], None]) -> list[str]:
        # Names of our own: one that came from elsewhere never becomes a path.
        count = self.version.shard_count
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        names = ["model.safetensors"] if count == 1 else names
        written = 0
        for index, name in enumerate(names):
            with (folder / name).open("wb") as file:
                source, header, entries = self._shard(index)
                file.write(header)
                written += len(header)
                for entry in entries:
                    self._read(source, entry, file.write)
                    written += entry.end - entry.begin
                    on_progress(written, self.version.size_bytes)
                self._end(source, index)
        if count > 1:
            weight_map = {t.name: names[t.shard] for group in self._shards for t in group}
            document = {"metadata": {"total_size": written}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=2))
        return names

    # One shard.

    def _shard(self, index: int) -> tuple[_Bytes, bytes, tuple[TensorEntry, ...]]:
        """Return a shard's data section, the bytes before it, and its tensors in order."""
        source = _Bytes(self._chunks(index))
        length = source.take(8)
        size = int.from_bytes(length, "little")
        header = source.take(min(size, MAX_HEADER_BYTES))
        group = self._shards[index]
        end = max((entry.end for entry in group), default=0)
        with typed_errors():
            entries = check_shard(ShardEntry(f"{index}", 8 + size + end, size), group)
            check_header(header, entries)
        return source, length + header, entries

    def _read(
        self, source: _Bytes, entry: TensorEntry, sink: Callable[[memoryview], object]
    ) -> None:
        state = TensorDigester()
        for piece in source.pieces(entry.end - entry.begin):
            state.update(piece)
            sink(piece)
        if state.digest() != self._digests[entry.name]:
            raise _corrupt(self.version, f"tensor {entry.name!r} arrived without its digest")

    def _end(self, source: _Bytes, index: int) -> None:
        if not source.ended():
            raise _corrupt(self.version, f"shard {index} is longer than its tensors")

    def _chunks(self, index: int) -> Iterator[bytes]:
        offset, backoff = 0, RetryState(self._retry)
        while True:
            request = pb.PullWeightsRequest(
                model=self._model, version=self.version.version, shard=index, offset=offset
            )
            try:
                for message in self._open(request):
                    if not message.HasField("chunk"):
                        continue  # GetVersion has told the layout and the digests.
                    if message.chunk.shard != index or message.chunk.offset != offset:
                        raise _corrupt(self.version, f"shard {index} arrived out of order")
                    data = message.chunk.data
                    offset += len(data)
                    backoff.reset()
                    self._begun = True
                    yield data
                return
            except ClientError as error:
                delay = backoff.next_delay_s(error)
                lasting = not passing(error) or (error.reason is Reason.NO_SLOT and not self._begun)
                if lasting or delay is None:
                    raise
                time.sleep(delay)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _corrupt(version: Version, what: str) -> ClientError:
    return refuse(
        Reason.DATA_CORRUPT,
        f"version {version.version} of {version.model}: {what}; pull again, then push it again",
    )
