"""Stands where vLLM's transfers expect a model: takes tensors, and writes none of the model's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightsync import failpoints
from weightsync.errors import WeightSyncError
from weightsync.vllm.worker.update_file import UpdateFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightsync.vllm.worker.update_file import TensorKind

__all__ = ["UpdateSink", "announced"]


def announced(info: Mapping[str, object]) -> tuple[TensorKind, ...]:
    """Return which tensors vLLM's update info announces.

    Raises:
        ValueError: They are none, or one twice, or it has not as many dtypes and shapes as names.
    """
    names, dtypes, shapes = (info.get(key) for key in ("names", "dtype_names", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        msg = "update_info lacks names, dtype_names or shapes; send all three as lists"
        raise ValueError(msg)  # noqa: TRY004 - vLLM answers it with 400
    if not names or not len(names) == len(dtypes) == len(shapes):
        msg = (
            f"update_info has {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} "
            "shapes; send as many of each, and at least one"
        )
        raise ValueError(msg)
    kinds = tuple(map(_kind, names, dtypes, shapes))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"tensor {twice[:100]!r} is announced twice; send each once"
        raise ValueError(msg)
    return kinds


def _kind(name: object, dtype_name: object, shape: object) -> TensorKind:
    dtype = getattr(torch, dtype_name, None) if isinstance(dtype_name, str) else None
    fits = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype) or not fits:
        msg = (
            f"update_info announces {str(name)[:100]!r} as {str(dtype_name)[:40]!r} of shape "
            f"{str(shape)[:60]}; send a name, one of PyTorch's dtypes and a list of sizes"
        )
        raise ValueError(msg)
    assert isinstance(shape, list)  # noqa: S101 - narrows what `fits` has found
    return name, dtype, tuple(shape)


class UpdateSink:
    """Takes what a transfer brings, file after file, and says whether all of it came.

    It raises nothing while its transfer goes on: a rank that left a collective transfer would leave
    the others and the trainer waiting. What is wrong is kept as `failure`, and what comes after
    that is dropped.

    Args:
        keeps: Whether this rank keeps the tensors; every rank gets all of them, and one is enough.

    Attributes:
        files: What was kept.
        arrived: Tensors that have come since it was made.
        failure: Why the update is not whole, one sentence; "": nothing is wrong so far.
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
        """Whether all that was announced has come."""
        return not self._missing

    def begin(self, tensors: Sequence[TensorKind]) -> None:
        """Expect these tensors, each once, and no other; memory for them is reserved on return."""
        self._missing = {kind[0]: kind for kind in tensors}
        if twice := self._known & self._missing.keys():
            self.fail(f"tensor {min(twice)[:100]!r} came before in this update; send each once")
        self._known |= self._missing.keys()
        if not self._keeps or self.failure:
            return
        try:
            self._file = UpdateFile(f"update-{len(self.files):05d}.safetensors", tensors)
            self.files.append(self._file)
        except (WeightSyncError, OSError) as error:
            self.fail(str(error))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take tensors, as a model's loader would; returns their names.

        Raises:
            RuntimeError: Its transfer was left, and what comes are no tensors of it.
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
            msg = "this update was given up"
            raise RuntimeError(msg)

    def end(self) -> None:
        """Take note that nothing more comes of what was begun."""
        if self._missing:
            some = min(self._missing)[:100]
            self.fail(
                f"{len(self._missing)} of the tensors that were announced did not come, such as "
                f"{some!r}; send the update again"
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
            self.fail(f"tensor {name[:100]!r} came without being announced")
        elif (tensor.dtype, tuple(tensor.shape)) != kind[1:]:
            self.fail(
                f"tensor {name[:100]!r} came as {tensor.dtype} of shape {list(tensor.shape)}, "
                f"announced as {kind[1]} of shape {list(kind[2])}"
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
