"""Small files that are replaced whole and survive a crash."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from typing import TYPE_CHECKING, Any

import xxhash

from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "TEMPORARY",
    "decode_document",
    "encode_document",
    "read_document",
    "replace",
    "write_document",
]

#: Suffix of files that count for nothing; `Store.open` removes them.
TEMPORARY = ".tmp"


def replace(path: Path, data: bytes) -> None:
    """Write a file and flush it and its name; when this raises, no half of it is under `path`.

    Raises:
        OSError: The file is the old one or, where the directory could not be flushed, the new one.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    fd = durable_files.create(temporary)
    try:
        try:
            durable_files.write(fd, data)
            durable_files.fsync(fd)
        finally:
            os.close(fd)
        durable_files.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            durable_files.unlink(temporary)
        raise
    durable_files.flush_directory(path.parent)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a JSON document that proves its own integrity.

    Raises:
        OSError: As `replace`.
    """
    replace(path, encode_document(document))


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return a JSON document that proves its own integrity; equal ones have equal bytes."""
    body = json.dumps(document, separators=(",", ":"))
    return f'{{"xxh3_128":"{_digest(body)}","document":{body}}}'.encode()


def read_document(path: Path) -> dict[str, Any]:
    """Return what `write_document` wrote.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    return decode_document(path.read_bytes())


def decode_document(data: bytes) -> dict[str, Any]:
    """Return what `encode_document` encoded.

    Raises:
        ValueError: It is damaged.
    """
    frame = json.loads(data)
    try:
        document = frame["document"]
        good = frame["xxh3_128"] == _digest(json.dumps(document, separators=(",", ":")))
    except (TypeError, KeyError):
        good = False
    if not good or not isinstance(document, dict):
        raise ValueError("its digest does not match")
    return document


def _digest(body: str) -> str:
    return xxhash.xxh3_128_hexdigest(body.encode())
