"""How kernels are compiled, and where compiled ones are kept from one process to the next."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import xxhash

from weightsync.jit.processor import vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["inner", "kernel"]

#: numba's setting is the whole process's, and packages are warmed up by threads of their own.
_declaring = threading.Lock()

#: Bounds are checked where counts are; a division by zero does not occur.
_OPTIONS = {"nogil": True, "error_model": "numpy"}


@cache
def _folder(package: Path) -> Path | None:
    """Return a folder for the machine code of a package that nobody else can write, or None.

    Its name depends on all sources of the kernels: numba itself looks at one file only.
    """
    folders = {package, Path(__file__).parent}
    paths = sorted(path for folder in folders for path in folder.glob("*.py"))
    sources = b"".join(path.read_bytes() for path in paths)
    name = f"{xxhash.xxh3_128_hexdigest(sources)}-{vectors()}"
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "weightsync-kernels" / name
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        # What lies there is loaded as code, and who owns the parent could put another folder there.
        return folder if _is_ours(folder) and _is_ours(folder.parent) else None
    except (OSError, RuntimeError):
        return None


def _is_ours(folder: Path) -> bool:
    facts = folder.lstat()
    ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return ours and not facts.st_mode & 0o022


@contextlib.contextmanager
def _keeping(folder: Path | None) -> Iterator[bool]:
    """Make numba choose `folder` for what is declared now, and nothing else of the process."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")
    try:
        yield folder is not None
    finally:
        numba.config.CACHE_DIR = before


def inner(function: Callable[..., Any]) -> Any:
    """Return a function that kernels call."""
    return numba.njit(**_OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Return the function compiled for int64 in and out; releases the GIL while it runs."""
    parameters = ",".join(["int64"] * len(signature(function).parameters))
    with _declaring, _keeping(_folder(Path(function.__code__.co_filename).parent)) as kept:
        declared = numba.njit(cache=kept, **_OPTIONS)(function)
    declared.compile(f"int64({parameters})")
    declared.disable_compile()
    return declared
