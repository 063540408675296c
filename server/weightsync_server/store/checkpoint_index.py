"""The list beside a shard that is still arriving: which of its bytes are on disk.

Its first line tells the shard, each further one a range of bytes with their digest, so that a torn
range is found when it is read back. A line whose checksum is wrong counts for nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import xxhash

from weightsync.model.manifest import ShardEntry
from weightsync_server.ops import durable_files

#: What the name of the list adds to that of the shard.
SUFFIX = ".kept"


@dataclass(frozen=True)
class Range:
    """Consecutive bytes of a shard on disk, with their hexadecimal xxh3-128."""

    begin: int
    end: int
    digest: str


@dataclass(frozen=True)
class CheckpointIndex:
    """What a list tells; its `ranges` begin at the first byte and have no gap."""

    entry: ShardEntry
    header_digest: str
    ranges: tuple[Range, ...]

    @property
    def end(self) -> int:
        return self.ranges[-1].end if self.ranges else 0


def note(path: str, entry: ShardEntry, header_digest: str, kept: Range) -> None:
    """Add a durable range to the list of a shard's file; the first one begins it anew.

    The line is durable, but not the list's name. After an OSError the range may be in it.
    """
    data = _line([kept.begin, kept.end, kept.digest])
    if kept.begin == 0:
        durable_files.unlink(path + SUFFIX)
        fd = durable_files.create(path + SUFFIX)
        data = _line([*astuple(entry), header_digest]) + data
    else:
        fd = durable_files.append(path + SUFFIX)
    try:
        durable_files.write(fd, data)
        durable_files.fsync(fd)
    finally:
        os.close(fd)


def read(path: str) -> CheckpointIndex:
    """Return the list of a shard's file; ValueError if it does not tell its shard."""
    lines = [_parsed(line) for line in Path(path + SUFFIX).read_bytes().split(b"\n")]
    first, *others = [line for line in lines if line is not None] or [[]]
    try:
        name, size, header_size, header_digest = first
        # Of two ranges that begin alike, the later one was written over the earlier one.
        ranges = {begin: Range(begin, end, digest) for begin, end, digest in others}
        entry = ShardEntry(str(name), int(size), int(header_size))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{Path(path).name}{SUFFIX} does not name its shard") from error
    walked: list[Range] = []
    position = 0
    while position in ranges and position < ranges[position].end <= entry.size:
        walked.append(ranges[position])
        position = ranges[position].end
    return CheckpointIndex(entry, str(header_digest), tuple(walked))


def _line(facts: list[Any]) -> bytes:
    # A line break in front too, so that a torn line spoils no other.
    body = json.dumps(facts).encode()
    return b"\n" + xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"


def _parsed(line: bytes) -> list[Any] | None:
    checksum, _, body = line.partition(b" ")
    if not body or checksum != xxhash.xxh3_64_hexdigest(body).encode():
        return None
    facts = json.loads(body)
    return facts if isinstance(facts, list) else None
