"""Calls that are asked again while the link is away: those of a push, applies and rollbacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from weightsync.errors import Reason
from weightsync_client.errors import ClientError, passing
from weightsync_client.options import Retry
from weightsync_client.rpc import calls

if TYPE_CHECKING:
    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_client.rpc.channels import Link

__all__ = ["Invoke", "RetryBudget", "RetryingCalls"]

T = TypeVar("T")

# Nobody answered. Whatever an engine's server does answer is the end of an apply.
_AWAY = frozenset({Reason.SERVER_AWAY, Reason.SHUTTING_DOWN, Reason.CANCELLED})

# For a link that is cut, or a server that is being restarted by somebody who hurries.
_BRIEF = Retry(attempts=5, initial_s=0.1, max_s=2.0)

# How long the clean-up after a failed push may take.
_ABORT_S = 5.0


class Invoke(Protocol):
    """Sends one unary call."""

    def __call__(self, call: calls.Call[T], /) -> T:
        """Return what the call's answer says."""


class RetryBudget:
    """How long one call is asked again.

    Args:
        retry: How often, and how long to wait between; None: about a second, whatever is told.
            Every unary call is idempotent, by itself or by its key, so a lost answer may be asked
            for again. gRPC's own retries cannot tell a broken link from TLS that does not fit.
        timeout_s: Longest time of the call, with all tries.
    """

    def __init__(self, retry: Retry | None, timeout_s: float) -> None:
        self._retry = retry or _BRIEF
        self._brief = retry is None
        self._end = time.monotonic() + timeout_s
        self._failures = 0

    @property
    def left_s(self) -> float:
        """What is left of the call's time."""
        return max(0.0, self._end - time.monotonic())

    def pause_s(self, error: ClientError) -> float | None:
        """Return how long to wait before the next try; None: there is none."""
        self._failures += 1
        told = None if self._brief else error.retry_after_s
        pause = self._retry.delay_s(self._failures, told)
        last = self._failures >= self._retry.attempts or pause >= self.left_s
        return None if last or error.reason not in _AWAY else pause


class RetryingCalls:
    """Asks again until there is an answer, the retries are used up, or `stop` is set.

    Args:
        link: To the server.
        invoke: Sends unary calls.
        retry: How often, and how long to wait between.
        stop: Gives the event that ends the waiting.
    """

    def __init__(
        self, link: Link, invoke: Invoke, retry: Retry, stop: Callable[[], threading.Event]
    ) -> None:
        self._timeouts = link.timeouts
        self._invoke = invoke
        self._retry = retry
        self._stop = stop

    def begin(
        self, request: pb.BeginPushRequest, sizes: Mapping[int, int] | None
    ) -> pb.BeginPushResponse:
        """Open a push, or join the one under its key; one of other bytes is dropped first.

        Args:
            request: The call.
            sizes: Bytes of each of our shards, by index; None: not known.
        """
        call = calls.begin_push(request, self._timeouts)
        try:
            reply = self._persist(call)
        except ClientError as error:
            if error.reason is not Reason.VERSION_CONFLICT or "push_id" not in error.metadata:
                raise
            other = error.metadata["push_id"]
        else:
            ours = sizes is None or all(sizes.get(s.shard) == s.size_bytes for s in reply.shards)
            if ours or reply.HasField("committed"):
                return reply
            other = reply.push_id
        # Under the caller's key lies a try with other bytes: in full, or as a delta.
        self._persist(calls.abort_push(other, self._timeouts))
        return self._persist(call)

    def get(self, push_id: str) -> pb.GetPushResponse:
        """Tell how far a push has come."""
        return self._persist(calls.get_push(push_id, self._timeouts))

    def commit(self, push_id: str, digest: str, shards: int) -> pb.CommitPushResponse:
        """Commit a push."""
        return self._persist(calls.commit_push(push_id, digest, shards, self._timeouts))

    def abort(self, push_id: str) -> ClientError | None:
        """Try for a few seconds to drop a push; return why it may still be there."""
        call = calls.abort_push(push_id, self._timeouts)
        try:
            self._invoke(replace(call, timeout_s=_ABORT_S))
        except ClientError as error:
            return error
        return None

    def _persist(self, call: calls.Call[T]) -> T:
        failures = 0
        while True:
            try:
                return self._invoke(call)
            except ClientError as error:
                failures += 1
                stop = self._stop()
                if not passing(error) or failures >= self._retry.attempts or stop.is_set():
                    raise
                stop.wait(self._retry.delay_s(failures, error.retry_after_s))
