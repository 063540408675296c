"""What torch does not offer of CUDA: rows of a matrix copied at once, and memory registered."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from weightsync.vllm.plan.pitched_rows import PitchedRows

__all__ = ["Registrar", "Runtime"]

logger = logging.getLogger(__name__)

_HOST_TO_DEVICE = 1
#: Any device of this process may read it; nobody writes to it.
_PORTABLE, _READ_ONLY = 1, 8


class Runtime:
    """The CUDA runtime that torch has loaded.

    Args:
        library: It.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        library.cudaMemcpy2DAsync.argtypes = [
            pointer, size, pointer, size, size, size, ctypes.c_int, pointer,
        ]  # fmt: skip
        library.cudaMemcpy2DAsync.restype = ctypes.c_int
        library.cudaGetLastError.restype = ctypes.c_int

    @classmethod
    def find(cls) -> Runtime | None:
        """Return the loaded runtime; None: torch has none, or none of its own file."""
        version = torch.version.cuda
        if not version:
            return None
        name = f"libcudart.so.{version.split('.')[0]}"
        try:
            return cls(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
        except OSError:
            logger.warning("weightsync: %s is not loaded; strided slices go as whole rows", name)
            return None

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor, rows: PitchedRows) -> None:
        """Copy rows from registered host memory, on the current stream, without waiting.

        Args:
            target: On the device.
            source: On the host.
            rows: Both, as the same rows of bytes.

        Raises:
            RuntimeError: CUDA refused.
        """
        stream = torch.cuda.current_stream(target.device)
        with torch.cuda.device(target.device):
            code = self._library.cudaMemcpy2DAsync(
                target.data_ptr(), rows.target_pitch, source.data_ptr(), rows.source_pitch,
                rows.width, rows.count, _HOST_TO_DEVICE, stream.cuda_stream,
            )  # fmt: skip
        if code:
            self.forget_error()
            msg = f"cudaMemcpy2DAsync answered {code}"
            raise RuntimeError(msg)

    def forget_error(self) -> None:
        """Keep an error that was dealt with from being raised by what torch does next."""
        self._library.cudaGetLastError()


class Registrar:
    """Registers mapped segments with CUDA, so that the device reads them at full speed.

    Args:
        device: Where this process has its parameters.
        runtime: The runtime, if it was found.

    Attributes:
        refused: What CUDA said when it did not register a segment; "": it did all.
    """

    def __init__(self, device: torch.device, runtime: Runtime | None) -> None:
        self.refused = ""
        self._device = device
        self._runtime = runtime
        self._registered: dict[str, int] = {}

    def register(self, name: str, view: memoryview) -> None:
        """Register a mapping until `unregister`. A refusal is told and changes nothing else."""
        if name in self._registered:
            return
        address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        code = self._call("cudaHostRegister", address, view.nbytes, _PORTABLE | _READ_ONLY)
        if code == 0:
            self._registered[name] = address
        elif not self.refused:
            self.refused = f"CUDA did not register shared memory (error {code})"
            logger.warning("weightsync: %s; copies from it are slower", self.refused)

    def unregister(self, name: str) -> None:
        """Let go of a mapping, before it is unmapped; without effect where it is not registered."""
        address = self._registered.pop(name, None)
        if address is None:
            return
        if code := self._call("cudaHostUnregister", address):
            logger.warning("weightsync: CUDA did not let go of a segment (error %d)", code)

    def _call(self, name: str, *args: int) -> int:
        """Return CUDA's answer; 0: it has done it."""
        with torch.cuda.device(self._device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own gap
            code = int(getattr(cudart, name)(*args))
        if code and self._runtime is not None:
            self._runtime.forget_error()
        return code
