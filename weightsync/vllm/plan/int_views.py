"""Elements as the integers that their bytes are: compared, digested and patched bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightsync.model.digest import TensorDigester
from weightsync.model.tensor_bits import INTS, as_ints

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: Bytes between two looks at whether somebody wants it to stop: some milliseconds.
_PIECE_BYTES = 8 << 20
#: Elements that torch converts without waking the threads that decode.
_ALONE = 1 << 15


class StoppedError(Exception):
    """The server let go of this work."""


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a host tensor, uncopied, for numpy, which works in this thread without the GIL."""
    array: NDArray[Any] = as_ints(tensor).numpy()
    return array


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the integers from a tensor's first element to its last, gaps included, as one row."""
    if tensor.numel() == 0:
        return as_ints(tensor).reshape(-1)
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return as_ints(tensor.as_strided((extent,), (1,)))


def pieces(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """Yield views of a tensor in row-major order, of at most `elements` each, but one row."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    while tensor.dim() > 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    yield from torch.split(tensor, max(1, elements // (tensor.numel() // tensor.shape[0])))


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert host values, row-major, by the calling thread alone."""
    if values.dtype == dtype:
        return values
    values = torch.from_numpy(np.ascontiguousarray(array_of(values))).view(values.dtype)
    result = torch.empty(values.shape, dtype=dtype)
    for source, target in zip(pieces(values, _ALONE), pieces(result, _ALONE), strict=True):
        target.copy_(source)
    return result


def tensor_digest_of(
    tensor: torch.Tensor,
    dtype: torch.dtype | None = None,
    stop: Callable[[], bool] = bool,
    device: torch.device | None = None,
) -> bytes:
    """Return the xxh3-128 of a tensor's elements, converted to `dtype`, in row-major order.

    The GIL is released for large tensors. `device` is where a commit converts them, None the host:
    both round alike, but devices have a NaN of their own.
    """
    return joined_digest_of([tensor], dtype, stop, device)


def joined_digest_of(
    tensors: Iterable[torch.Tensor],
    dtype: torch.dtype | None = None,
    stop: Callable[[], bool] = bool,
    device: torch.device | None = None,
) -> bytes:
    digester = TensorDigester()
    for tensor in tensors:
        if stop():
            raise StoppedError
        if _is_text(tensor, dtype):
            digester.update(array_of(tensor).data)
            continue
        for piece in pieces(tensor, _PIECE_BYTES // tensor.element_size()):
            if stop():
                raise StoppedError
            if dtype is not None and dtype != piece.dtype and device is not None:
                values = piece.to(device).to(dtype).cpu()
            else:
                values = cast(piece.cpu(), dtype or piece.dtype)
            digester.update(_row_major(values).data)
    return digester.digest()


def _is_text(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a tensor is digested as it lies: most of those of experts, by the thousand."""
    return (
        tensor.is_contiguous()
        and tensor.device.type == "cpu"
        and 0 < tensor.nbytes <= _PIECE_BYTES
        and tensor.element_size() in INTS
        and dtype in (None, tensor.dtype)
    )


def _row_major(values: torch.Tensor) -> NDArray[Any]:
    if values.element_size() in INTS:
        # A strided piece is gathered by numpy: torch would wake the threads that decode.
        return np.ascontiguousarray(array_of(values))
    raw: NDArray[Any] = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw
