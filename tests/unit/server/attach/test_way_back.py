"""What becomes of other pushes where the version before a transaction cannot be put back."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.world import begin, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.attach.attachments import OpenBlocks
from weightsync_server.attach.in_place import InPlace, InPlaceOrder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from weightsync_server.catalog.record import VersionRecord

_FENCED = WeightSyncError(Reason.ENGINE_FENCED, "a rank does not answer")


class _Site:
    """An engine of which no rank can be written any more.

    Attributes:
        suspected: What it is asked for what it holds for.
    """

    def __init__(self) -> None:
        self.suspected: list[str] = []
        self.served = SimpleNamespace(set_live=lambda _: None)
        self.engine = SimpleNamespace(fence=self._fence)

    def cutover(self, _: object) -> Any:
        return SimpleNamespace(place=self._fail)

    def suspect(self, why: str) -> None:
        self.suspected.append(why)

    async def states(self) -> list[object]:
        return []

    @contextlib.asynccontextmanager
    async def paused(self, *_: object) -> AsyncIterator[None]:
        yield

    async def _fence(self, _: str) -> None:
        pass

    async def _fail(self, _: object) -> None:
        raise _FENCED


@pytest.mark.parametrize("pushed", [False, True])
async def test_a_way_back_that_fails_ends_no_push_of_another(
    tmp_path: Path, *, pushed: bool
) -> None:
    async with world(tmp_path) as here:
        site = _Site()
        made: Any = InPlace
        spec: Any = None

        transaction = made(
            SimpleNamespace(supervisor=site, name="e"),
            SimpleNamespace(model=here.model),
            OpenBlocks(),
            InPlaceOrder(1, spec, 1.0),
            SimpleNamespace(note_pushed=int),
            SimpleNamespace(guarded=False),
            here.pushes.give_up,
        )
        record: VersionRecord = await here.model.table.add_in_place(transaction._push)
        if pushed:
            transaction._push.decide()
            key = transaction._push.key
            await here.push(simple(1), version=record.version, idempotency_key=key)
        theirs = await here.pushes.begin(begin(version=record.version + 1), None)
        base = SimpleNamespace(record=SimpleNamespace(version=0))
        error = WeightSyncError(Reason.DATA_CORRUPT, "a rank holds something else")
        with pytest.raises(WeightSyncError) as caught:
            await transaction._go_back(site, base, record, error)
        assert caught.value is _FENCED
        assert site.suspected == ["a rank does not answer"]
        assert here.pushes.find(theirs.push_id).state.error is None
        assert here.model.table.find(record.version) is None
