"""Memory of trainers that was read from once."""

from __future__ import annotations

import pytest

from weightsync.shm.incoming_version import IpcAddresses
from weightsync_server.push.sources.gpu_copies import Places

_HANDLE = b"h" * 64


def lying(*offsets: int, handle: bytes = _HANDLE) -> IpcAddresses:
    return [(handle, offset) for offset in offsets]


def test_only_what_was_read_is_known() -> None:
    places = Places()
    assert not places.have(lying(0), [8])
    places.add(lying(0, 512), [8, 16])
    assert places.have(lying(0, 512), [8, 16])
    assert places.have(lying(512), [16])
    assert places.have(lying(), [])


@pytest.mark.parametrize(
    ("where", "size"),
    [
        (lying(0), 9),
        (lying(1), 8),
        (lying(0, handle=b"h" * 63 + b"i"), 8),
    ],
)
def test_any_other_byte_of_it_is_another_place(where: IpcAddresses, size: int) -> None:
    places = Places()
    places.add(lying(0), [8])
    assert not places.have(where, [size])


def test_one_unknown_place_is_enough() -> None:
    places = Places()
    places.add(lying(0), [8])
    assert not places.have(lying(0, 8), [8, 8])


def test_what_failed_is_forgotten() -> None:
    places = Places()
    places.add(lying(0, 8), [8, 8])
    places.discard(lying(8, 16), [8, 8])
    assert places.have(lying(0), [8])
    assert not places.have(lying(8), [8])


def test_those_that_were_read_last_are_kept() -> None:
    places = Places(most=2)
    for offset in (0, 1, 0, 2):
        places.add(lying(offset), [8])
    assert [places.have(lying(offset), [8]) for offset in range(3)] == [True, False, True]
