"""CUDA source made into code of one device, by NVRTC, which comes with PyTorch.

Functions and constants are those of the NVRTC documentation, chapters General Information Query
and Compilation.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NvrtcError", "compile_source"]

_Pointer = ctypes.c_void_p
_LOG_CHARS = 2000


class NvrtcError(Exception):
    """There is no NVRTC, or it refused the source; its text is one clause."""


def compile_source(source: str, name: str, capability: tuple[int, int]) -> bytes:
    """Return the code (cubin) of a CUDA source for one kind of device; takes half a second.

    Args:
        source: CUDA C++ that includes nothing.
        name: Of the source, for messages.
        capability: Compute capability of the device.

    Raises:
        NvrtcError: With the compiler's own words.
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
            msg = f"NVRTC refused {name}: {_text(library, program)[:_LOG_CHARS]}"
            raise NvrtcError(msg)
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(code: int, what: str) -> None:
    if code:
        msg = f"{what} answered {code}"
        raise NvrtcError(msg)


def _text(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
    log = ctypes.create_string_buffer(size.value)
    _check(library.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
    return " ".join(log.value.decode(errors="replace").split())


@cache
def _library() -> ctypes.CDLL:
    if not torch.version.cuda:
        msg = "this PyTorch is not built for CUDA"
        raise NvrtcError(msg)
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
    msg = f"there is no NVRTC ({'; '.join(refused)})"
    raise NvrtcError(msg)


def _installed(name: str) -> Iterator[Path]:
    """Yield where packages of NVIDIA's that PyTorch depends on have a library."""
    for entry in filter(None, sys.path):
        yield from sorted(Path(entry).glob(f"nvidia/*/lib/{name}"))
