"""A safetensors file in shared memory, filled tensor by tensor in place of the model."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.dtypes import safetensors_dtype
from weightsync.model.layout import build_header
from weightsync.model.manifest import TensorEntry
from weightsync.process_limits import available_bytes, memory_remedy

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Name, dtype and shape of a tensor.
TensorKind = tuple[str, torch.dtype, tuple[int, ...]]


class UpdateFile:
    """Holds `tensors`, each name once, in host memory that is reserved in full at the start.

    Raises LAYOUT_INVALID for a dtype that safetensors does not have, and MEMORY_EXHAUSTED.
    """

    def __init__(self, name: str, tensors: Sequence[TensorKind]) -> None:
        header, entries = build_header((n, _dtype(n, dtype), shape) for n, dtype, shape in tensors)
        self.name = name
        self._entries = {entry.name: entry for entry in entries}
        self._begin = 8 + len(header)
        self.size = self._begin + max((entry.end for entry in entries), default=0)
        if self.size > (free := available_bytes()):
            raise WeightSyncError(
                Reason.MEMORY_EXHAUSTED,
                f"an update of {self.size} bytes is kept in host memory until it is a version, and "
                f"{free} bytes are free; free as much, or lower --slots of weightsync-server",
            )
        self._fd, self._memory = _reserved(self.size)
        self._memory[: self._begin] = len(header).to_bytes(8, "little") + header

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor of the announced dtype and shape to its place."""
        entry = self._entries[name]
        if entry.end > entry.begin:
            self._place(entry).copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))

    def sealed(self) -> int:
        """Return a descriptor of what nobody can change any more; `close` closes it."""
        self._memory.close()
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        return self._fd

    def close(self) -> None:
        """Give the memory back as soon as nobody else has it; nobody may write any more."""
        self._memory.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _place(self, entry: TensorEntry) -> torch.Tensor:
        size = entry.end - entry.begin
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=size, offset=self._begin + entry.begin
        )


def _reserved(size: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("weightsync-update", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        return fd, mmap.mmap(fd, size)
    except OSError as error:
        os.close(fd)
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"the host refused {size} bytes of shared memory for an update ({error.strerror}); "
            f"{memory_remedy(error, 'free memory')}",
        ) from error


def _dtype(name: str, dtype: torch.dtype) -> str:
    if found := safetensors_dtype(dtype):
        return found
    raise WeightSyncError(
        Reason.LAYOUT_INVALID,
        f"tensor {name[:100]!r} is of {dtype}, which safetensors does not have; send another dtype",
    )


def announced(info: Mapping[str, object]) -> tuple[TensorKind, ...]:
    """Return which tensors vLLM's update info announces, or raise ValueError."""
    names, dtypes, shapes = (info.get(key) for key in ("names", "dtype_names", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        msg = "update_info lacks names, dtype_names or shapes; send all three as lists"
        raise ValueError(msg)  # noqa: TRY004 - vLLM answers it with 400
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise ValueError(
            f"update_info has {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} "
            "shapes; send as many of each, and at least one"
        )
    kinds = tuple(map(_kind, names, dtypes, shapes))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tensor {twice[:100]!r} is announced twice; send each once")
    return kinds


def _kind(name: object, dtype_name: object, shape: object) -> TensorKind:
    dtype = getattr(torch, dtype_name, None) if isinstance(dtype_name, str) else None
    fits = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype) or not fits:
        raise ValueError(
            f"update_info announces {str(name)[:100]!r} as {str(dtype_name)[:40]!r} of shape "
            f"{str(shape)[:60]}; send a name, one of PyTorch's dtypes and a list of sizes"
        )
    assert isinstance(shape, list)  # noqa: S101 - narrows what `fits` has found
    return name, dtype, tuple(shape)


class UpdateSink:
    """Takes what a transfer brings, file after file, and says whether all of it came.

    It raises nothing while its transfer goes on: a rank that left a collective transfer would leave
    the others waiting. What is wrong is kept as `failure`, "" if nothing is, and what comes after
    that is dropped. It is enough that one rank `keeps` the tensors; `arrived` counts all that came.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.files: list[UpdateFile] = []
        self.arrived = 0
        self.failure = ""
        self._keeps = keeps
        self._left = False
        self._file: UpdateFile | None = None
        self._missing: dict[str, TensorKind] = {}
        self._known: set[str] = set()

    @property
    def whole(self) -> bool:
        return not self._missing

    def begin(self, tensors: Sequence[TensorKind]) -> None:
        """Expect these tensors, each once, and no other; memory for them is reserved on return."""
        self._missing = {kind[0]: kind for kind in tensors}
        if twice := self._known & self._missing.keys():
            self.fail(f"tensor {min(twice)[:100]!r} already arrived in this update; send each once")
        self._known |= self._missing.keys()
        if not self._keeps or self.failure:
            return
        try:
            self._file = UpdateFile(f"update-{len(self.files):05d}.safetensors", tensors)
            self.files.append(self._file)
        except (WeightSyncError, OSError) as error:
            self.fail(str(error))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take tensors, as a model's loader would, and return their names.

        Raises RuntimeError if the update was given up.
        """
        names = set()
        for name, tensor in weights:
            _wait_for(tensor)
            # What a transfer that is ended leaves in a tensor is nothing that came.
            self._check_here()
            names.add(name)
            self.arrived += 1
            self._take(name, tensor)
        self._check_here()
        return names

    def _check_here(self) -> None:
        if self._left:
            raise RuntimeError("this update was dropped meanwhile; send it again")

    def end(self) -> None:
        if self._missing:
            some = min(self._missing)[:100]
            self.fail(
                f"{len(self._missing)} of the announced tensors did not arrive, such as {some!r}; "
                "send the update again"
            )
        self._file = None

    def fail(self, why: str) -> None:
        """Take note of what is wrong, one sentence; the first counts."""
        self.failure = self.failure or why

    def leave(self) -> None:
        """Take nothing any more: who brings it has ended, and what it still brings is anything."""
        self._left = True

    def close(self) -> None:
        """Give the memory back; nothing may come any more."""
        self._file = None
        while self.files:
            self.files.pop().close()

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        kind = self._missing.pop(name, None)
        if kind is None:
            self.fail(f"tensor {name[:100]!r} arrived without being announced")
        elif (tensor.dtype, tuple(tensor.shape)) != kind[1:]:
            self.fail(
                f"tensor {name[:100]!r} arrived as {tensor.dtype} of shape {list(tensor.shape)}, "
                f"but was announced as {kind[1]} of shape {list(kind[2])}"
            )
        elif self._file is not None and not self.failure:
            try:
                failpoints.hit("worker.arrive")
                self._file.write(name, tensor)
            except Exception as error:  # noqa: BLE001 - see the class
                self.fail(f"tensor {name[:100]!r} could not be kept ({error})")


def _wait_for(tensor: torch.Tensor) -> None:
    """Return when a tensor is there: a transfer only queues what fills it."""
    if tensor.is_cuda:
        stream: Any = torch.cuda.current_stream(tensor.device)
        stream.synchronize()
