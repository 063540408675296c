"""Memory of NVIDIA GPUs across processes, by the CUDA driver: told by one, copied by another.

The driver alone (libcuda.so.1), so that a server needs no PyTorch for it. Numbers and signatures
are those of the CUDA driver API, chapters Device, Primary Context, Memory and Stream Management.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

#: CU_IPC_HANDLE_SIZE
_HANDLE_BYTES = 64
#: Of what names a device.
_UUID_BYTES = 16
_OK = 0
#: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
_REGISTERED = 712
#: Any context of the process may use it; streams do not wait for the default one.
_PORTABLE, _NON_BLOCKING, _LAZY_PEER_ACCESS = 1, 1, 1
#: CU_MEMORYTYPE_HOST and CU_MEMORYTYPE_DEVICE
_HOST_MEMORY, _DEVICE_MEMORY = 1, 2
#: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_ORDINAL = 9

_Pointer = ctypes.c_void_p
_Size = ctypes.c_size_t
_Memory = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _UUID_BYTES),)


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_Pointer,),
    "cuDeviceGet": (_Pointer, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_Pointer, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_Pointer, ctypes.c_int),
    "cuCtxSetCurrent": (_Pointer,),
    "cuPointerGetAttribute": (_Pointer, ctypes.c_int, _Memory),
    "cuMemGetAddressRange_v2": (_Pointer, _Pointer, _Memory),
    "cuIpcGetMemHandle": (_Pointer, _Memory),
    "cuIpcOpenMemHandle_v2": (_Pointer, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Memory,),
    "cuMemHostRegister_v2": (_Pointer, _Size, ctypes.c_uint),
    "cuMemHostUnregister": (_Pointer,),
    "cuMemcpyAsync": (_Memory, _Memory, _Size, _Pointer),
    "cuMemcpyDtoHAsync_v2": (_Pointer, _Memory, _Size, _Pointer),
    "cuMemcpy2DAsync_v2": (_Pointer, _Pointer),
    "cuStreamCreate": (_Pointer, ctypes.c_uint),
    "cuStreamSynchronize": (_Pointer,),
    "cuStreamDestroy_v2": (_Pointer,),
}


class DeviceError(Exception):
    """The driver refused, or there is none; its text is one clause."""


class Place(NamedTuple):
    """Where memory of this process lies, for another process on the host.

    `uuid` (16 bytes) is the device's, `handle` (64) opens the allocation, `offset` is in bytes.
    """

    uuid: bytes
    handle: bytes
    offset: int


class _Imports:
    """Where allocations lie in the processes that made them, of those that are open in this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By their addresses here, and as often as each is open.
        self._places: dict[int, list[Place]] = {}

    def add(self, base: int, place: Place) -> None:
        with self._lock:
            self._places.setdefault(base, []).append(place)

    def remove(self, base: int) -> None:
        with self._lock:
            self._places[base].pop()
            if not self._places[base]:
                del self._places[base]

    def find(self, base: int) -> Place | None:
        """Return where one lies; None: it is this process's own."""
        with self._lock:
            return self._places.get(base, [None])[-1]


_imports = _Imports()


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise DeviceError(f"there is no CUDA driver ({error})") from None
    return library


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != _OK:
        raise DeviceError(f"{name} answered {code}")


def _uuid(ordinal: int) -> bytes:
    device, uuid = ctypes.c_int(), _Uuid()
    _call("cuDeviceGet", ctypes.byref(device), ordinal)
    _call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
    return bytes(uuid.bytes)


def place_of(address: int, known: dict[int, Place] | None = None) -> Place:
    """Return where device memory lies, also what this process has of another one.

    The calling thread must be at work on its device, as it is after any call of PyTorch's for it.
    `known` has allocations by their addresses, none of them freed since, and gets this one: asking
    the driver takes longer than all else. Raises DeviceError when it cannot be shared, as what
    `expandable_segments` allocates cannot.
    """
    base, size = ctypes.c_uint64(), _Size()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    whole = known.get(base.value) if known is not None else None
    if whole is None:
        # The driver makes a handle for the process alone that has allocated it.
        whole = _imports.find(base.value) or _place_of_allocation(base.value)
        if known is not None:
            known[base.value] = whole
    return whole._replace(offset=address - base.value)


def _place_of_allocation(base: int) -> Place:
    handle, ordinal = _Handle(), ctypes.c_int()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    _call("cuPointerGetAttribute", ctypes.byref(ordinal), _ORDINAL, base)
    return Place(_uuid(ordinal.value), bytes(handle.bytes), 0)


