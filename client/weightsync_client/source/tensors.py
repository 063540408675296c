"""Tensors of any library as bytes: PyTorch, NumPy, safetensors, DLPack and the buffer protocol.

No library is imported for it that the caller has not imported, but NumPy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync.model.dtypes import DTYPE_BITS
from weightsync_client.errors import ClientError, refuse

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = ["Read", "Scratch", "SourceTensor", "dtype_name", "queued_work", "settle", "wrap"]

#: Bytes that are copied at a time.
_BLOCK_BYTES = 16 << 20

# Names of PyTorch's and NumPy's (ml_dtypes') dtypes.
_DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
}  # fmt: skip

#: Reads bytes begin to end of a tensor; what it returns may be read until the tensor changes.
Read = Callable[[int, int], "memoryview | bytes"]


class Scratch:
    """Host memory of one stream, through which device tensors are copied block by block.

    Args:
        views: What is read of a device tensor is not needed any more when the next is read, so it
            need not be copied out of the block.
    """

    def __init__(self, *, views: bool = False) -> None:
        self.views = views
        self._block: torch.Tensor | None = None

    def block(self, device: torch.device) -> torch.Tensor:
        """Return the block, pinned where the device gains from it; made once."""
        if self._block is None:
            import torch

            pinned = device.type == "cuda"
            self._block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        return self._block


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor to push; holds a reference to the caller's tensor and copies nothing.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        open: Gives a function that reads ranges of its bytes, row-major and little-endian.
        device: The PyTorch device that holds it, if that is not the host.
        flat: For a PyTorch tensor: gives all its bytes in a row, on its device.
        in_place: They lie so already: `flat` copies nothing.
        title: What it is in a sentence; empty: a tensor of that name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    open: Callable[[Scratch], Read]
    device: torch.device | None = None
    flat: Callable[[], torch.Tensor] | None = None
    in_place: bool = False
    title: str = ""

    @property
    def label(self) -> str:
        """What it is in a sentence."""
        return self.title or f"tensor {self.name!r}"

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def reader(self, scratch: Scratch) -> Read:
        """Open the tensor for reading.

        Raises:
            InvalidError: Its library cannot give its bytes.
        """
        try:
            return self.open(scratch)
        except ClientError:
            raise
        except Exception as error:
            raise refuse(
                Reason.REQUEST_INVALID,
                f"{self.label} cannot be read as plain bytes: {error}",
            ) from error

    def copy_into(self, memory: NDArray[np.uint8], scratch: Scratch) -> None:
        """Copy all bytes of the tensor into `memory`, which has as many.

        Raises:
            InvalidError: Its library cannot give its bytes.
        """
        import numpy as np

        read = self.reader(scratch)
        for at in range(0, self.size, _BLOCK_BYTES):
            end = min(at + _BLOCK_BYTES, self.size)
            memory[at:end] = np.frombuffer(read(at, end), np.uint8)

    def copied(self, memory: NDArray[np.uint8], scratch: Scratch) -> SourceTensor:
        """Return this tensor as it is now, in `memory`, which has its size.

        Raises:
            InvalidError: Its library cannot give its bytes.
        """
        self.copy_into(memory, scratch)
        view = memory.data
        return SourceTensor(self.name, self.dtype, self.shape, lambda _: lambda a, b: view[a:b])


def wrap(name: str, value: object) -> SourceTensor:
    """Return the tensor that `value` is, whatever its library.

    Raises:
        InvalidError: It is no tensor, or of a kind that has no plain bytes.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _wrap_torch(name, value)
    if isinstance(value, Mapping) and {"dtype", "shape", "data"} <= value.keys():
        return _wrap_plain(name, value["dtype"], value["shape"], value["data"])
    if isinstance(getattr(value, "dtype", None), str) and hasattr(value, "data"):
        return _wrap_plain(name, value.dtype, value.shape, value.data)  # type: ignore[attr-defined] # as checked
    if hasattr(value, "get_dtype") and hasattr(value, "get_shape"):
        return wrap(name, value[:] if value.get_shape() else value[...])  # type: ignore[index] # a safetensors slice
    array = _as_array(value, torch)
    if torch is not None and isinstance(array, torch.Tensor):
        return _wrap_torch(name, array)
    if array is None:
        raise refuse(
            Reason.REQUEST_INVALID,
            f"tensor {name!r} is a {type(value).__name__}; push PyTorch or NumPy tensors, "
            "or objects with DLPack or the buffer protocol",
        )
    return _wrap_numpy(name, array)


def _as_array(value: Any, torch: Any) -> Any:
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    attempts: list[Callable[[], Any]] = []
    if hasattr(value, "__dlpack__"):
        attempts.append(lambda: (torch or np).from_dlpack(value))
    if hasattr(value, "__array__"):
        attempts.append(lambda: np.asarray(value))
    attempts.append(lambda: np.asarray(memoryview(value)))
    for attempt in attempts:
        try:
            return attempt()
        except Exception:  # noqa: BLE001, S112 - each library refuses in its own way
            continue
    return None


