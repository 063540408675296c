"""Segments: reusable shared memory that holds one shard each, in huge pages where possible.

A segment is a memfd, reserved in full when it is made and sealed against shrinking and growing, so
that no peer can make a reader die of SIGBUS. It has no name that could leak or be squatted:
processes get descriptors over the segment socket (`weightsync.shm.segment_socket`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import signal

from weightsync.errors import Reason, WeightSyncError
from weightsync.process_limits import memory_remedy

#: One huge page on x86-64.
HUGE = 2 << 20

MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def advise(address: int, size: int, advice: int) -> int:
    """Call madvise(2) without the GIL; return 0 or the error number."""
    # Through ctypes, because mmap.madvise holds the GIL.
    return 0 if _libc.madvise(address, size, advice) == 0 else ctypes.get_errno()


def reserve(size: int) -> tuple[mmap.mmap, int, int]:
    """Take addresses for `size` bytes at which huge pages can lie; nothing is there yet.

    Returns what has them until it is closed, where in it the first byte is, and its address.
    """
    slack = HUGE if size >= HUGE else 0
    # Python cannot map at a given address, so this takes a place that is large enough.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    place = mmap.mmap(-1, size + slack, flags=flags)
    anchor = ctypes.c_char.from_buffer(place)
    begin = ctypes.addressof(anchor)
    # The traceback of a later error must not keep the mapping.
    del anchor
    offset = -begin % HUGE if slack else 0
    return place, offset, begin + offset


def map_at(address: int, size: int, prot: int, flags: int, fd: int) -> None:
    """Put the first `size` bytes of a file at reserved addresses by one call, or change nothing."""
    if _libc.mmap(address, size, prot, flags | _MAP_FIXED, fd, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class MemoryMapping:
    """The first `size` bytes behind `fd`, which may be closed afterwards; writable until `close`.

    `size` is a multiple of the page size.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._place, offset, self.address = reserve(size)
        try:
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            map_at(self.address, size, prot, mmap.MAP_SHARED, fd)
        except OSError:
            self._place.close()
            raise
        self.view = memoryview(self._place)[offset : offset + size]

    def keep_from_children(self) -> None:
        self._place.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Unmap; a view that somebody still holds keeps it until that is gone."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._place.close()


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
    granule = GRANULE if size >= GRANULE else _PAGE
    return max(_PAGE, -(-size // granule) * granule)


def _populate(mapping: MemoryMapping, size: int) -> bool:
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
    """Shared memory of a fixed size that this process owns; once created, writing cannot fail.

    `id` is hard to guess, and `capacity` at least what was asked for. Mapping `huge` memory takes
    no time. `granted`: others got a writable descriptor, and were not proved to have let go.
    """

    def __init__(self, fd: int, capacity: int) -> None:
        self.id = secrets.token_hex(8)
        self.capacity = capacity
        self.fd = fd
        self.huge = False
        self.granted = False
        self._mapping = MemoryMapping(fd, capacity)
        self.view = self._mapping.view

    @property
    def address(self) -> int:
        return self._mapping.address

    @classmethod
    def create(cls, size: int) -> Segment:
        """Reserve memory or raise MEMORY_EXHAUSTED. Takes about 0.3 s per GiB; releases the GIL."""
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
                remedy = memory_remedy(error, "free memory or lower the number of slots")
                raise WeightSyncError(
                    Reason.MEMORY_EXHAUSTED,
                    f"the host refused {capacity} bytes of shared memory ({error.strerror}); "
                    f"{remedy}",
                ) from error
            undo.pop_all()
        return segment

    def fill(self, begin: int, data: bytes) -> None:
        """Copy all of `data` to byte `begin` and after, in pieces, as copying holds the GIL."""
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
        """Whether no process can write any more through what was lent.

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
    """Whether nobody but its maker has opened a memfd for writing.

    The kernel grants a read lease (F_SETLEASE) only then; False where it knows no leases.
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
    """A segment of another process, mapped read-only, until `close`."""

    def __init__(self, fd: int, capacity: int) -> None:
        """Map `capacity` bytes of `fd`, which is closed in any case."""
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapping = mmap.mmap(fd, capacity, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.view = memoryview(self._mapping)

    def close(self) -> None:
        """Raise BufferError, and stay, if somebody still views it, numpy's arrays included."""
        self.view.release()
        try:
            self._mapping.close()
        except BufferError:
            self.view = memoryview(self._mapping)
            raise