def device_with(address: int) -> Device:
    """Return the device of memory of this process; DeviceError: it is not on one."""
    ordinal = ctypes.c_int()
    _call("cuPointerGetAttribute", ctypes.byref(ordinal), _ORDINAL, address)
    return device_of(_uuid(ordinal.value))


#: Of two threads that ask for a device at once, only one makes it.
_making = threading.Lock()


def device_of(uuid: bytes) -> Device:
    """Return a device of this process, its context made; the first call takes a second.

    Raises DeviceError when there is no such device, or no room for a context.
    """
    with _making:
        return _device(uuid)


@cache
def _device(uuid: bytes) -> Device:
    _call("cuInit", 0)
    count = ctypes.c_int()
    _call("cuDeviceGetCount", ctypes.byref(count))
    for ordinal in range(count.value):
        if _uuid(ordinal) == uuid:
            return Device(ordinal)
    raise DeviceError(f"it is not one of the {count.value} devices that this process sees")


class Device:
    """One device: what other processes hold there comes to memory of this one.

    Any thread may call. `ordinal` is its number in this process.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        device = ctypes.c_int()
        self._context = _Pointer()
        _call("cuDeviceGet", ctypes.byref(device), ordinal)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._lock = threading.Lock()

    def _enter(self) -> None:
        _call("cuCtxSetCurrent", self._context)

    def register(self, view: memoryview) -> None:
        """Let the device write to mapped memory at full speed, until `unregister`."""
        self._enter()
        code = _driver().cuMemHostRegister_v2(_address(view), view.nbytes, _PORTABLE)
        if code not in (_OK, _REGISTERED):
            raise DeviceError(f"cuMemHostRegister answered {code}")

    def unregister(self, view: memoryview) -> None:
        """Let go of it, before it is unmapped."""
        self._enter()
        _call("cuMemHostUnregister", _address(view))

    @contextlib.contextmanager
    def opened(self, handle: bytes) -> Iterator[tuple[int, int]]:
        """Lend address and size of what another process has allocated."""
        self._enter()
        address, base, size = ctypes.c_uint64(), ctypes.c_uint64(), _Size()
        raw = _Handle.from_buffer_copy(handle)
        # Opening it twice counts; two threads at once do not.
        with self._lock:
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, _LAZY_PEER_ACCESS)
        try:
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            _imports.add(base.value, Place(_uuid(self.ordinal), handle, 0))
            try:
                # From the address on, wherever in its allocation that is.
                yield address.value, base.value + size.value - address.value
            finally:
                _imports.remove(base.value)
        finally:
            # A device that has failed says so to everything; whoever copied was told.
            with self._lock, contextlib.suppress(DeviceError):
                self._enter()
                _call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._enter()
        _call("cuMemcpyAsync", target, source, size, stream)

    @contextlib.contextmanager
    def stream(self) -> Iterator[Stream]:
        """Lend a stream; when the block ends nothing is under way on it."""
        self._enter()
        made = _Pointer()
        _call("cuStreamCreate", ctypes.byref(made), _NON_BLOCKING)
        stream = Stream(made)
        try:
            yield stream
        finally:
            stream.wait()
            _call("cuStreamDestroy_v2", made)


class Stream:
    """Copies that are done in order, beside whatever else the device does; for one thread."""

    def __init__(self, stream: ctypes.c_void_p) -> None:
        self._stream = stream

    def copy(self, view: memoryview, source: int) -> None:
        """Begin to fill a registered view from an address on the device."""
        _call("cuMemcpyDtoHAsync_v2", _address(view), source, view.nbytes, self._stream)

    def copy_rows(self, view: memoryview, stride: int, source: int, run: int, rows: int) -> None:
        """Begin to fill rows of a registered view with contiguous rows on the device.

        `view` begins with the first row; each row begins `stride` bytes after the one before.
        `source` is the address of the first row on the device; `run` is the bytes of a row.
        """
        copy = _Copy2D(src_type=_DEVICE_MEMORY, src_device=source, src_pitch=run)
        copy.dst_type, copy.dst_host, copy.dst_pitch = _HOST_MEMORY, _address(view), stride
        copy.width, copy.height = run, rows
        _call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self._stream)

    def wait(self) -> None:
        """Return when all copies are done; other threads run meanwhile."""
        _call("cuStreamSynchronize", self._stream)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
