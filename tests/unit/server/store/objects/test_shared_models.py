"""Models of two servers that share a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.world import MODEL, real_fetchers, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.objects.object_client import ObjectClient
from weightsync_server.store.store_records import encode_document

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_number_that_came_through_another_server_is_not_given_again(
    bucket: str, tmp_path: Path
) -> None:
    async with (
        real_fetchers() as fetchers,
        world(tmp_path / "a", store=bucket, identity="a", fetchers=fetchers) as one,
        world(tmp_path / "b", store=bucket, identity="b", fetchers=fetchers) as other,
    ):
        # As when the epoch went over in the midst of it, which this server did not learn.
        epoch = await one.model.epochs.acquire("trainer")
        assert await one.push(simple(1), epoch=epoch) == 1
        other.model.epochs.newest = epoch
        await ObjectClient(bucket).put(
            f"{MODEL}/epochs/{epoch}.json", encode_document({"server": "b"})
        )
        await one.model.serving.pin(1, pinned=True)
        with pytest.raises(WeightSyncError) as caught:
            await other.push(simple(2), epoch=epoch)
        assert caught.value.reason is Reason.VERSION_CONFLICT
        assert await other.push(simple(2), epoch=epoch) == 2
        assert other.model.table.get(1).pinned


async def test_a_commit_whose_answer_was_lost_is_found(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        real_fetchers() as fetchers,
        world(tmp_path / "a", store=bucket, identity="a", fetchers=fetchers) as here,
    ):
        commit: Any = here.model.store.commit

        async def lost(*args: Any) -> None:
            await commit(*args)
            raise WeightSyncError(Reason.FAULT, "the answer was lost; try again")

        with monkeypatch.context() as patch:
            patch.setattr(here.model.store, "commit", lost)
            with pytest.raises(WeightSyncError, match="answer was lost"):
                await here.push(simple(1))
        assert await here.push(simple(2)) == 2
        assert here.model.table.get(1).commit is not None


async def test_who_takes_over_learns_what_was_decided(bucket: str, tmp_path: Path) -> None:
    async with (
        real_fetchers() as fetchers,
        world(tmp_path / "a", store=bucket, identity="a", fetchers=fetchers) as one,
        world(tmp_path / "b", store=bucket, identity="b", fetchers=fetchers) as other,
    ):
        for number in (1, 2):
            assert await one.push(simple(number)) == number
        await other.model.epochs.acquire("before")
        await one.model.serving.pin(1, pinned=True)
        await one.model.serving.reject(2, "loss of 7")
        await other.model.epochs.acquire("after")
        table = other.model.table
        assert (table.get(1).pinned, table.get(2).rejected_reason) == (True, "loss of 7")
