"""Shards over one or several streams, each taken up where a cut left it."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import grpc

from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import (
    AbortedError,
    ClientError,
    InvalidError,
    cancelled_error,
    from_rpc,
    passing,
    refuse,
)
from weightsync_client.rpc.channels import Link
from weightsync_client.rpc.retry import RetryingCalls, RetryState
from weightsync_client.source.shards import Keep, Shard
from weightsync_client.source.slice_shards import SliceShard
from weightsync_client.source.source import Source
from weightsync_client.source.tensors import Scratch
from weightsync_client.transport import messages
from weightsync_client.transport.messages import Message, ShardDigester, serialize
from weightsync_client.transport.protocol import OpenedPush, Sent, ShardDigests
from weightsync_client.transport.shard_queue import Jobs, ShardJob

Messages = Generator[Message, None, None]

_METHOD = "/weightsync.v1.WeightSync/PushWeights"
#: What somebody else would say at an address that was taken for a data port of our server; if it is
#: true, our server says so too.
_FOREIGN = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class RequestIterator(Iterator[Message]):
    """Messages for one call, taken by gRPC's thread when the link has room for the next.

    After `close` none is made, so the source is not in use. `error` is what reading it raised.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._lock = threading.Lock()
        self._closed = False
        self.exhausted = False
        self.error: BaseException | None = None

    def __next__(self) -> Message:
        with self._lock:
            if self._closed:
                raise StopIteration
            try:
                return next(self._messages)
            except StopIteration:
                self.exhausted = True
                raise
            except BaseException as error:  # noqa: BLE001 - gRPC would log it and drop it
                self.error = error
                self._closed = True
                raise StopIteration from None

    def close(self) -> None:
        """End the iteration, waiting for the message that is being made."""
        with self._lock:
            self._closed = True
            self._messages.close()


class StreamConnection:
    """A connection of its own that carries one stream after the other.

    `address` is a data port's; if that is empty or fails, the server's is used.
    """

    def __init__(self, link: Link, address: str) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._call: grpc.Future[pb.PushWeightsResponse] | None = None
        self._cancelled = False
        self.scratch = Scratch()
        self._connect(address)

    def _connect(self, address: str) -> None:
        self._address = address or self._link.address
        self._channel = self._link.channel(address)
        self._push = self._channel.stream_unary(
            _METHOD,
            request_serializer=serialize,
            response_deserializer=pb.PushWeightsResponse.FromString,
        )

    def carry(self, messages: Messages) -> BaseException | None:
        """Send messages on a stream of their own; return what went wrong."""
        feed = RequestIterator(messages)
        try:
            self.send(feed)
        except ClientError as error:
            feed.close()
            advice = self._elsewhere(error)
            return feed.error or advice
        finally:
            feed.close()
        if feed.error is None and not feed.exhausted:
            return refuse(
                Reason.SERVER_AWAY, "the server ended the stream before all was sent; try again"
            )
        return feed.error

    def _elsewhere(self, error: ClientError) -> ClientError:
        """Leave a data port after an error that the server's own address would not give."""
        # TLS of another kind is permanent, but only at that port.
        tls = isinstance(error, InvalidError) and error.code is grpc.StatusCode.UNAVAILABLE
        foreign = tls or error.code in _FOREIGN
        with self._lock:
            own = self._address == self._link.address
            if own or self._cancelled or not (foreign or passing(error)):
                return error
            self._channel.close()
            self._connect("")
        if not foreign:
            return error
        return refuse(Reason.SERVER_AWAY, f"a data port belongs to another server: {error}")

    def send(self, feed: RequestIterator) -> pb.PushWeightsResponse:
        """Send what the feed gives and return the answer, which acknowledges every byte."""
        with self._lock:
            if self._cancelled:
                raise cancelled_error()
            self._call = self._push.future(
                feed, timeout=self._link.timeouts.stream_s, metadata=self._link.metadata
            )
        try:
            return self._call.result()
        except grpc.FutureCancelledError:
            raise cancelled_error() from None
        except grpc.RpcError as error:
            raise from_rpc(error, method="PushWeights", address=self._address) from None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()

    def close(self) -> None:
        self._channel.close()


class GrpcTransport:
    """A `Transport` over gRPC streams, which takes any shard.

    Threads: `send` hands out shards, each of at least `streams` lanes sends with one, gRPC makes
    messages in one more per stream. A shard belongs to one lane at a time.

    `keep` gets the bytes of every tensor as they are digested. `on_taken` is called once nothing is
    read from the caller's tensors any more.
    """

    def __init__(
        self,
        calls: RetryingCalls,
        source: Source,
        streams: int,
        keep: Keep | None,
        on_bytes: Callable[[int], None],
        on_taken: Callable[[], None],
    ) -> None:
        self._link = calls.link
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
        """No shard is left over."""
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
        self._fail(cancelled_error())

    def _declare(self, shards: Sequence[Shard]) -> None:
        """Tell the layout of all shards, so that it is refused as a whole before a byte is sent."""
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
        backoff = RetryState(self._calls.retry)
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
        if isinstance(shard, SliceShard):
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
    return shard.whole if isinstance(shard, SliceShard) else shard


def _resumable(error: BaseException) -> bool:
    if isinstance(error, AbortedError) and error.reason in (
        Reason.OFFSET_MISMATCH,
        Reason.SHARD_BUSY,
    ):
        return True
    # Or too many streams: the server has not noticed yet that an earlier one is gone.
    return passing(error)
