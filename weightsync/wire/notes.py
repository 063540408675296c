"""What is too much for a message, which must fit into a socket's buffer: a file tells it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["noted", "read_note"]


@contextlib.contextmanager
def noted(facts: dict[str, Any]) -> Iterator[int]:
    """Lend a descriptor of a file with these facts, for another process of this server."""
    fd = os.memfd_create("weightsync-task", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(facts).encode())
        yield fd
    finally:
        os.close(fd)


def read_note(fd: int) -> dict[str, Any]:
    """Return what `noted` was given."""
    found: dict[str, Any] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return found
