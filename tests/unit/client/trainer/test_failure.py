"""What is said of a class that raised."""

from __future__ import annotations

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import to_status
from weightsync_client.trainer.job_runner import UserClassError, users_code


def _raised(error: BaseException) -> UserClassError:
    with pytest.raises(UserClassError) as caught, users_code("train"):
        raise error
    return caught.value


def test_it_has_the_sentence_and_the_traceback() -> None:
    answer = _raised(ValueError("the loss is nan")).answer
    assert answer["reason"] == "TRAINER_FAILED"
    assert answer["error"] == "train of the trainer's class raised ValueError: the loss is nan"
    assert answer["metadata"]["traceback"].endswith("ValueError: the loss is nan\n")
    assert "test_failure.py" in answer["metadata"]["traceback"]
    assert _raised(SystemExit(3)).answer["error"].endswith("raised SystemExit: 3")


def test_what_helps_comes_last() -> None:
    with pytest.raises(UserClassError) as caught, users_code("setup", "; correct the class"):
        raise LookupError("no optimizer")
    assert caught.value.answer["error"].endswith("LookupError: no optimizer; correct the class")


def test_what_the_service_refused_is_its_cause() -> None:
    answer = _raised(WeightSyncError(Reason.VERSION_CONFLICT, "version 4 is live")).answer
    assert answer["reason"] == "TRAINER_FAILED"
    assert answer["metadata"]["cause"] == "VERSION_CONFLICT"


@pytest.mark.parametrize(
    "letter", ["x", "\N{SNOWMAN}", "\udc80"], ids=["letter", "wide", "surrogate"]
)
def test_it_fits_into_a_status(letter: str) -> None:
    answer = _raised(ValueError(letter * 100_000)).answer
    error = WeightSyncError(Reason(answer["reason"]), answer["error"], metadata=answer["metadata"])
    status = to_status(error)
    size = sum(len(key) + len(value) * 4 / 3 for key, value in status.trailing_metadata)
    # The text is sent besides, where each byte that is no letter takes three.
    size += 3 * len(status.details.encode())
    assert size < 8192


def test_the_first_method_that_raised_is_told() -> None:
    with pytest.raises(UserClassError) as caught, users_code("train"), users_code("save_state"):
        raise OSError(28, "No space left on device")
    assert caught.value.answer["error"].startswith("save_state of the trainer's class raised OSErr")
