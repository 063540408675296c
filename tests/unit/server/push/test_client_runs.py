"""Two runs that push one model are told of each other, and one that took an epoch is alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.world import MODEL, World, begin, one_stream, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path


async def _push(here: World, seed: int, run: str, **fields: Any) -> pb.CommitPushResponse:
    done = await here.pushes.stream(one_stream(simple(seed), client_run=run, **fields))
    commit: pb.CommitPushResponse = done.commit
    return commit


def _other(commit: pb.CommitPushResponse) -> tuple[str, int, bool]:
    return commit.other_run, commit.other_version, commit.runs_alternate


async def test_both_are_told(here: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "weightsync_server.push.commit")
    assert _other(await _push(here, 1, "a")) == ("", 0, False)
    assert _other(await _push(here, 2, "a")) == ("", 0, False)
    # It may be the same trainer, started again.
    assert _other(await _push(here, 3, "b")) == ("a", 2, False)
    first = "version 3 is the first of run b; version 2 came from run a"
    assert [r.levelname for r in caplog.records if r.message == first] == ["DEBUG"]
    assert _other(await _push(here, 4, "a")) == ("b", 3, True)
    assert _other(await _push(here, 5, "b")) == ("a", 4, True)
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 2
    assert "two trainers push: run a and run b (versions 4" in warned[0]
    assert "acquire_epoch()" in warned[0]
    told = [(r.client_run, r.newest_version, r.versions) for r in here.model.runs.status()]
    assert told == [("b", 5, 2), ("a", 4, 3)]


async def test_who_does_not_say_and_who_was_resumed_are_no_other_run(here: World) -> None:
    await _push(here, 1, "a", metadata={"run_id": "r"})
    assert _other(await _push(here, 2, "")) == ("", 0, False)
    assert _other(await _push(here, 3, "b", metadata={"run_id": "r"})) == ("", 0, False)
    assert _other(await _push(here, 4, "c", metadata={"run_id": "s"})) == ("b", 3, False)


async def test_a_run_that_took_an_epoch_is_alone_over_restarts(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await _push(here, 1, "b")
        epoch = await here.model.epochs.acquire("holder", "a")
        # It may be an operator who takes it for another.
        await _push(here, 2, "b")
        await _push(here, 3, "a")
        with pytest.raises(
            WeightSyncError, match="run a took epoch 1 and pushed version 3"
        ) as told:
            await here.pushes.begin(begin(client_run="b"), 0)
        assert told.value.reason is Reason.EPOCH_STALE
        assert "acquire_epoch()" in told.value.message
        assert told.value.metadata["client_run"] == "a"
        # Who gives the epoch belongs to it, and who does not say who it is pushes as before.
        await _push(here, 4, "c", epoch=epoch)
        await _push(here, 5, "c")
        await _push(here, 6, "")
        await _push(here, 7, "a")
    async with world(tmp_path) as here:
        for run in ("a", "c"):
            await _push(here, 8, run)
        with pytest.raises(WeightSyncError, match="took epoch 1"):
            await here.pushes.begin(begin(client_run="b"), 0)
        assert all(run.has_epoch == (run.client_run != "b") for run in here.model.runs.status())
        await here.model.epochs.acquire("holder", "b")
        await _push(here, 9, "b")
        with pytest.raises(WeightSyncError, match="run b took epoch 2"):
            await here.pushes.begin(begin(client_run="a"), 0)


async def test_an_epoch_that_the_server_told_was_not_taken(here: World) -> None:
    epoch = await here.model.epochs.acquire("operator", "cli")
    await _push(here, 1, "a", epoch=epoch, epoch_assigned=True)
    await _push(here, 2, "b")


@pytest.mark.parametrize("run", ["x" * 129, "a\nb", "\x1b[31m", "\u202e", "\ud7ff\u200b"])
async def test_a_name_is_a_short_line(here: World, run: str) -> None:
    with pytest.raises(WeightSyncError, match="client_run must be printable") as told:
        await here.pushes.begin(begin(client_run=run), 0)
    assert told.value.reason is Reason.REQUEST_INVALID
    with pytest.raises(WeightSyncError, match="client_run must be printable"):
        await here.model.epochs.acquire("holder", run)
    assert (here.model.epochs.newest, here.model.table.list()) == (0, [])
    assert MODEL


async def test_of_several_writers_the_first_speaks(here: World) -> None:
    await here.model.epochs.acquire("holder", "a")
    await _push(here, 1, "a")
    some = {"writers": 2, "idempotency_key": "k", "total_bytes": 1000, "shard_count": 1}
    opened = await here.pushes.begin(begin(client_run="b", writer=1, **some), 0)
    with pytest.raises(WeightSyncError, match="run a took epoch 1"):
        await here.pushes.begin(begin(client_run="c", writer=0, **some), 0)
    # All of them are told.
    push = here.pushes.find(opened.push_id)
    assert push.state.error is not None
    assert push.state.error.reason is Reason.EPOCH_STALE
