"""Status pages: shared memory in which a rank reports, so that nobody polls it by RPC.

One writer and any number of readers. A sequence number that is odd while the writer is at work and
a checksum make a torn read visible (a seqlock).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

import xxhash

from weightsync.shm.segments import Segment

#: Bytes of one page; a report that does not fit is refused.
PAGE_BYTES = 64 << 10

_HEAD = struct.Struct("<QQI")


class PageReader:
    """Owns a status page. Publish a duplicate of `segment.fd` as writable."""

    def __init__(self) -> None:
        self.segment = Segment.create(PAGE_BYTES)

    def read(self) -> dict[str, Any] | None:
        """Return the latest whole report; None before the first and while one is being written."""
        view = self.segment.view
        sequence, checksum, size = _HEAD.unpack_from(view)
        if sequence == 0 or sequence % 2 or size > PAGE_BYTES - _HEAD.size:
            return None
        body = bytes(view[_HEAD.size : _HEAD.size + size])
        if xxhash.xxh3_64_intdigest(body) != checksum or _HEAD.unpack_from(view)[0] != sequence:
            return None
        report = json.loads(body)
        return report if isinstance(report, dict) else None

    def close(self) -> None:
        self.segment.close()


class PageWriter:
    """Writes reports into a page of another process; `fd`, writable, is closed in any case."""

    def __init__(self, fd: int) -> None:
        try:
            self._mapping = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        # A writer before this one may have died halfway through a report.
        (last,) = struct.unpack_from("<Q", self._mapping)
        self._sequence = last + last % 2

    def write(self, report: Mapping[str, Any]) -> None:
        """Replace the report; readers see the old one, none, or this one whole."""
        body = json.dumps(report).encode()
        if len(body) > PAGE_BYTES - _HEAD.size:
            raise ValueError(f"a report of {len(body)} bytes; at most {PAGE_BYTES - _HEAD.size}")
        self._sequence += 1
        struct.pack_into("<Q", self._mapping, 0, self._sequence)
        self._mapping[_HEAD.size : _HEAD.size + len(body)] = body
        self._sequence += 1
        _HEAD.pack_into(self._mapping, 0, self._sequence, xxhash.xxh3_64_intdigest(body), len(body))

    def close(self) -> None:
        self._mapping.close()
