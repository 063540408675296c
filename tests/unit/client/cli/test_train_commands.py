"""`weightsync train` and `weightsync checkpoint`."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.client.servicer import Servicer, start
from tests.unit.client.train_answers import TrainAnswers
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import train_pb2 as pb
from weightsync_client.cli.cli_options import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.client.servicer import Running

    Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trainer() -> TrainAnswers:
    return TrainAnswers()


@pytest.fixture
def running(trainer: TrainAnswers) -> Iterator[Running]:
    made = start(Servicer(), add=trainer.add_to)
    yield made
    made.stop()


def test_a_job_prints_what_it_comes_to(run: Run, trainer: TrainAnswers) -> None:
    code, out, err = run("train", "--request", '{"text": "x", "steps": 2}')
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "job j1 waits, 2 before it",
        "job j1 runs, on version 4; optimizer: as of version 3",
        "step 1, loss 0.5, 64 tokens, version 5 is live",
        "step 2",
        "job j1 has ended: 2 steps in 1.5 s, version 5 is live",
    ]
    assert trainer.asked() == {"text": "x", "steps": 2}


def test_json_prints_a_line_each_and_a_request_may_come_from_stdin(
    run: Run, trainer: TrainAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"text": "from stdin"}\n'))
    code, out, _ = run("train", "--request", "-", "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["queued", "started", "step", "step", "finished"]
    assert lines[2]["loss"] == 0.5
    assert lines[3]["loss"] is None
    assert trainer.asked() == {"text": "from stdin"}


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ((), "a job needs a request: give --request with a JSON object"),
        (("--request", ""), "the request is empty; give a JSON object, {} where"),
        (("--request", "{"), "--request is not JSON"),
        (("--request", "[1]"), "--request must be a JSON object"),
        (("--request", '{"a": 9007199254740993}'), "which would be rounded"),
        (("--request", "{}", "status"), "`train status` takes none"),
    ],
)
def test_requests_that_are_none(
    run: Run, trainer: TrainAnswers, arguments: tuple[str, ...], wrong: str
) -> None:
    code, _, err = run("train", *arguments)
    assert code == ExitCode.USAGE
    assert wrong in err
    assert not trainer.requests


def test_a_trainer_that_fails_shows_its_traceback_as_it_is(run: Run, trainer: TrainAnswers) -> None:
    traceback = 'Traceback (most recent call last):\n  File "t.py", line 3, in Train\nValueError\n'
    trainer.error = WeightSyncError(
        Reason.TRAINER_FAILED, "Train raised ValueError", metadata={"traceback": traceback}
    )
    del trainer.events[2:]
    code, out, err = run("train", "--request", "{}")
    assert code == ExitCode.REFUSED
    assert out.splitlines()[-1] == "job j1 runs, on version 4; optimizer: as of version 3"
    assert err == f"{traceback}weightsync: Train raised ValueError\n"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.TRAINER_AWAY, ExitCode.UNAVAILABLE),
        (Reason.LIMIT_EXCEEDED, ExitCode.EXHAUSTED),
        (Reason.CANCELLED, ExitCode.REFUSED),
        (Reason.PERMISSION_DENIED, ExitCode.DENIED),
    ],
)
def test_exit_codes(run: Run, trainer: TrainAnswers, reason: Reason, code: ExitCode) -> None:
    trainer.events = []
    trainer.error = WeightSyncError(reason, "see GetTrainStatus")
    assert run("train", "--request", "{}") == (
        code, "", "weightsync: see `weightsync train status`\n"
    )  # fmt: skip


def test_when_to_try_again_is_said(run: Run, trainer: TrainAnswers) -> None:
    trainer.events = []
    trainer.error = WeightSyncError(
        Reason.LIMIT_EXCEEDED, "2 jobs run or wait, the most there may be", retry_after_s=4.2
    )
    line = "weightsync: 2 jobs run or wait, the most there may be (try again after 5 s)\n"
    assert run("train", "--request", "{}") == (ExitCode.EXHAUSTED, "", line)


def test_a_request_that_is_too_large_says_so(run: Run, trainer: TrainAnswers) -> None:
    code, _, err = run("train", "--request", json.dumps({"text": "x" * 5_000_000}))
    assert (code, err.count("\n")) == (ExitCode.EXHAUSTED, 1)
    assert err.startswith("weightsync: the training does not fit into one message (")
    assert err.endswith("; send less in one call\n")
    assert not trainer.requests


def test_an_empty_name_is_not_taken_as_none(run: Run, trainer: TrainAnswers) -> None:
    code, _, err = run("checkpoint", "")
    assert code == ExitCode.USAGE
    assert "the name of the folder is empty; give one, or leave it out" in err
    assert not trainer.requests


def test_status_cancel_and_checkpoint(run: Run, trainer: TrainAnswers) -> None:
    assert run("train", "status")[1].splitlines() == [
        "trainer training, process 77, started again 1 times, last because trainer 76 was ended",
        "  optimizer: as of version 9",
        "  job j1 runs, 3 steps done",
        "  job j2 waits",
        "  job j3 waits",
        "  since the server started: 4 ended well, 5 failed, 6 cancelled",
    ]
    trainer.status.state, trainer.status.pid = pb.TRAINER_STATE_STARTING, 0
    first = run("train", "status")[1].splitlines()[0]
    assert first == "trainer starting (trainer 76 was ended), started again 1 times"
    found: dict[str, Any] = json.loads(run("train", "status", "--json")[1])
    assert (found["state"], found["queued_job_ids"]) == ("starting", ["j2", "j3"])
    assert run("train", "cancel", "j2") == (0, "job j2 is cancelled\n", "")
    assert trainer.requests[-1].job_id == "j2"
    assert run("checkpoint") == (0, "version 7 is durable\n", "")
    line = "version 7 is durable; on the server's host it is in /srv/a\n"
    assert run("checkpoint", "a") == (0, line, "")
    document = {"version": 7, "path": "/srv/a", "missing": ""}
    assert json.loads(run("checkpoint", "a", "--json")[1]) == document
    trainer.missing = "the folder has no config.json"
    assert run("checkpoint", "a") == (0, line, "the folder has no config.json\n")
