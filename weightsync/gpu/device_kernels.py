"""Our own CUDA kernels: compiled by NVRTC, given ranges of memory, launched once for many tensors.

Sources: the NVRTC documentation, chapters General Information Query and Compilation.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


#: What a kernel moves at once, bytes; both sides begin at a multiple of it.
_WIDTH = 16
#: Bytes of a block of threads, and how many those are. On an H200 15.2 GB are copied in 7.3 ms with
#: 64 KiB and 512, in 7.4 to 8.3 with 32 KiB to 1 MiB and 256 or 512.
SPAN, THREADS = 64 << 10, 512


def fits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype can be a span's two sides."""
    return (
        left.numel() > 0
        and left.is_contiguous()
        and right.is_contiguous()
        and not left.data_ptr() % _WIDTH
        and not right.data_ptr() % _WIDTH
    )


def cut(flag: int, live: torch.Tensor, staged: torch.Tensor) -> NDArray[np.int64]:
    """Return the rows of a pair in the table of the kernels.

    `flag` is below 2^32; `fits` has accepted `staged`.
    """
    at = np.arange(0, live.nbytes, SPAN, dtype=np.int64)
    sizes = np.minimum(SPAN, live.nbytes - at)
    return np.stack([live.data_ptr() + at, staged.data_ptr() + at, sizes | flag << 32], axis=1)


_Pointer = ctypes.c_void_p
_LOG_CHARS = 2000


class NvrtcError(Exception):
    """There is no NVRTC, or it refused the source; its text is one clause."""


def compile_source(source: str, name: str, capability: tuple[int, int]) -> bytes:
    """Return the code (cubin) of a CUDA source for one kind of device; takes half a second.

    `source` includes nothing. NvrtcError has the compiler's own words.
    """
    library = _library()
    program = _Pointer()
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), name.encode(), 0, None, None
    )
    _check(made, "nvrtcCreateProgram")
    try:
        options = [b"--gpu-architecture=sm_%d%d" % capability, b"--std=c++17"]
        given = (ctypes.c_char_p * len(options))(*options)
        if library.nvrtcCompileProgram(program, len(options), given):
            raise NvrtcError(f"NVRTC refused {name}: {_text(library, program)[:_LOG_CHARS]}")
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(code: int, what: str) -> None:
    if code:
        raise NvrtcError(f"{what} answered {code}")


