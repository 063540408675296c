"""Small files that are replaced whole and survive a crash."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TEMPORARY", "flush_directory", "read_document", "replace", "write_document"]

#: Suffix of files that count for nothing; `Store.open` removes them.
TEMPORARY = ".tmp"


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        OSError: They may not be.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, data: bytes) -> None:
    """Write a file and flush it and its name; when this raises, no half of it is under `path`.

    Raises:
        OSError: The file is the old one or, where the directory could not be flushed, the new one.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o640)
    try:
        with open(fd, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(fd)
        os.replace(temporary, path)  # noqa: PTH105 - a seam of the tests
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush_directory(path.parent)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a JSON document that proves its own integrity.

    Raises:
        OSError: As `replace`.
    """
    body = json.dumps(document, separators=(",", ":"))
    replace(path, f'{{"xxh3_128":"{_digest(body)}","document":{body}}}'.encode())


def read_document(path: Path) -> dict[str, Any]:
    """Return what `write_document` wrote.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    frame = json.loads(path.read_bytes())
    try:
        document = frame["document"]
        good = frame["xxh3_128"] == _digest(json.dumps(document, separators=(",", ":")))
    except (TypeError, KeyError):
        good = False
    if not good or not isinstance(document, dict):
        msg = "its digest does not match"
        raise ValueError(msg)
    return document


def _digest(body: str) -> str:
    return xxhash.xxh3_128_hexdigest(body.encode())
