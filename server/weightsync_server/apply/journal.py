"""The journal of applies: INTENT before the first write to a parameter, DONE after the last.

One JSON object per line with a checksum in front. A torn or damaged tail is ignored; the last good
record tells where the engine was meant to be.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import xxhash

from weightsync import failpoints
from weightsync_server import files

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Entry", "Journal"]

#: The file is started anew, with only its last record, when it has grown to this many bytes.
_ROTATE_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One record.

    Attributes:
        event: `INTENT` or `DONE`.
        apply_id: The attempt.
        version: For INTENT where it goes, for DONE what is live.
        previous: The version that was live before; 0: none.
    """

    event: str
    apply_id: str
    version: int
    previous: int


def _encode(entry: Entry) -> bytes:
    body = json.dumps(asdict(entry)).encode()
    return f"{xxhash.xxh3_64_hexdigest(body)} ".encode() + body + b"\n"


def _decode(line: bytes) -> Entry | None:
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != xxhash.xxh3_64_hexdigest(body).encode():
        return None
    return Entry(**json.loads(body))


class Journal:
    """An append-only file; a record is on disk when `write` returns.

    Args:
        path: The file; made when missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        # Whether the file may end in a record that does not count.
        self._torn = False
        self._entries = self._read()
        self._rewrite()

    @property
    def last(self) -> Entry | None:
        """The newest good record."""
        return self._entries[-1] if self._entries else None

    @property
    def live(self) -> tuple[int, int]:
        """Live version and the one before, as of the last DONE; 0: none."""
        for entry in reversed(self._entries):
            if entry.event == "DONE":
                return entry.version, entry.previous
        return 0, 0

    def tells(self, version: int) -> bool:
        """Whether the newest record is that this version is live."""
        return self.last is not None and (self.last.event, self.last.version) == ("DONE", version)

    def write(self, entry: Entry) -> None:
        """Append a record durably. Blocks for one fsync.

        Raises:
            OSError: The disk refused; the record does not count.
        """
        failpoints.hit("journal.write")
        if self._torn or os.fstat(self._fd).st_size > _ROTATE_BYTES:
            self._rewrite()
        data = _encode(entry)
        self._torn = True
        files.write(self._fd, data)
        files.fsync(self._fd)
        self._torn = False
        self._entries.append(entry)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _read(self) -> list[Entry]:
        failpoints.hit("journal.read")
        entries: list[Entry] = []
        if self._path.exists():
            for line in self._path.read_bytes().splitlines(keepends=True):
                entry = _decode(line)
                if entry is None:
                    break
                entries.append(entry)
        return entries

    def _rewrite(self) -> None:
        # Also cuts a torn tail off, so that records written from now on are found again. Until the
        # end the open file may be one that has no name any more.
        self._torn = True
        done = [entry for entry in self._entries if entry.event == "DONE"][-1:]
        self._entries = done if self._entries[-1:] == done else done + self._entries[-1:]
        fresh = self._path.with_suffix(".new")
        files.unlink(fresh)
        fd = files.create(fresh)
        try:
            files.write(fd, b"".join(map(_encode, self._entries)))
            files.fsync(fd)
        finally:
            os.close(fd)
        files.rename(fresh, self._path)
        files.flush_directory(self._path.parent)
        before = self._fd
        self._fd = files.append(self._path)
        self._torn = False
        if before >= 0:
            os.close(before)
