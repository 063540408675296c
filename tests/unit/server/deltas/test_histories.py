"""Any history of pushes, deletions, folds, evictions and restarts keeps every version whole."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.deltas import stepped
from tests.unit.server.deltas.pushing import push_delta
from tests.unit.server.world import make_shard, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.deltas import ChainSettings

if TYPE_CHECKING:
    from tests.unit.server.deltas.pushing import Version
    from tests.unit.server.world import World

#: What is done, and with which of the versions that there are.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["delta", "delta", "delta", "full", "delete", "restart", "live", "fold"]),
        st.integers(0, 20),
    ),
    min_size=3,
    max_size=14,
)


def _first() -> Version:
    data = bytes(range(256)) * 4
    return [
        make_shard(0, [("a", "BF16", (512,), data), ("b", "U8", (3,), b"abc")]),
        make_shard(1, [("c", "F32", (256,), data)]),
    ]


class _History:
    """Does steps, and knows what must be there."""

    def __init__(self, here: World, contents: dict[int, Version]) -> None:
        self.here = here
        self.contents = contents

    async def do(self, step: str, which: int) -> None:
        known = sorted(r.version for r in self.here.model.table.list() if r.commit)
        if known:
            await getattr(self, step)(known[which % len(known)])
        else:
            await self.full(max(self.contents))

    async def delta(self, base: int) -> None:
        number = max(self.here.model.table.highest, *self.contents) + 1
        new = self.contents[number] = stepped(self.contents[base], number, 0.01)
        await push_delta(self.here, self.contents[base], new, number)

    async def full(self, base: int) -> None:
        number = max(self.here.model.table.highest, *self.contents) + 1
        new = self.contents[number] = stepped(self.contents[base], number, 0.01)
        await self.here.push(new, number)

    async def delete(self, version: int) -> None:
        model = self.here.model
        based = [r.version for r in model.table.list() if r.base is model.table.get(version)]
        try:
            await model.collector.delete(version)
        except WeightSyncError as error:
            used = based or version in (model.serving.live, model.serving.rollback_to)
            if error.reason is not Reason.VERSION_IN_USE or not used:
                # A fold may hold it for a moment.
                assert model.compactor._task is not None
        else:
            assert not based

    async def live(self, version: int) -> None:
        self.here.model.serving.engine("engine").set_live(version)

    async def fold(self, version: int) -> None:
        lease = await self.here.model.stager.stage(version, 20, for_engine=False)
        record = self.here.model.table.get(version)
        if record.base is not None:
            await self.here.model.compactor._fold(record)
            assert record.base is None
        lease.release()

    async def check(self) -> None:
        model = self.here.model
        await model.collector.close()
        for record in list(model.table.list()):
            if model.table.find(record.version) is not record:
                continue
            try:
                lease = await model.stager.stage(record.version, 20, for_engine=False)
            except WeightSyncError as error:
                # Collected while it was asked for.
                if error.reason is not Reason.VERSION_UNKNOWN:
                    raise
                continue
            assert self.here.read(record.version) == [
                shard.data for shard in self.contents[record.version]
            ]
            lease.release()


@given(STEPS, st.sampled_from(["", "memory://"]), st.integers(2, 3))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_every_version_stays_what_it_was(
    steps: list[tuple[str, int]], store: str, slots: int
) -> None:
    async def run(folder: Path) -> None:
        contents = {1: _first()}
        facts: dict[str, Any] = {
            "store": store,
            "slots": slots,
            "retention": Retention(3),
            "chains": ChainSettings(3, 100),
        }
        lives: list[list[tuple[str, int]]] = [[]]
        for step in steps:
            if step[0] != "restart":
                lives[-1].append(step)
            elif not store:
                lives.append([])
        for number, life in enumerate(lives):
            async with world(folder, **facts) as here:
                history = _History(here, contents)
                if not number:
                    await here.push(contents[1], 1)
                for act, which in life:
                    await history.do(act, which)
                await history.check()
                await here.model.segments.unmapped()
                assert here.budget.reserved == here.model.slots.reserved_bytes

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
