"""What is said of a trainer's end; the rest is in tests/extensions/test_train_service.py."""

from __future__ import annotations

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.extensions.trainer.trainer_pool import away, ending, unstartable


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "does not end"),
        (0, "ended with status 0"),
        (7, "ended with status 7"),
        (-9, "was ended by SIGKILL"),
        (-64 - 1, "was ended by signal 65"),
    ],
)
def test_how_it_has_ended(status: int | None, words: str) -> None:
    assert ending(status) == words


def test_one_that_comes_back_is_waited_for() -> None:
    refused = away("trainer 7 was ended by SIGKILL")
    assert refused.reason is Reason.TRAINER_AWAY
    assert refused.message.startswith("check the server's log, then send it again: ")


def test_one_that_cannot_be_started_has_its_own_remedy_alone() -> None:
    error = WeightSyncError(Reason.TRAINER_FAILED, "no; correct it", metadata={"traceback": "..."})
    refused = unstartable(error, 60.0)
    assert (refused.reason, refused.metadata) == (Reason.TRAINER_AWAY, {"traceback": "..."})
    assert refused.message == (
        "no trainer can be started; the server tries again within 60 s: no; correct it"
    )