def _text(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
    log = ctypes.create_string_buffer(size.value)
    _check(library.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
    return " ".join(log.value.decode(errors="replace").split())


@cache
def _library() -> ctypes.CDLL:
    if not torch.version.cuda:
        raise NvrtcError("this PyTorch is not built for CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    refused = []
    for path in (*_installed(name), name):
        try:
            if isinstance(path, Path):
                # It opens these by bare names, which are no paths in an environment of Python's.
                for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
        except OSError as error:
            refused.append(str(error))
    raise NvrtcError(f"there is no NVRTC ({'; '.join(refused)})")


def _installed(name: str) -> Iterator[Path]:
    """Yield where packages of NVIDIA's that PyTorch depends on have a library."""
    for entry in filter(None, sys.path):
        yield from sorted(Path(entry).glob(f"nvidia/*/lib/{name}"))


_making = threading.Lock()

_SOURCE = Path(__file__).with_name("kernels.cu")
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuModuleLoadData": (_Pointer, ctypes.c_char_p),
    "cuModuleGetFunction": (_Pointer, _Pointer, ctypes.c_char_p),
    "cuLaunchKernel": (_Pointer, *(ctypes.c_uint,) * 7, _Pointer, _Pointer, _Pointer),
}


@cache
def _compiled(capability: tuple[int, int]) -> bytes:
    return compile_source(_SOURCE.read_text(), _SOURCE.name, capability)


class KernelError(Exception):
    """The driver refused a kernel; its text is one clause."""


class Launch:
    """A kernel and its arguments, made off the pause.

    `grid` has the number of blocks, and of threads in each. Tensors in `arguments` are kept, and
    passed by address.
    """

    def __init__(
        self,
        kernels: Kernels,
        name: str,
        grid: tuple[int, int],
        arguments: Sequence[torch.Tensor | int],
    ) -> None:
        self._kernels = kernels
        self._function = kernels.function(name)
        self._grid = grid
        self._kept = arguments
        self._values = [
            ctypes.c_uint64(a if isinstance(a, int) else a.data_ptr()) for a in arguments
        ]
        self._pointers = (_Pointer * len(self._values))(
            *(ctypes.addressof(value) for value in self._values)
        )

    def queue(self) -> None:
        """Queue it on the current stream; KernelError: the driver refused it."""
        self._kernels.queue(self._function, self._grid, self._pointers)


class Kernels:
    """The kernels of `kernels.cu`, compiled for one CUDA device, whose memory alone they read.

    Raises NvrtcError for failures of the compiler, KernelError for the driver's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        code = _compiled(torch.cuda.get_device_capability(device))
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KernelError(f"there is no CUDA driver ({error})") from None
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._driver, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._module = _Pointer()
        self._functions: dict[str, ctypes.c_void_p] = {}
        with torch.cuda.device(device):
            # The driver needs the context, which PyTorch makes with its first call.
            torch.cuda.current_stream(device).synchronize()
            self._call("cuModuleLoadData", ctypes.byref(self._module), code)

    @staticmethod
    def compile_for(device: torch.device) -> None:
        """Compile the kernels for a device, without using it.

        Raises NvrtcError when there is no compiler, or it refuses them.
        """
        if device.type == "cuda":
            _compiled(torch.cuda.get_device_capability(device))

    @classmethod
    def find(cls, device: torch.device) -> Kernels | None:
        """Return the kernels for a device; None: PyTorch's are used, and the log says why."""
        if device.type != "cuda":
            return None
        try:
            return cls(device)
        except (NvrtcError, KernelError) as error:
            logger.warning("weightsync: PyTorch's kernels are used on %s: %s", device, error)
            return None

    def function(self, name: str) -> ctypes.c_void_p:
        if name not in self._functions:
            found = _Pointer()
            self._call("cuModuleGetFunction", ctypes.byref(found), self._module, name.encode())
            self._functions[name] = found
        return self._functions[name]

    def queue(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int],
        pointers: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        blocks, threads = grid
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            self._call(
                "cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None
            )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise KernelError(f"{name} answered {code}")


def kernels_of(device: torch.device) -> Kernels | None:
    """Return the kernels for a device, compiled once, in half a second; None: it has none."""
    with _making:
        return _kernels(device)


@cache
def _kernels(device: torch.device) -> Kernels | None:
    return Kernels.find(device)


#: Shorter texts are digested in another way, which the kernel does not know.
_LONGEST_SHORT = 240
#: Threads of a tensor: `WARPS` of kernels.cu and one more.
_DIGEST_THREADS = 17 * 32


def digestible(tensor: torch.Tensor) -> bool:
    return (
        tensor.nbytes > _LONGEST_SHORT and tensor.is_contiguous() and not tensor.data_ptr() % _WIDTH
    )


class Digests:
    """The xxh3-128 of tensors, as `weightsync.model.digest.tensor_digest` computes it.

    One block of threads digests one tensor, on an H200 at 36 GB/s: side by side they reach what the
    memory gives, and few of them leave the device to others. There is at least one of `tensors`,
    and `digestible` has accepted each.
    """

    def __init__(self, kernels: Kernels, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        rows = [[tensor.data_ptr(), tensor.nbytes] for tensor in tensors]
        self._kernels = kernels
        self._texts = torch.tensor(rows, dtype=torch.int64).to(device)
        self._found = torch.zeros(len(rows), 2, dtype=torch.int64, device=device)

    def queue(self, begin: int, end: int) -> None:
        """Queue the digests of tensors `begin` to `end` on the current stream."""
        texts, found = self._texts[begin:end], self._found[begin:end]
        Launch(
            self._kernels, "digest_texts", (end - begin, _DIGEST_THREADS), [texts, found]
        ).queue()

    def results(self) -> list[bytes]:
        """Wait for the current stream; return the digests of all tensors."""
        return [
            b"".join(half.to_bytes(8, "big", signed=True) for half in halves)
            for halves in self._found.tolist()
        ]


class DeviceDigests:
    """Digests that a device computes while others work; any thread may ask for them.

    The bytes of each of `tensors` lie in a row, and stay as they are until its digest was given.
    `names` are those that it can digest.
    """

    def __init__(self, kernels: Kernels, tensors: Mapping[str, torch.Tensor]) -> None:
        known = [name for name, tensor in tensors.items() if digestible(tensor)]
        # The longest first: each is the work of one block of threads.
        known.sort(key=lambda name: -tensors[name].nbytes)
        self.names = frozenset(known)
        self._order = known
        self._lock = threading.Lock()
        self._found: dict[str, bytes] | None = None if known else {}
        if not known:
            return
        self._digests = Digests(kernels, [tensors[name] for name in known])
        self._digests.queue(0, len(known))
        device = tensors[known[0]].device
        self._done: Any = None
        if device.type == "cuda":
            # Of that device, whichever is the thread's own.
            stream = torch.cuda.current_stream(device)
            self._done = stream.record_event()

    def of(self, name: str) -> bytes:
        """Wait for the digest of one of `names`, and return it."""
        with self._lock:
            if self._found is None:
                if self._done is not None:
                    # Whoever asks may have another stream.
                    self._done.synchronize()
                self._found = dict(zip(self._order, self._digests.results(), strict=True))
            return self._found[name]
