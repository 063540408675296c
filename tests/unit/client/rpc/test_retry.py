"""How long something is tried again."""

from __future__ import annotations

from weightsync.errors import Reason
from weightsync_client import ClientError, Retry, UnavailableError
from weightsync_client.rpc.retry import RetryState

_RETRY = Retry(attempts=3, initial_s=1.0, max_s=2.0)


def _away(retry_after_s: float | None = None) -> ClientError:
    return UnavailableError(Reason.SERVER_AWAY, "gone", retry_after_s=retry_after_s)


def test_failures_in_a_row_are_counted_and_progress_forgets_them() -> None:
    backoff = RetryState(_RETRY)
    assert [backoff.next_delay_s(_away()) is None for _ in range(3)] == [False, False, True]
    backoff.reset()
    assert [backoff.next_delay_s(_away()) is None for _ in range(3)] == [False, False, True]


def test_a_delay_is_as_long_as_the_server_asks_for() -> None:
    delay = RetryState(_RETRY).next_delay_s(_away(30))
    assert delay == 30


def test_about_a_second_is_that_whatever_the_server_asks_for() -> None:
    backoff = RetryState(None)
    delays = []
    while (delay := backoff.next_delay_s(_away(30))) is not None:
        delays.append(delay)
    assert len(delays) == 4
    assert sum(delays) < 2


def test_there_is_no_try_after_the_time_of_the_call() -> None:
    assert RetryState(_RETRY, timeout_s=20).next_delay_s(_away(30)) is None
    assert RetryState(_RETRY, timeout_s=40).next_delay_s(_away(30)) == 30
    assert RetryState(_RETRY, timeout_s=0).left_s == 0
