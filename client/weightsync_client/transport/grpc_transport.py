"""Shards over one or several streams, each taken up where a cut left it."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Container, Generator, Iterator
from typing import NamedTuple

from weightsync.errors import Reason
from weightsync.model.manifest import TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import AbortedError, ClientError, passing
from weightsync_client.options import Retry
from weightsync_client.rpc.channels import Link
from weightsync_client.rpc.retry import Backoff, RetryingCalls
from weightsync_client.source.shards import Keep, Shard
from weightsync_client.source.source import Source
from weightsync_client.transport import messages
from weightsync_client.transport.digester import ShardDigester
from weightsync_client.transport.shard_queue import Jobs, ShardJob
from weightsync_client.transport.stream import StreamConnection

__all__ = ["Done", "GrpcTransport", "OpenedPush"]

#: The tensors of one shard and their digests.
Done = tuple[tuple[TensorEntry, ...], list[bytes]]


class OpenedPush(NamedTuple):
    """A push that the server has opened.

    Attributes:
        push_id: Its name.
        endpoints: Data ports to use; none: the server's own address.
        chunk_bytes: Of a message, at most.
        held: What the server holds of each shard.
        layout_known: Whether it knows the layout of all.
        elsewhere: Shards that went another way.
    """

    push_id: str
    endpoints: list[str]
    chunk_bytes: int
    held: dict[int, pb.ShardProgress]
    layout_known: bool
    elsewhere: Container[int]


class GrpcTransport:
    """Sends the shards of one push; `run` is called once.

    Threads: `run` hands out shards, each lane sends with one, gRPC makes messages in one more per
    stream. A shard belongs to one lane at a time.

    Args:
        link: To the server.
        ask: Sends unary calls of the push.
        source: What is sent.
        retry: How long a cut link is taken up again.
        streams: Lanes at least.
        keep: Gets the bytes of every tensor as they are digested.
        on_bytes: Called with the size of every piece that is sent.
        on_taken: Called once nothing is read from the caller's tensors any more.

    Attributes:
        stop: Set when it is to end.
        error: Why it ended.
        done: The shards that were sent.
    """

    def __init__(
        self,
        link: Link,
        ask: RetryingCalls,
        source: Source,
        retry: Retry,
        streams: int,
        keep: Keep | None,
        on_bytes: Callable[[int], None],
        on_taken: Callable[[], None],
    ) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.done: list[Done] = []
        self._link = link
        self._ask = ask
        self._source = source
        self._retry = retry
        self._streams = self._width = streams
        self._keep = keep
        self._on_bytes = on_bytes
        self._on_taken = on_taken
        self._opened: OpenedPush
        self._lock = threading.Lock()
        self._lanes: list[StreamConnection] = []
        self._jobs = Jobs()
        self._permits = threading.Semaphore(streams)

    def run(self, opened: OpenedPush) -> None:
        """Send every shard, or what the server lacks of it.

        Raises:
            BaseException: The first `error`.
        """
        self._opened, endpoints = opened, opened.endpoints
        shards, count = self._source.shards, self._streams
        if isinstance(shards, list):
            # All lie there already, so more lanes hold no more of them.
            count = min(max(count, len(endpoints)), len(shards))
        self._width = max(count, self._streams)
        # Pushes that have fewer lanes than there are endpoints do not all take the same ones.
        first = zlib.crc32(opened.push_id.encode())
        self._lanes = [
            StreamConnection(
                self._link, endpoints[(first + i) % len(endpoints)] if endpoints else ""
            )
            for i in range(count)
        ]
        threads = [
            threading.Thread(target=self._serve, args=(lane,), name="weightsync-push", daemon=True)
            for lane in self._lanes
        ]
        for thread in threads:
            thread.start()
        try:
            self._hand_out(count)
            for thread in threads:
                thread.join()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
            for lane in self._lanes:
                lane.close()
        if self.error is not None:
            raise self.error

    def _hand_out(self, lanes: int) -> None:
        shards: Iterator[Shard] = iter(self._source.shards)
        again = self._source.again
        while not self.stop.is_set() and (shard := next(shards, None)) is not None:
            if shard.index in self._opened.elsewhere:
                continue
            job = ShardJob(shard, ShardDigester(shard, self._keep))
            job.take_up(self._opened.held.get(shard.index))
            job.layout_held |= self._opened.layout_known
            if not again:
                # One shard is being filled while each lane sends one, and no more are held.
                self._permits.acquire()
            self._jobs.put(job)
            del job, shard
        for _ in range(lanes):
            self._jobs.put(None)
        if self._source.delta is not None and not self.stop.is_set():
            # All that changed lies in shards of their own, whatever becomes of the link.
            self._on_taken()
        # An iterator that was left early runs its clean-up now, in the thread that ran it.
        if isinstance(shards, Generator):
            shards.close()

    def fail(self, error: BaseException) -> None:
        """End it, from any thread, because of an error."""
        with self._lock:
            self.error = self.error or error
        self.stop.set()
        for _ in range(self._width):
            self._permits.release()
            self._jobs.put(None)
        for lane in self._lanes:
            lane.cancel()

    # One lane.

    def _serve(self, lane: StreamConnection) -> None:
        try:
            while not self.stop.is_set() and (job := self._next_job(lane)) is not None:
                pending = [job]
                del job
                self._deliver(lane, pending)
                pending.clear()
                self._permits.release()
        except BaseException as error:  # noqa: BLE001 - raised again by run
            self.fail(error)

    def _next_job(self, lane: StreamConnection) -> ShardJob | None:
        try:
            return self._jobs.soon()
        except queue.Empty:
            return self._wait_alive(lane)

    def _wait_alive(self, lane: StreamConnection) -> ShardJob | None:
        """Wait for the next shard on a stream that tells the server that there will be one."""
        found: list[ShardJob | None] = []
        while not found and not self.stop.is_set():
            error = lane.carry(self._jobs.heartbeats(self._opened.push_id, found))
            if error is not None and not _resumable(error):
                raise error
            if error is not None and not found:
                self.stop.wait(self._retry.max_s)
        return found[0] if found else None

    def _deliver(self, lane: StreamConnection, pending: list[ShardJob]) -> None:
        backoff = Backoff(self._retry)
        while True:
            error = lane.carry(self._messages(lane, pending))
            if error is None:
                self._finish(pending)
                return
            if self.stop.is_set() or not _resumable(error):
                raise error
            backoff.failures += 1
            asked = error.retry_after_s if isinstance(error, ClientError) else None
            self.stop.wait(backoff.delay_s(asked))
            if self._take_up(pending):
                # The server has more than after the last failure, so this one is the first.
                backoff.failures = 1
            if backoff.exhausted:
                raise error

    def _messages(
        self, lane: StreamConnection, pending: list[ShardJob]
    ) -> Generator[messages.Message, None, None]:
        yield messages.join_message(self._opened.push_id)
        for job in list(pending):
            yield from self._job_messages(lane, job)
        # A source that can be read again needs no acknowledgement before the next shard.
        while self._source.again and (next_job := self._jobs.now()) is not None:
            pending.append(next_job)
            yield from self._job_messages(lane, next_job)

    def _job_messages(self, lane: StreamConnection, job: ShardJob) -> Iterator[messages.Message]:
        if not job.layout_held:
            yield from messages.layout_messages(job.shard)
        reader = job.shard.open(lane.scratch)
        try:
            yield from messages.shard_bytes(
                job.shard,
                reader,
                job.digester,
                job.offset,
                self._opened.chunk_bytes,
                self._on_bytes,
            )
        finally:
            reader.close()
        yield from messages.digest_messages(job.shard, job.digester.digests)

    def _finish(self, pending: list[ShardJob]) -> None:
        with self._lock:
            for job in pending:
                self.done.append((job.shard.tensors, job.digester.digests))

    # After a cut.

    def _take_up(self, pending: list[ShardJob]) -> bool:
        """Ask what the server holds; returns whether it holds more than when last asked."""
        reply = self._ask.get(self._opened.push_id)
        if reply.durability == pb.DURABILITY_FAILED:
            raise AbortedError(
                Reason.PUSH_ABORTED, f"the server dropped the push: {reply.error}; push again"
            )
        held = {progress.shard: progress for progress in reply.shards}
        progressed = False
        for job in pending:
            before = job.layout_held, job.offset
            job.take_up(held.get(job.shard.index))
            progressed |= (job.layout_held, job.offset) > before
        return progressed


def _resumable(error: BaseException) -> bool:
    if isinstance(error, AbortedError) and error.reason in (
        Reason.OFFSET_MISMATCH,
        Reason.SHARD_BUSY,
    ):
        return True
    # Or too many streams: the server has not noticed yet that an earlier one is gone.
    return passing(error)
