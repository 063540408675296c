"""The trainer beside the server, through both clients."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.client.servicer import Servicer, start
from tests.unit.client.train_answers import TrainAnswers
from weightsync.errors import WeightSyncError
from weightsync.v1 import train_pb2 as pb
from weightsync_client import (
    AsyncClient,
    CheckpointResult,
    Client,
    InvalidError,
    Reason,
    RefusedError,
    Timeouts,
    TrainerState,
    TrainEvent,
    TrainProgress,
    TrainStatus,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.client.servicer import Running

_WANTED = [
    TrainProgress("j1", TrainEvent.QUEUED, ahead=2),
    TrainProgress("j1", TrainEvent.STARTED, 4, state_version=3),
    TrainProgress("j1", TrainEvent.STEP, 5, step=1, loss=0.5, tokens=64),
    TrainProgress("j1", TrainEvent.STEP, step=2),
    TrainProgress("j1", TrainEvent.FINISHED, 5, step=2, duration_s=1.5),
]
_REQUEST = {"text": "Tell me", "steps": 3, "more": [1.5, None, True, {"a": []}]}


@pytest.fixture
def trainer() -> TrainAnswers:
    return TrainAnswers()


@pytest.fixture
def server(trainer: TrainAnswers) -> Iterator[Running]:
    running = start(Servicer(), add=trainer.add_to)
    yield running
    running.stop()


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.address, timeouts=Timeouts(train_s=20)) as made:
        yield made


async def test_a_job_is_told_of_to_its_end(
    client: Client, trainer: TrainAnswers, server: Running
) -> None:
    assert list(client.train(_REQUEST)) == _WANTED
    assert (trainer.requests[-1].model, trainer.asked()) == ("policy", _REQUEST)
    async with AsyncClient(server.address) as aio:
        assert [progress async for progress in aio.train(_REQUEST)] == _WANTED
    assert trainer.asked() == _REQUEST


async def test_who_leaves_cancels_the_job(
    client: Client, trainer: TrainAnswers, server: Running
) -> None:
    trainer.hang = True
    with contextlib.closing(client.train({})) as job:
        assert next(job) == _WANTED[0]
    assert trainer.left.wait(10)
    trainer.left.clear()
    async with AsyncClient(server.address) as aio:
        async with contextlib.aclosing(aio.train({})) as steps:
            assert await anext(steps) == _WANTED[0]
        assert trainer.left.wait(10)


def test_a_job_is_sent_before_it_is_read(client: Client, trainer: TrainAnswers) -> None:
    trainer.hang = True
    job = client.train({})
    # What the server gets, without anybody reading; in its own time.
    assert trainer.came.wait(10)
    assert isinstance(trainer.requests[0], pb.TrainRequest)
    del job
    assert trainer.left.wait(10), "a job that nobody can read goes on"


def test_a_job_that_fails_tells_why_and_is_not_sent_again(
    client: Client, trainer: TrainAnswers
) -> None:
    del trainer.events[2:]
    trainer.error = WeightSyncError(
        Reason.TRAINER_FAILED, "the class raised", metadata={"traceback": "Traceback ..."}
    )
    job = client.train({})
    seen: list[TrainProgress] = []
    with pytest.raises(RefusedError, match="the class raised") as caught:
        seen += job
    assert caught.value.metadata["traceback"] == "Traceback ..."
    trainer.error = WeightSyncError(Reason.TRAINER_AWAY, "the trainer has died")
    with pytest.raises(UnavailableError, match="has died"):
        list(client.train({}))
    assert len(trainer.requests) == 2


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        ([1], "is not a mapping of names to values"),
        ({"a": object()}, "is not a JSON object that can be sent"),
        ({"a": float("nan")}, "is not a JSON object that can be sent"),
        ({"a": "\ud800"}, "is not a JSON object that can be sent"),
        ({"a": 10**400}, "is not a JSON object that can be sent"),
        ({"a": 2**53 + 1}, r"has a whole number above 2\^53"),
    ],
)
def test_requests_that_do_not_come_out_as_they_went_in(
    client: Client, trainer: TrainAnswers, request_: Any, wrong: str
) -> None:
    with pytest.raises(InvalidError, match=wrong):
        client.train(request_)
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"a": deep}
    with pytest.raises(InvalidError, match="is not a JSON object that can be sent"):
        client.train(deep)
    assert not trainer.requests


async def test_checkpoint_status_and_cancel(
    client: Client, trainer: TrainAnswers, server: Running
) -> None:
    assert client.checkpoint() == CheckpointResult(7)
    trainer.missing = "the folder has no config.json"
    assert client.checkpoint("step-9") == CheckpointResult(7, "/srv/step-9", trainer.missing)
    status = client.train_status()
    assert status == TrainStatus(
        TrainerState.TRAINING, "trainer 76 was ended", 77, 1, "j1", 3, ("j2", "j3"), 4, 5, 6, 9
    )
    client.cancel_train("j2")
    assert (trainer.requests[-1].model, trainer.requests[-1].job_id) == ("policy", "j2")
    trainer.status.state = 77  # type: ignore[assignment]  # of a newer server
    assert client.train_status().state is TrainerState.UNSPECIFIED
    async with AsyncClient(server.address) as aio:
        assert (await aio.checkpoint("step-9")).missing == trainer.missing
        assert (await aio.train_status()).queued_job_ids == ("j2", "j3")
        await aio.cancel_train("j3")
    assert trainer.requests[-1].job_id == "j3"


def test_an_event_of_a_newer_server(client: Client, trainer: TrainAnswers) -> None:
    trainer.events = [pb.TrainResponse(job_id="j1")]
    assert list(client.train({})) == [TrainProgress("j1", TrainEvent.UNSPECIFIED)]


def test_a_server_that_knows_no_trainer(running: Any) -> None:
    with Client(running.address) as client, pytest.raises(InvalidError, match="does not serve"):
        client.train_status()
