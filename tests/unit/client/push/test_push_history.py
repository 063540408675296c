from __future__ import annotations

import pytest

from weightsync_client.push.push_history import LinkSpeed

MIB = 1 << 20


@pytest.mark.parametrize("address", ["unix:/run/push.sock", "127.0.0.1:50551", "localhost:1"])
def test_what_stays_on_this_host_is_never_slow(address: str) -> None:
    pace = LinkSpeed(address)
    pace.note(100 * MIB, 100)
    assert not pace.slow


def test_the_latest_transfer_of_some_size_counts() -> None:
    pace = LinkSpeed("trainer.example:50551")
    told = [pace.slow]
    for size, seconds in ((100 * MIB, 10), (1 * MIB, 1e-3), (100 * MIB, 0.1)):
        pace.note(size, seconds)
        told.append(pace.slow)
    assert told == [False, True, True, False]
