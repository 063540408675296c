"""What a caller learns of its job."""

from __future__ import annotations

import asyncio

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import train_pb2 as pb
from weightsync_server.extensions.trainer.train_job import TrainJob


def _step(number: int, version: int = 0) -> pb.TrainResponse:
    return pb.TrainResponse(step=pb.TrainStep(step=number, version=version))


async def _read(job: TrainJob) -> tuple[list[pb.TrainResponse], WeightSyncError | None]:
    events: list[pb.TrainResponse] = []
    try:
        async for event in job.events():
            events.append(event)  # noqa: PERF401 - those before an error are wanted
    except WeightSyncError as error:
        return events, error
    return events, None


async def test_all_that_is_told_comes_in_order_and_then_the_end() -> None:
    job = TrainJob({})
    reading = asyncio.create_task(_read(job))
    for number in range(3):
        job.tell(_step(number))
        await asyncio.sleep(0)
    assert job.end(None) == "finished"
    events, error = await reading
    assert error is None
    assert [event.step.step for event in events] == [0, 1, 2]
    assert {event.job_id for event in events} == {job.id}
    # Also to who begins to read late.
    job = TrainJob({})
    job.tell(_step(1))
    assert job.end(WeightSyncError(Reason.TRAINER_FAILED, "no")) == "failed"
    events, error = await _read(job)
    assert len(events) == 1
    assert error is not None
    assert error.reason is Reason.TRAINER_FAILED
    assert "version" not in error.metadata


async def test_who_reads_slowly_misses_steps_that_committed_nothing() -> None:
    job = TrainJob({})
    for number in range(3000):
        job.tell(_step(number, version=number if number % 1000 == 999 else 0))
    job.tell(pb.TrainResponse(finished=pb.TrainFinished(steps=3000)))
    job.end(None)
    events, _ = await _read(job)
    assert len(events) < 1010
    assert [e.step.version for e in events if e.step.version] == [999, 1999, 2999]
    assert events[-1].finished.steps == 3000


async def test_one_that_was_cancelled_says_so_however_it_ends() -> None:
    job, calls = TrainJob({}), []
    with job.when_cancelled(lambda: calls.append(job.id)):
        job.cancel()
        job.cancel(WeightSyncError(Reason.SHUTTING_DOWN, "too late to say so"))
    assert calls == [job.id]
    job.version = 7
    assert job.end(WeightSyncError(Reason.TRAINER_AWAY, "it was ended")) == "cancelled"
    _, error = await _read(job)
    assert error is not None
    assert error.reason is Reason.CANCELLED
    assert error.metadata == {"version": "7"}


async def test_one_that_has_ended_well_before_it_was_cancelled_has() -> None:
    job = TrainJob({})
    job.cancel()
    assert job.end(None) == "finished"
    _, error = await _read(job)
    assert error is None


async def test_a_server_that_ends_says_that() -> None:
    why = WeightSyncError(Reason.SHUTTING_DOWN, "the server is ending")
    job = TrainJob({})
    job.version = 3
    job.cancel(why)
    job.end(WeightSyncError(Reason.CANCELLED, "it was cancelled"))
    _, error = await _read(job)
    assert error is not None
    assert error.reason is Reason.SHUTTING_DOWN
    assert error.metadata == {"version": "3"}
    # It is said to others too.
    assert why.metadata == {}
