"""What torch does not offer of CUDA: copies of rows, registered memory, and a pool of streams."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from weightsync.vllm.plan.load_plan import PitchedRows


logger = logging.getLogger(__name__)


_HOST_TO_DEVICE = 1
#: Any device of this process may read it; nobody writes to it.
_PORTABLE, _READ_ONLY = 1, 8


class Runtime:
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
            logger.warning(
                "weightsync: %s is not loaded in this process, so that slices of columns are "
                "copied slower, as whole rows",
                name,
            )
            return None

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor, rows: PitchedRows) -> None:
        """Copy `rows` from registered host memory, on the current stream, without waiting."""
        stream = torch.cuda.current_stream(target.device)
        with torch.cuda.device(target.device):
            code = self._library.cudaMemcpy2DAsync(
                target.data_ptr(), rows.target_pitch, source.data_ptr(), rows.source_pitch,
                rows.width, rows.count, _HOST_TO_DEVICE, stream.cuda_stream,
            )  # fmt: skip
        if code:
            self.forget_error()
            raise RuntimeError(f"cudaMemcpy2DAsync answered {code}")

    def forget_error(self) -> None:
        """Keep an error that was dealt with from being raised by what torch does next."""
        self._library.cudaGetLastError()


class Registrar:
    """Registers mapped segments with CUDA, so that the device reads them at full speed."""

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
        address = self._registered.pop(name, None)
        if address is None:
            return
        if code := self._call("cudaHostUnregister", address):
            logger.warning("weightsync: CUDA did not unregister a segment (error %d)", code)

    def _call(self, name: str, *args: int) -> int:
        """Return CUDA's answer; 0: it has done it."""
        with torch.cuda.device(self._device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own gap
            code = int(getattr(cudart, name)(*args))
        if code and self._runtime is not None:
            self._runtime.forget_error()
        return code


#: So that one long piece of work keeps none of the others waiting.
_STREAMS = 4


class StreamPool:
    """Gives streams out in turn; on a CPU all is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        count = _STREAMS if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]  # torch annotates nothing there
        self._turns = itertools.cycle(self._streams)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Have the body queue work that begins when what was queued before it is done."""
        if not self._streams:
            yield
            return
        stream = next(self._turns)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def close(self) -> None:
        """Wait for all of them: what they use may be given back then."""
        for stream in self._streams:
            stream.synchronize()

    def settle(self) -> None:
        """Have the current stream wait for all of them."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)
