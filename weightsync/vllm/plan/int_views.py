"""Elements as the integers that their bytes are: compared, digested and patched bit for bit.

Whatever is long goes piece by piece, so that it ends soon when somebody wants it to and needs no
memory in proportion to a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightsync.model.digest import TensorDigester

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

__all__ = [
    "INTS",
    "StoppedError",
    "array_of",
    "as_ints",
    "cast",
    "joined_digest_of",
    "memory_of",
    "pieces",
    "tensor_digest_of",
]

#: Bytes between two looks at whether somebody wants it to stop: some milliseconds.
_PIECE_BYTES = 8 << 20
#: Elements that torch converts without waking the threads that decode.
_ALONE = 1 << 15

#: Integers by bytes of an element. They make NaN equal to itself and -0.0 differ from 0.0.
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StoppedError(Exception):
    """The server let go of this work."""


def as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers, without a copy."""
    return tensor.view(INTS[tensor.element_size()])


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a host tensor's elements as numpy's integers, without a copy.

    Numpy works in the calling thread alone and without the GIL.
    """
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
    """Return host values in another dtype, row-major, converted by the calling thread alone."""
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
    """Return the xxh3-128 of a tensor's elements in row-major order, wherever it lies.

    The GIL is released for large tensors.

    Args:
        tensor: Any strides, any device.
        dtype: What its elements are converted to first.
        stop: Asked before every piece; True raises `StoppedError`.
        device: Where a commit converts its elements; None: on the host. Both round alike, but
            devices have a NaN of their own.
    """
    return joined_digest_of([tensor], dtype, stop, device)


def joined_digest_of(
    tensors: Iterable[torch.Tensor],
    dtype: torch.dtype | None = None,
    stop: Callable[[], bool] = bool,
    device: torch.device | None = None,
) -> bytes:
    """Return the xxh3-128 of tensors one behind the other; see `tensor_digest_of`."""
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
