"""Jobs that wait."""

from __future__ import annotations

import asyncio

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.extensions.trainer.train_job import JobQueue, TrainJob


def test_no_more_wait_than_may() -> None:
    queue = JobQueue(2)
    jobs = [TrainJob({}) for _ in range(3)]
    assert [queue.add(job, 0) for job in jobs] == [0, 1, 2]
    with pytest.raises(WeightSyncError) as caught:
        queue.add(TrainJob({}), 0)
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    assert queue.take() is jobs[0]
    with pytest.raises(WeightSyncError):
        queue.add(TrainJob({}), 1)
    assert queue.ids == [jobs[1].id, jobs[2].id]


def test_none_waits_where_none_may() -> None:
    queue = JobQueue(0)
    assert queue.add(TrainJob({}), 0) == 0
    queue.take()
    with pytest.raises(WeightSyncError):
        queue.add(TrainJob({}), 1)


def test_one_that_is_put_back_is_the_next() -> None:
    queue = JobQueue(5)
    first, second = TrainJob({}), TrainJob({})
    queue.add(first, 0)
    queue.add(second, 0)
    taken = queue.take()
    assert taken is first
    queue.put_back(first)
    assert queue.ids == [first.id, second.id]
    queue.remove(first)
    queue.remove(first)
    assert (queue.find(first.id), queue.find(second.id)) == (None, second)
    assert queue.clear() == [second]
    assert queue.take() is None


async def test_who_waits_for_a_job_gets_it() -> None:
    queue = JobQueue(1)
    waiting = asyncio.create_task(queue.filled())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.add(TrainJob({}), 0)
    await waiting
    await queue.filled()
