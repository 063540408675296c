"""Shards over one or several streams, each taken up where a cut left it."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import AbortedError, ClientError, cancelled_error, passing
from weightsync_client.rpc.channels import Link
from weightsync_client.rpc.retry import Backoff, RetryingCalls
from weightsync_client.source.box_shards import BoxShard
from weightsync_client.source.shards import Keep, Shard
from weightsync_client.source.source import Source
from weightsync_client.transport import messages
from weightsync_client.transport.digester import ShardDigester
from weightsync_client.transport.protocol import (
    OpenedPush,
    Sent,
    ShardDigests,
)
from weightsync_client.transport.shard_queue import Jobs, ShardJob
from weightsync_client.transport.stream import StreamConnection

__all__ = ["GrpcTransport"]


class GrpcTransport:
    """A `Transport` over gRPC streams, which takes any shard.

    Threads: `send` hands out shards, each lane sends with one, gRPC makes messages in one more per
    stream. A shard belongs to one lane at a time.

    Args:
        link: To the server.
        calls: Sends unary calls of the push.
        source: What is sent.
        streams: Lanes at least.
        keep: Gets the bytes of every tensor as they are digested.
        on_bytes: Called with the size of every piece that is sent.
        on_taken: Called once nothing is read from the caller's tensors any more.
    """

    def __init__(
        self,
        link: Link,
        calls: RetryingCalls,
        source: Source,
        streams: int,
        keep: Keep | None,
        on_bytes: Callable[[int], None],
        on_taken: Callable[[], None],
    ) -> None:
        self._link = link
        self._calls = calls
        self._source = source
        self._streams = self._width = streams
        self._keep = keep
        self._on_bytes = on_bytes
        self._on_taken = on_taken
        self._opened: OpenedPush
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._done: dict[int, ShardDigests] = {}
        self._lock = threading.Lock()
        self._lanes: list[StreamConnection] = []
        self._jobs = Jobs()
        self._permits = threading.Semaphore(streams)

    def send(self, opened: OpenedPush, shards: Iterable[Shard]) -> Sent:
        """See `Transport`; no shard is left over."""
        self._opened = opened
        endpoints, count = self._link.endpoints(opened.endpoints), self._streams
        if isinstance(shards, list):
            # All lie there already, so more lanes hold no more of them. Of several processes each
            # has its own.
            wanted = count if self._source.writer is not None else max(count, len(endpoints))
            count = min(wanted, len(shards))
        self._width = max(count, self._streams)
        # Pushes that have fewer lanes than there are endpoints do not all take the same ones.
        first = zlib.crc32(opened.push_id.encode()) + opened.writer
        self._lanes = [
            StreamConnection(
                self._link, endpoints[(first + i) % len(endpoints)] if endpoints else ""
            )
            for i in range(count)
        ]
        if isinstance(shards, list) and len(shards) > 1 and not opened.layout_known:
            self._declare(shards)
        threads = [
            threading.Thread(target=self._serve, args=(lane,), name="weightsync-push", daemon=True)
            for lane in self._lanes
        ]
        for thread in threads:
            thread.start()
        try:
            self._hand_out(iter(shards), count)
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
            self._close_lanes()
        if self._error is not None:
            raise self._error
        return Sent(shards=self._done)

    def cancel(self) -> None:
        """See `Transport`."""
        self._fail(cancelled_error())

    def _declare(self, shards: Sequence[Shard]) -> None:
        """Tell the layout of all shards, so that it is refused as a whole before a byte is sent.

        Raises:
            ClientError: It is. After a cut each shard's is told with its bytes.
        """
        if self._source.layout is None or self._source.delta is not None:
            return
        known = self._opened.progress
        parts = (
            messages.layout_messages(_whole(shard)) for shard in shards if shard.index not in known
        )
        join = messages.join_message(*self._name)
        error = self._lanes[0].carry(message for message in itertools.chain([join], *parts))
        if error is not None and not _resumable(error):
            self._close_lanes()
            raise error
        self._opened = self._opened._replace(layout_known=error is None)

    def _close_lanes(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _hand_out(self, shards: Iterator[Shard], lanes: int) -> None:
        again = self._source.again
        while not self._stop.is_set() and (shard := next(shards, None)) is not None:
            job = ShardJob(shard, ShardDigester(shard, self._keep))
            job.take_up(self._opened.progress.get(shard.index))
            if not again:
                # One shard is being filled while each lane sends one, and no more are held.
                self._permits.acquire()
            self._jobs.put(job)
            del job, shard
        for _ in range(lanes):
            self._jobs.put(None)
        if self._source.delta is not None and not self._stop.is_set():
            # All that changed lies in shards of their own, whatever becomes of the link.
            self._on_taken()
        # An iterator that was left early runs its clean-up now, in the thread that ran it.
        if isinstance(shards, Generator):
            shards.close()

    def _fail(self, error: BaseException) -> None:
        """End it, from any thread, because of an error."""
        with self._lock:
            self._error = self._error or error
        self._stop.set()
        for _ in range(self._width):
            self._permits.release()
            self._jobs.put(None)
        for lane in self._lanes:
            lane.cancel()

    @property
    def _name(self) -> tuple[str, int]:
        """Of the push, and of this process in it."""
        return self._opened.push_id, self._opened.writer

    # One lane.

    def _serve(self, lane: StreamConnection) -> None:
        try:
            while not self._stop.is_set() and (job := self._next_job(lane)) is not None:
                pending = [job]
                del job
                self._deliver(lane, pending)
                pending.clear()
                self._permits.release()
        except BaseException as error:  # noqa: BLE001 - raised again by send
            self._fail(error)

    def _next_job(self, lane: StreamConnection) -> ShardJob | None:
        try:
            return self._jobs.soon()
        except queue.Empty:
            return self._wait_alive(lane)

    def _wait_alive(self, lane: StreamConnection) -> ShardJob | None:
        """Wait for the next shard on a stream that tells the server that there will be one."""
        found: list[ShardJob | None] = []
        while not found and not self._stop.is_set():
            error = lane.carry(self._jobs.heartbeats(*self._name, found))
            if error is not None and not _resumable(error):
                raise error
            if error is not None:
                self._forget_layouts()
            if error is not None and not found:
                self._stop.wait(self._calls.retry.max_s)
        return found[0] if found else None

    def _deliver(self, lane: StreamConnection, pending: list[ShardJob]) -> None:
        backoff = Backoff(self._calls.retry)
        while True:
            error = lane.carry(self._messages(lane, pending))
            if error is None:
                self._finish(pending)
                return
            if self._stop.is_set() or not _resumable(error):
                raise error
            backoff.failures += 1
            asked = error.retry_after_s if isinstance(error, ClientError) else None
            self._stop.wait(backoff.delay_s(asked))
            if self._take_up(pending):
                # The server has more than after the last failure, so this one is the first.
                backoff.failures = 1
            if backoff.exhausted:
                raise error

    def _messages(
        self, lane: StreamConnection, pending: list[ShardJob]
    ) -> Generator[messages.Message, None, None]:
        yield messages.join_message(*self._name)
        for job in list(pending):
            yield from self._job_messages(lane, job)
        # A source that can be read again needs no acknowledgement before the next shard.
        while self._source.again and (next_job := self._jobs.now()) is not None:
            pending.append(next_job)
            yield from self._job_messages(lane, next_job)

    def _job_messages(self, lane: StreamConnection, job: ShardJob) -> Iterator[messages.Message]:
        shard = job.shard
        known = self._opened.layout_known or shard.index in self._opened.progress
        yield from messages.declaration(shard, layout_known=job.layout_known or known)
        with contextlib.closing(shard.open(lane.scratch)) as reader:
            yield from messages.shard_bytes(
                shard,
                reader,
                job.digester,
                job.offset,
                self._opened.chunk_bytes,
                self._on_bytes,
            )
        digests = job.digester.digests
        if isinstance(shard, BoxShard):
            digests = shard.all_digests(digests)
        yield from messages.digest_messages(shard, digests)

    def _finish(self, pending: list[ShardJob]) -> None:
        with self._lock:
            for job in pending:
                digests = ShardDigests(job.shard.tensors, job.digester.digests)
                self._done[job.shard.index] = digests

    # After a cut.

    def _forget_layouts(self) -> None:
        """Tell each shard's layout with its bytes from now on: a restart may have forgotten it."""
        self._opened = self._opened._replace(layout_known=False, progress={})

    def _take_up(self, pending: list[ShardJob]) -> bool:
        """Ask what the server holds; returns whether it holds more than when last asked."""
        reply = self._calls.get(self._opened.push_id, self._stop)
        if reply.durability == pb.DURABILITY_FAILED:
            raise AbortedError(
                Reason.PUSH_ABORTED, f"the server dropped the push: {reply.error}; push again"
            )
        known = {progress.shard: progress for progress in reply.shards}
        self._opened = self._opened._replace(layout_known=False, progress=known)
        progressed = False
        for job in pending:
            before = job.layout_known, job.offset
            job.take_up(known.get(job.shard.index))
            progressed |= (job.layout_known, job.offset) > before
        return progressed


def _whole(shard: Shard) -> Shard:
    """Return what all processes together push of a shard."""
    return shard.whole if isinstance(shard, BoxShard) else shard


def _resumable(error: BaseException) -> bool:
    if isinstance(error, AbortedError) and error.reason in (
        Reason.OFFSET_MISMATCH,
        Reason.SHARD_BUSY,
    ):
        return True
    # Or too many streams: the server has not noticed yet that an earlier one is gone.
    return passing(error)