def _wrap_plain(name: str, dtype: str, shape: Any, data: Any) -> SourceTensor:
    # What safetensors' own functions take and give: dtype, shape and bytes.
    view = memoryview(data).cast("B")
    tensor = SourceTensor(name, dtype, tuple(map(int, shape)), lambda _: lambda a, b: view[a:b])
    if dtype not in DTYPE_BITS or tensor.size != len(view):
        raise refuse(
            Reason.REQUEST_INVALID,
            f"tensor {name!r} of dtype {dtype!r} and shape {list(tensor.shape)} has {len(view)} "
            "bytes; use a safetensors dtype and as many bytes as it needs",
        )
    return tensor


def dtype_name(name: str, dtype: str) -> str:
    """Return what safetensors calls a dtype of PyTorch or NumPy.

    Args:
        name: Of the tensor.
        dtype: As its library calls it, without a module.

    Raises:
        InvalidError: safetensors has no such dtype.
    """
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise refuse(
            Reason.REQUEST_INVALID,
            f"tensor {name!r} has dtype {dtype}, which safetensors cannot hold; "
            f"convert it to one of {' '.join(_DTYPES)}",
        ) from None


# NumPy takes longer to name a dtype than all else takes that a small tensor needs.
@cache
def _native_name(dtype: np.dtype[Any]) -> str:
    return dtype.newbyteorder("=").name


@cache
def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _wrap_numpy(name: str, array: np.ndarray[Any, Any]) -> SourceTensor:
    dtype = dtype_name(name, _native_name(array.dtype))

    def open_array(_: Scratch) -> Read:
        import numpy as np

        little = array.astype(_little(array.dtype), copy=False)
        flat = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
        view = flat.data
        return lambda begin, end: view[begin:end]

    return SourceTensor(name, dtype, array.shape, open_array)


def _wrap_torch(name: str, tensor: torch.Tensor) -> SourceTensor:
    import torch

    problem = ""
    if hasattr(tensor, "full_tensor"):
        problem = "is sharded over ranks, and one that comes alone is not; push all in a dict"
    elif tensor.layout != torch.strided:
        problem = f"has the layout {tensor.layout}; push its to_dense()"
    elif tensor.is_quantized:
        problem = "is quantised by PyTorch; push its int_repr() and scales as tensors"
    elif tensor.device.type == "meta":
        problem = "is on the meta device and has no bytes; load it first"
    if problem:
        raise refuse(Reason.REQUEST_INVALID, f"tensor {name!r} {problem}")
    dtype = dtype_name(name, str(tensor.dtype).removeprefix("torch."))
    shape = tuple(tensor.shape)
    if dtype == "F4":
        # PyTorch counts pairs, safetensors elements.
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    device = None if tensor.device.type == "cpu" else tensor.device
    flat = partial(_flat, tensor)
    in_place = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return SourceTensor(name, dtype, shape, partial(_open_torch, flat), device, flat, in_place)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() == 1:
        # Not every 1-byte dtype can be copied under its own name.
        plain = plain.view(torch.uint8)
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _open_torch(get_flat: Callable[[], torch.Tensor], scratch: Scratch) -> Read:
    flat = get_flat()
    if flat.device.type == "cpu":
        view: memoryview = flat.numpy().data
        return lambda begin, end: view[begin:end]
    block = scratch.block(flat.device)
    cached = range(0)

    def read(begin: int, end: int) -> memoryview | bytes:
        # Bytes, not a view, in most cases: the block is shared by all tensors of the stream.
        nonlocal cached
        if end - begin > len(block):
            return flat[begin:end].cpu().numpy().tobytes()
        if not (cached.start <= begin and end <= cached.stop):
            cached = range(begin, min(begin + len(block), len(flat)))
            block[: len(cached)].copy_(flat[cached.start : cached.stop])
        found = block[begin - cached.start : end - cached.start].numpy()
        return found.data if scratch.views else found.tobytes()

    return read


def settle(device: torch.device) -> None:
    """Wait until work that the calling thread has queued on a device is done."""
    module = getattr(sys.modules.get("torch"), device.type, None)
    if module is None or device.type == "cpu":
        return
    if hasattr(module, "current_stream"):
        module.current_stream(device).synchronize()
    else:
        # Such as MPS, which has one queue for all.
        module.synchronize()


def queued_work(tensors: Iterable[SourceTensor]) -> Callable[[], None]:
    """Return what waits, in any thread, for the work that is queued on the tensors' devices by now.

    Threads that read tensors have streams of their own, which know nothing of the caller's. This
    call itself waits for no device, so an event loop may make it.
    """
    waits = [_mark(device) for device in {tensor.device for tensor in tensors} if device]

    def wait() -> None:
        for one in waits:
            one()

    return wait


def _mark(device: torch.device) -> Callable[[], None]:
    module: Any = getattr(sys.modules.get("torch"), device.type, None)
    if not hasattr(module, "current_stream"):
        return partial(settle, device)
    event = module.Event()
    event.record(module.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait
