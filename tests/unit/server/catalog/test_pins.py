"""Pins and rejections of servers that share a store."""

from __future__ import annotations

from weightsync_server.catalog.pins import Pins
from weightsync_server.store import open_store


async def test_what_another_server_decided_stays() -> None:
    store = open_store("memory://")
    one, other = Pins("m", store), Pins("m", store)
    for pins in (one, other):
        await pins.open()
    await one.change(1, pinned=True)
    await other.change(2, rejected="loss of 7")
    await other.use(9)
    await one.use(5)
    await one.change(3, pinned=True)
    await other.change(1, pinned=False)
    for pins in (one, other, Pins("m", store)):
        await pins.open()
        assert (pins.pinned, pins.rejected, pins.highest) == ({3}, {2: "loss of 7"}, 9)
