"""Segments: reusable shared memory that holds one shard each.

A segment is a memfd, reserved in full when it is made and sealed against shrinking and growing, so
that no peer can make a reader die of SIGBUS. It has no name that could leak or be squatted:
processes get descriptors over the segment socket (`weightsync.shm.segment_socket`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import signal

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.huge_pages import HUGE, Mapping, advise

__all__ = ["MappedSegment", "Segment", "reserved_size", "unwritten", "writers_are_seen"]

#: Large segments are reserved in multiples of this many bytes.
GRANULE = HUGE
_PAGE = mmap.PAGESIZE
#: Bytes that are touched at once. Meanwhile nobody else can map or unmap anything in this process,
#: and who waits for that in Python holds the GIL.
_PIECE = GRANULE
#: Bytes that are copied at once.
_COPIED = 1 << 20

_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25


def reserved_size(size: int) -> int:
    """Return the bytes of memory that a segment for `size` bytes takes."""
    granule = GRANULE if size >= GRANULE else _PAGE
    return max(_PAGE, -(-size // granule) * granule)


def _populate(mapping: Mapping, size: int) -> bool:
    """Back a new segment with memory; return whether with huge pages."""
    # First-touch pages cost 10 to 40 times a warm copy, so they are touched here and never again.
    # Kernels before 5.14 lack the advice: pages then become warm with the first push.
    huge = size >= GRANULE
    for at in range(0, size, _PIECE):
        begin, piece = mapping.address + at, min(_PIECE, size - at)
        code = advise(begin, piece, _MADV_POPULATE_WRITE)
        if code in (errno.EINVAL, errno.ENOSYS):
            return False
        if code:
            raise OSError(code, os.strerror(code))
        # With small pages every other mapping costs 0.1 s per GiB. A kernel that makes no huge one
        # of them is not asked again.
        huge = huge and advise(begin, piece, _MADV_COLLAPSE) == 0
    return huge


class Segment:
    """Shared memory of a fixed size that this process owns and may write.

    Once `create` returned, every byte is backed by memory: writing cannot fail.

    Attributes:
        id: Hard to guess name for the segment socket.
        capacity: Bytes reserved; at least what was asked for.
        fd: Writable descriptor.
        view: All bytes, writable.
        huge: It lies in huge pages: mapping it takes no time.
        granted: Another process was given a writable descriptor and was not proved to have let go.
    """

    def __init__(self, fd: int, capacity: int) -> None:
        self.id = secrets.token_hex(8)
        self.capacity = capacity
        self.fd = fd
        self.huge = False
        self.granted = False
        self._mapping = Mapping(fd, capacity)
        self.view = self._mapping.view

    @property
    def address(self) -> int:
        """Where it is mapped in this process."""
        return self._mapping.address

    @classmethod
    def create(cls, size: int) -> Segment:
        """Reserve memory for `size` bytes. Takes about 0.3 s per GiB; releases the GIL.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED when the host has not got the memory.
        """
        capacity = reserved_size(size)
        with contextlib.ExitStack() as undo:
            try:
                fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                # Who is handed a read-only descriptor must not open it again for writing.
                os.fchmod(fd, 0o600)
                os.posix_fallocate(fd, 0, capacity)
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
                segment = cls(fd, capacity)
                undo.pop_all()
                undo.callback(segment.close)
                segment.huge = _populate(segment._mapping, capacity)
            except OSError as error:
                raise WeightSyncError(
                    Reason.MEMORY_EXHAUSTED,
                    f"the host refused {capacity} bytes of shared memory ({error.strerror}); free "
                    "memory or lower the number of slots",
                ) from error
            undo.pop_all()
        return segment

    def fill(self, begin: int, data: bytes) -> None:
        """Copy all of `data` to byte `begin` and after, in pieces.

        New pages are slow to fill, and copying holds the GIL.
        """
        for at in range(0, len(data), _COPIED):
            piece = data[at : at + _COPIED]
            self.view[begin + at : begin + at + len(piece)] = piece

    def read_only_fd(self) -> int:
        """Return a new descriptor that cannot be mapped writable. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def lend(self) -> int:
        """Return a new writable descriptor for another process. The caller closes its own."""
        # Opened, not duplicated: who opened a file counts as a writer for the kernel; who made it
        # (this process, and whoever got a duplicate of its descriptor) does not.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        self.granted = True
        return fd

    def taken_back(self) -> bool:
        """Return whether no process can write any more through what was lent, by the kernel's word.

        False as long as such a descriptor, a duplicate of it, or a mapping made through it lives.
        """
        if self.granted and unwritten(self.fd):
            self.granted = False
        return not self.granted

    def close(self) -> None:
        """Give the memory back as soon as nobody maps it; further calls do nothing."""
        # A view that somebody still holds keeps the mapping; the descriptor goes in any case.
        self._mapping.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def unwritten(fd: int) -> bool:
    """Return whether nobody has opened the memory of a memfd for writing, but who made it.

    The kernel grants a read lease (fcntl(2), F_SETLEASE) only then. Where it knows no leases, this
    is False.
    """
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Who opens it for writing in this very moment would have us killed by SIGIO; by default
        # nothing comes of SIGURG.
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(reader)
    return True


def writers_are_seen() -> bool:
    """Return whether `Segment.taken_back` can be relied on in this kernel, by trying it."""
    segment = Segment.create(_PAGE)
    try:
        fd = segment.lend()
        try:
            open_unseen = unwritten(segment.fd)
            mapping = mmap.mmap(fd, _PAGE)
        finally:
            os.close(fd)
        mapping_unseen = unwritten(segment.fd)
        mapping.close()
        return not open_unseen and not mapping_unseen and segment.taken_back()
    finally:
        segment.close()


class MappedSegment:
    """A segment of another process, mapped read-only.

    The mapping stays until `close`; close it only when nothing reads `view` any more.

    Attributes:
        view: All bytes, read-only.
    """

    def __init__(self, fd: int, capacity: int) -> None:
        """Map `capacity` bytes of `fd`, which is closed in any case."""
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapping = mmap.mmap(fd, capacity, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.view = memoryview(self._mapping)

    def close(self) -> None:
        """Unmap.

        Raises:
            BufferError: Somebody still views it, numpy's arrays included; it stays as it was.
        """
        self.view.release()
        try:
            self._mapping.close()
        except BufferError:
            self.view = memoryview(self._mapping)
            raise
