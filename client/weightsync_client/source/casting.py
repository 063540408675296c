"""Tensors in the dtypes that the engine has, cast piece by piece as they are read, and checked.

A cast holds no more than its reader keeps: one piece of a tensor on a device, or all of it while it
is compared there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from weightsync.model.dtypes import DTYPE_BITS
from weightsync_client.errors import ClientError, invalid
from weightsync_client.source.sharded_tensors import BoxSource
from weightsync_client.source.tensors import device_reader

if TYPE_CHECKING:
    import torch

    from weightsync_client.rpc.tensor_pages import EngineLayout, EngineTensor
    from weightsync_client.source.tensors import Read, Scratch, SourceTensor


#: What is cast among each other; see `weightsync.model.float_casts`, which needs NumPy.
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


class CastTensors(NamedTuple):
    """What was cast of a push; `example` says from what to what for the first one, or ""."""

    total: int = 0
    example: str = ""


class Casting:
    """How the tensors of one push are sent; threads may share it.

    Without a `layout`, which is what the engine holds, all is sent as it is. `exact` refuses casts,
    and `finite` refuses NaN and infinity.
    """

    def __init__(
        self, layout: EngineLayout | None = None, *, exact: bool = False, finite: bool = False
    ) -> None:
        self.layout = layout
        self._kinds: Mapping[str, EngineTensor] = layout.kinds if layout is not None else {}
        self._exact = exact
        self._finite = finite
        self._lock = threading.Lock()
        self.cast = CastTensors()

    def all(self, tensors: Iterable[SourceTensor]) -> list[SourceTensor]:
        if not self._kinds and not self._finite:
            return list(tensors)
        return [self.tensor(tensor) for tensor in tensors]

    def tensor(self, tensor: SourceTensor) -> SourceTensor:
        """Return a tensor as it is sent; refuse one that would have to be cast and must not be."""
        return self._as(tensor, self._wanted(tensor))

    def boxes(self, source: BoxSource) -> BoxSource:
        wanted = self._wanted(source.whole)
        boxes = tuple((box, self._as(tensor, wanted)) for box, tensor in source.boxes)
        return source._replace(whole=replace(source.whole, dtype=wanted), boxes=boxes)

    def declared(self, tensor: SourceTensor) -> SourceTensor:
        """Return a tensor of which no byte is there yet, as `tensor` will return it then."""
        return replace(tensor, dtype=self._wanted(tensor, counts=False))

    def _wanted(self, tensor: SourceTensor, *, counts: bool = True) -> str:
        kind = self._kinds.get(tensor.name)
        if kind is None or not _casts(tensor.dtype, kind.dtype):
            return tensor.dtype
        if self._exact:
            raise invalid(
                f"convert {tensor.label} to {kind.dtype}, or push without dtype='exact' to have "
                f"that done: it is {tensor.dtype} {list(tensor.shape)}, the engine has "
                f"{kind.dtype} {list(kind.shape)}",
            )
        if counts:
            with self._lock:
                example = f"{tensor.label} from {tensor.dtype} to {kind.dtype}"
                self.cast = CastTensors(self.cast.total + 1, self.cast.example or example)
        return kind.dtype

    def _as(self, tensor: SourceTensor, wanted: str) -> SourceTensor:
        finite = self._finite and tensor.dtype[0] in "FBC" and tensor.dtype in _checked()
        if tensor.dtype == wanted and not finite:
            return tensor
        work = _Work(tensor, wanted, finite=finite)
        return replace(
            tensor,
            dtype=wanted,
            open=work.open,
            flat=work.flat if tensor.flat is not None else None,
            in_place=tensor.in_place and tensor.dtype == wanted,
        )


def _casts(given: str, wanted: str) -> bool:
    return given != wanted and given in _FLOATS and wanted in _FLOATS


def _checked() -> Mapping[str, Any]:
    # Imported late: who checks nothing needs no NumPy.
    from weightsync.model.float_casts import NON_FINITE

    return NON_FINITE


@dataclass(frozen=True, slots=True)
class _Work:
    """What is done with a tensor's bytes as they are read; `wanted` is the dtype that is sent."""

    tensor: SourceTensor
    wanted: str
    finite: bool

    def open(self, scratch: Scratch) -> Read:
        tensor = self.tensor
        width = DTYPE_BITS[self.wanted] // 8
        if tensor.flat is None:
            part = self._from_bytes(tensor.open(scratch))
        elif tensor.device is None:
            part = self._from_host(tensor.flat())
        else:
            return self._from_device(tensor.flat(), tensor.device, scratch)

        def read(begin: int, end: int) -> memoryview:
            first, last = begin // width, -(-end // width)
            found: memoryview = part(first, last)[begin - first * width : end - first * width]
            return found

        return read

    def flat(self) -> torch.Tensor:
        """Give all bytes as they are sent, in a row, on the tensor's device."""
        # Asked of PyTorch's tensors alone.
        flat = cast("Callable[[], torch.Tensor]", self.tensor.flat)
        return self._of_torch(flat(), 0)

    def _from_bytes(self, read: Read) -> Callable[[int, int], memoryview]:
        import numpy as np

        from weightsync.model import float_casts

        width = DTYPE_BITS[self.tensor.dtype] // 8

        def part(first: int, last: int) -> memoryview:
            data = np.frombuffer(read(first * width, last * width), np.uint8)
            made: memoryview = self._done(float_casts, data, first).data
            return made

        return part

    def _from_host(self, flat: torch.Tensor) -> Callable[[int, int], memoryview]:
        width = DTYPE_BITS[self.tensor.dtype] // 8

        def part(first: int, last: int) -> memoryview:
            data: memoryview = (
                self._of_torch(flat[first * width : last * width], first).numpy().data
            )
            return data

        return part

    def _from_device(self, flat: torch.Tensor, device: torch.device, scratch: Scratch) -> Read:
        given, width = DTYPE_BITS[self.tensor.dtype] // 8, DTYPE_BITS[self.wanted] // 8

        def part(first: int, last: int) -> torch.Tensor:
            return self._of_torch(flat[first * given : last * given], first)

        return device_reader(part, len(flat) // given * width, width, device, scratch)

    def _of_torch(self, flat: torch.Tensor, first: int) -> torch.Tensor:
        from weightsync_client.source import torch_casts

        made: torch.Tensor = self._done(torch_casts, flat, first)
        return made

    def _done(self, library: Any, data: Any, first: int) -> Any:
        """Return the bytes of whole elements as they are sent; the first has position `first`."""
        given = self.tensor.dtype
        if self.finite and (word := library.find(data, given)) >= 0:
            per_element = DTYPE_BITS[given] // 8 // _checked()[given].width
            raise self._not_finite(first + word // per_element)
        if given == self.wanted:
            return data
        try:
            return library.cast_elements(data, given, self.wanted)
        except ValueError as error:
            from weightsync.model.float_casts import CastRangeError

            if not isinstance(error, CastRangeError):
                raise
            raise self._beyond(first + error.index, error.value) from None

    def _not_finite(self, at: int) -> ClientError:
        return invalid(
            f"restore finite weights, or push without check_finite: element {at} of "
            f"{self.tensor.label} is NaN or infinite",
        )

    def _beyond(self, at: int, value: float) -> ClientError:
        return invalid(
            f"keep the values of {self.tensor.label} within the range of {self.wanted}, which the "
            f"engine has, or serve a checkpoint of {self.tensor.dtype}: element {at} is "
            f"{value:g}, which a cast would make infinite",
        )
