"""Updates that bring some tensors of the version that is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.deltas.pushing import until
from tests.unit.server.world import simple
from weightsync_server.residency import adoption
from weightsync_server.residency.adoption import kept_files

if TYPE_CHECKING:
    from tests.unit.server.conftest import Offered
    from tests.unit.server.world import World


def _inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def _open_inodes() -> set[int]:
    """Return the inodes of all files that this process has open."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(_inode(int(file.name)))
    return found


async def test_one_that_is_cancelled_gives_memory_back_once_nothing_reads_it(
    here: World, offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.push(simple(1))
    base, files = here.model.table.get(1), offered(simple(2)[:1])
    began, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    made: list[int] = []

    def slow(*args: Any) -> Any:
        loop.call_soon_threadsafe(began.set)
        go.wait()
        kept = kept_files(*args)
        made.extend(_inode(fd) for _, _, fd in kept.files)
        return kept

    monkeypatch.setattr(adoption, "kept_files", slow)
    model = here.model
    try:
        receiving = asyncio.create_task(model.adoption.receive(files, {}, model.accepted, base))
        await began.wait()
        receiving.cancel()
        await asyncio.sleep(0.05)
        assert base.slot is not None
        assert base.slot.leases
        assert not receiving.done()
    finally:
        go.set()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await until(lambda: base.slot is not None and not base.slot.leases)
    assert made
    assert not _open_inodes().intersection(made)
