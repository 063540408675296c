"""What is tried again while the link is away, and how long to wait between two tries."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import ClientError, passing
from weightsync_client.options import Retry
from weightsync_client.rpc import calls
from weightsync_client.rpc.tensor_pages import engine_layout

if TYPE_CHECKING:
    from weightsync_client.rpc.channels import Link
    from weightsync_client.rpc.tensor_pages import EngineLayout


T = TypeVar("T")

# Nobody answered. Whatever an engine's server does answer is the end of an apply.
_AWAY = frozenset({Reason.SERVER_AWAY, Reason.SHUTTING_DOWN, Reason.CANCELLED})

# For a link that is cut, or a server that is being restarted by somebody who hurries.
_BRIEF = Retry(attempts=5, initial_s=0.1, max_s=2.0)

# How long the clean-up after a failed push may take.
_ABORT_S = 5.0


class Invoke(Protocol):
    def __call__(self, call: calls.Call[T], /) -> T:
        """Return what the call's answer says."""


class RetryState:
    """Failures in a row of one piece of work, and how long to wait before the next try.

    A `retry` of None waits about a second, whatever is asked for; `timeout_s` bounds all tries.
    """

    def __init__(self, retry: Retry | None, timeout_s: float = math.inf) -> None:
        self._retry = retry or _BRIEF
        self._brief = retry is None
        self._end = time.monotonic() + timeout_s
        self.failures = 0

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def exhausted(self) -> bool:
        return self.failures >= self._retry.attempts

    def delay_s(self, asked_s: float | None = None) -> float:
        """Return how long to wait before the next try, with jitter, and at least `asked_s`."""
        return self._retry.delay_s(max(1, self.failures), None if self._brief else asked_s)

    def next_delay_s(self, error: ClientError) -> float | None:
        """Count a failure; return how long to wait before the next try, None: there is none."""
        self.failures += 1
        delay = self.delay_s(error.retry_after_s)
        return None if self.exhausted or delay >= self.left_s else delay

    def reset(self) -> None:
        self.failures = 0


def _call_delay_s(backoff: RetryState, error: ClientError) -> float | None:
    """Return the seconds to wait before a unary call is sent again, or None if it is not.

    Every call is idempotent. gRPC's own retries cannot tell a broken link from unfit TLS.
    """
    delay = backoff.next_delay_s(error)
    return delay if error.reason in _AWAY else None


def call_again(send: Callable[[calls.Call[T]], T], call: calls.Call[T], retry: Retry | None) -> T:
    """Send a call, and again while nobody answers; for `retry` see `RetryState`."""
    backoff = RetryState(retry, call.timeout_s)
    while True:
        try:
            return send(replace(call, timeout_s=backoff.left_s))
        except ClientError as error:
            delay = _call_delay_s(backoff, error)
            if delay is None:
                raise
        time.sleep(delay)


async def call_again_async(
    send: Callable[[calls.Call[T]], Awaitable[T]], call: calls.Call[T], retry: Retry | None
) -> T:
    backoff = RetryState(retry, call.timeout_s)
    while True:
        try:
            return await send(replace(call, timeout_s=backoff.left_s))
        except ClientError as error:
            delay = _call_delay_s(backoff, error)
            if delay is None:
                raise
        await asyncio.sleep(delay)


class RetryingCalls:
    """Asks again until there is an answer, the retries are used up, or `stop` is set."""

    def __init__(
        self,
        link: Link,
        invoke: Invoke,
        retry: Retry,
        stop: threading.Event,
        writer: int = 0,
    ) -> None:
        self._writer = writer
        self.link = link
        self._invoke = invoke
        self.retry = retry
        self.stop = stop

    def begin(
        self, request: pb.BeginPushRequest, sizes: Mapping[int, int] | None
    ) -> pb.BeginPushResponse:
        """Open a push, or join the one under its key; one of other bytes is dropped first.

        `sizes` has the bytes of each of our shards, by index; None: not known.
        """
        call = calls.begin_push(request, self.link.timeouts)
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
        self._persist(calls.abort_push(other, self.link.timeouts))
        return self._persist(call)

    def engine_layout(self, model: str, known: EngineLayout | None) -> EngineLayout | None:
        """Return what the engines hold, or `known` if they still do; None: nobody can tell."""
        try:
            return engine_layout(self._persist, self.link.timeouts, model, known)
        except ClientError as error:
            if error.reason is not Reason.NOT_SUPPORTED:
                raise
            # An older server.
            return None

    def get(self, push_id: str, stop: threading.Event | None = None) -> pb.GetPushResponse:
        """Return how far a push has come; `stop` takes the place of the `stop` of all calls."""
        return self._persist(calls.get_push(push_id, self.link.timeouts, self._writer), stop)

    def commit(
        self, push_id: str, digest: str, shards: int, cast: int, probes: pb.Probes | None = None
    ) -> pb.CommitPushResponse:
        """Commit a push of which so many tensors were `cast`.

        `digest` is the content digest of what was sent, or "" if not known. `probes` are kept with
        the version.
        """
        request = pb.CommitPushRequest(
            push_id=push_id,
            content_digest=digest,
            shard_count=shards,
            writer=self._writer,
            cast_tensors=cast,
            probes=probes,
        )
        return self._persist(calls.commit_push(request, self.link.timeouts))

    def abort(self, push_id: str, reason: str = "") -> ClientError | None:
        """Try for a few seconds to drop a push; return why it may still be there."""
        call = calls.abort_push(push_id, self.link.timeouts, reason=reason, writer=self._writer)
        try:
            self._invoke(replace(call, timeout_s=_ABORT_S))
        except ClientError as error:
            return error
        return None

    def _persist(self, call: calls.Call[T], stop: threading.Event | None = None) -> T:
        backoff, stop = RetryState(self.retry), stop or self.stop
        while True:
            try:
                return self._invoke(call)
            except ClientError as error:
                delay = backoff.next_delay_s(error)
                if delay is None or not passing(error) or stop.is_set():
                    raise
                stop.wait(delay)
