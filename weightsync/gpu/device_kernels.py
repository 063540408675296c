"""Our own kernels: one launch where PyTorch needs one for each parameter."""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weightsync.gpu.nvrtc import NvrtcError, compile_source

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KernelError", "Kernels", "Launch", "kernels_of"]

logger = logging.getLogger(__name__)

_making = threading.Lock()

_SOURCE = Path(__file__).with_name("kernels.cu")
_Pointer = ctypes.c_void_p
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

    Args:
        kernels: Where it is from.
        name: Of the kernel.
        grid: Blocks, and threads of each.
        arguments: Addresses of tensors and unsigned 64-bit numbers. The tensors are kept.
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
        """Queue it on the current stream.

        Raises:
            KernelError: The driver refused it.
        """
        self._kernels.queue(self._function, self._grid, self._pointers)


class Kernels:
    """The kernels of `kernels.cu`, compiled for one device.

    Args:
        device: Of CUDA.

    Attributes:
        device: The same: they read no memory of another kind.

    Raises:
        NvrtcError: There is no compiler, or it refuses them.
        KernelError: The driver refuses them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        code = _compiled(torch.cuda.get_device_capability(device))
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            msg = f"there is no CUDA driver ({error})"
            raise KernelError(msg) from None
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
        """Have the kernels compiled for a device, which is not used for that.

        Raises:
            NvrtcError: There is no compiler, or it refuses them.
        """
        if device.type == "cuda":
            _compiled(torch.cuda.get_device_capability(device))

    @classmethod
    def find(cls, device: torch.device) -> Kernels | None:
        """Return the kernels for a device; None: PyTorch's are used instead, and the log says why.

        Args:
            device: Any.
        """
        if device.type != "cuda":
            return None
        try:
            return cls(device)
        except (NvrtcError, KernelError) as error:
            logger.warning("weightsync: PyTorch's kernels are used on %s: %s", device, error)
            return None

    def function(self, name: str) -> ctypes.c_void_p:
        """Return a kernel.

        Raises:
            KernelError: There is none of that name.
        """
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
        """Queue a kernel on the current stream; see `Launch`."""
        blocks, threads = grid
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            self._call(
                "cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None
            )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            msg = f"{name} answered {code}"
            raise KernelError(msg)


def kernels_of(device: torch.device) -> Kernels | None:
    """Return the kernels for a device, compiled once, in half a second; None: it has none."""
    with _making:
        return _kernels(device)


@cache
def _kernels(device: torch.device) -> Kernels | None:
    return Kernels.find(device)
