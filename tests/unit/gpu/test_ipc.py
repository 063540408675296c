"""Where memory of a GPU lies, with a driver that has no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.gpu import ipc
from weightsync.gpu.ipc import Device, DeviceError, Place, place_of

_OWN, _OTHERS = 0x1000, 0x9000
_SIZE = 0x800


class _Driver:
    """One allocation of this process, and one of another one that this may open."""

    def __init__(self) -> None:
        self.open = 0

    def call(self, name: str, *arguments: Any) -> None:
        getattr(self, name, lambda *_: None)(*arguments)

    def cuDeviceGetUuid_v2(self, uuid: Any, _: Any) -> None:  # noqa: N802 - the driver's name
        uuid._obj.bytes[:] = b"u" * 16

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> None:  # noqa: N802 - the driver's name
        at = getattr(address, "value", address)
        base._obj.value, size._obj.value = at // _SIZE * _SIZE, _SIZE

    def cuIpcGetMemHandle(self, handle: Any, base: int) -> None:  # noqa: N802 - the driver's name
        if base != _OWN:
            raise DeviceError("cuIpcGetMemHandle answered 1")
        handle._obj.bytes[:] = b"o" * 64

    def cuIpcOpenMemHandle_v2(self, address: Any, *_: Any) -> None:  # noqa: N802 - the driver's name
        address._obj.value = _OTHERS
        self.open += 1

    def cuIpcCloseMemHandle(self, _: Any) -> None:  # noqa: N802 - the driver's name
        self.open -= 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    driver = _Driver()
    monkeypatch.setattr(ipc, "_call", driver.call)
    return driver


def test_memory_of_this_process_lies_in_its_allocation(driver: _Driver) -> None:
    del driver
    known: dict[int, Place] = {}
    assert place_of(_OWN + 24, known) == Place(b"u" * 16, b"o" * 64, 24)
    assert known.keys() == {_OWN}


def test_what_another_process_has_is_told_by_the_handle_that_opened_it(driver: _Driver) -> None:
    device, handle = Device(0), b"h" * 64
    there = Place(b"u" * 16, handle, 40)
    with device.opened(handle):
        with device.opened(handle) as (address, size):
            assert (address, size) == (_OTHERS, _SIZE)
            assert place_of(address + 40) == there
        assert place_of(_OTHERS + 40) == there
        assert place_of(_OWN).handle == b"o" * 64
    assert driver.open == 0
    # Whatever lies there now, it is not that.
    with pytest.raises(DeviceError):
        place_of(_OTHERS + 40)
