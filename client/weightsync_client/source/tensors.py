"""Tensors of any library as bytes: PyTorch, NumPy, safetensors, DLPack and the buffer protocol."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from weightsync.model.digest import TensorDigester
from weightsync.model.dtypes import DTYPE_BITS
from weightsync_client.errors import ClientError, invalid

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


#: Bytes that are copied at a time.
_BLOCK_BYTES = 16 << 20
#: Bytes that are digested at a time; small pieces have threads wait for the interpreter.
_DIGEST_BYTES = 8 << 20

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

    With `views`, what was read is valid only until the next read, so it is not copied out.
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
        open: Gives a function that reads ranges of its bytes, row-major, little-endian.
        device: The PyTorch device that holds it; None: the host.
        flat: Gives all bytes of a PyTorch tensor in a row, on its device.
        in_place: They lie so already: `flat` copies nothing.
        title: What a sentence calls it; empty: a tensor of that name.
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
        return self.title or f"tensor {self.name!r}"

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def reader(self, scratch: Scratch) -> Read:
        try:
            return self.open(scratch)
        except ClientError:
            raise
        except Exception as error:
            raise invalid(
                f"{self.label} cannot be read as plain bytes: {error}",
            ) from error

    def copy_into(self, memory: NDArray[np.uint8], scratch: Scratch) -> None:
        import numpy as np

        read = self.reader(scratch)
        for at in range(0, self.size, _BLOCK_BYTES):
            end = min(at + _BLOCK_BYTES, self.size)
            memory[at:end] = np.frombuffer(read(at, end), np.uint8)

    def digest(self, scratch: Scratch) -> bytes:
        """Return the digest of all bytes, xxh3-128."""
        state, read = TensorDigester(), self.reader(scratch)
        for at in range(0, self.size, _DIGEST_BYTES):
            state.update(read(at, min(at + _DIGEST_BYTES, self.size)))
        return state.digest()

    def copied(self, memory: NDArray[np.uint8], scratch: Scratch) -> SourceTensor:
        """Return this tensor as it is now, in `memory`, which has its size."""
        self.copy_into(memory, scratch)
        view = memory.data
        return SourceTensor(self.name, self.dtype, self.shape, lambda _: lambda a, b: view[a:b])


def wrap(name: str, value: object) -> SourceTensor:
    """Return the tensor that `value` is, whatever its library; refuse one without plain bytes."""
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
        raise invalid(
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
        raise invalid(
            f"tensor {name!r} of dtype {dtype!r} and shape {list(tensor.shape)} has {len(view)} "
            "bytes; use a safetensors dtype and as many bytes as it needs",
        )
    return tensor


def dtype_name(name: str, dtype: str) -> str:
    """Return what safetensors calls a dtype of PyTorch or NumPy.

    `dtype` is without a module; `name` is the tensor's.
    """
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise invalid(
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
        problem = (
            "is sharded over ranks, and an iterator cannot give such tensors; push all of them "
            "in a dict"
        )
    elif tensor.layout != torch.strided:
        problem = f"has the layout {tensor.layout}; push its to_dense()"
    elif tensor.is_quantized:
        problem = "is quantised by PyTorch; push its int_repr() and scales as tensors"
    elif tensor.device.type == "meta":
        problem = "is on the meta device and has no bytes; load it first"
    if problem:
        raise invalid(f"tensor {name!r} {problem}")
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
    return device_reader(lambda first, last: flat[first:last], len(flat), 1, flat.device, scratch)


def device_reader(
    part: Callable[[int, int], torch.Tensor],
    size: int,
    width: int,
    device: torch.device,
    scratch: Scratch,
) -> Read:
    """Return what reads `size` bytes of a device, block by block.

    `part` gives the bytes of elements, each of `width`, from one to another, on the device.
    """
    block = scratch.block(device)
    cached = range(0)

    def read(begin: int, end: int) -> memoryview | bytes:
        # Bytes, not a view, in most cases: the block is shared by all tensors of the stream.
        nonlocal cached
        first, last = begin // width, -(-end // width)
        if (last - first) * width > len(block):
            whole: bytes = part(first, last).cpu().numpy().tobytes()
            return whole[begin - first * width : end - first * width]
        if not (cached.start <= begin and end <= cached.stop):
            stop = min(first * width + len(block) // width * width, size)
            cached = range(first * width, stop)
            block[: len(cached)].copy_(part(first, stop // width))
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
    """Return what waits, in any thread, for the work queued by now on the tensors' devices.

    Threads that read tensors have streams of their own. This call itself waits for no device.
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


#: Bytes of a block; a larger tensor gets a block of its own.
_MEMORY_BYTES = 64 << 20


class CopyMemory:
    """Memory that is used again once nobody reads what lies in it: new pages cost more than a copy.

    One thread takes, any may let go. It holds no more than was in use at one time.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._block: NDArray[np.uint8] | None = None
        self._at = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes, in use as long as the array or a view of it is."""
        if self._block is None or len(self._block) - self._at < size:
            # Where nobody reads the block any more, it is the next one as well.
            self._block, self._at = None, 0
            self._block = self._new(size)
        begin, self._at = self._at, self._at + size
        return self._block[begin : self._at]

    def _new(self, size: int) -> NDArray[np.uint8]:
        import numpy as np

        fitting = (at for at, memory in enumerate(self._free) if len(memory) >= size)
        at = next(fitting, None)
        if at is None:
            self._free.clear()
            memory = np.empty(max(size, _MEMORY_BYTES), np.uint8)
        else:
            memory = self._free.pop(at)
        # Its views keep the block, not the memory, and the block's end gives the memory back.
        block = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(block, self._free.append, memory).atexit = False
        return block
