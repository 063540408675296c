"""A push: shards over one or several streams, taken up where a cut left them, then the commit."""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator

from weightsync.digest import content_digest
from weightsync.errors import Reason
from weightsync.manifest import TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import messages
from weightsync_client.asking import Asking, Invoke
from weightsync_client.errors import (
    AbortedError,
    ClientError,
    DeadlineError,
    UnavailableError,
    passing,
    refuse,
)
from weightsync_client.jobs import Job, Jobs
from weightsync_client.link import Link
from weightsync_client.options import CHUNK_BYTES, PushOptions, Retry
from weightsync_client.samehost import SameHost, why_streamed
from weightsync_client.shards import Keeper, Shard, ShardDigester
from weightsync_client.sources import Source
from weightsync_client.streams import Lane
from weightsync_client.tensors import Scratch
from weightsync_client.types import PushResult
from weightsync_client.ways import Streamed

__all__ = ["Push"]

# A server that restarted may know less of a push: none of it with memory://, else at most 64 MiB of
# each shard less.
# What was left open by another process of ours may be sent in place of written.
_FORGOTTEN = frozenset({Reason.PUSH_UNKNOWN, Reason.PUSH_INCOMPLETE, Reason.WRITER_LEFT})

# The tensors of one shard and their digests.
_Done = tuple[tuple[TensorEntry, ...], list[bytes]]


class Push:
    """One push; `run` is called once.

    Threads: `run` hands out shards, each lane sends with one, gRPC makes messages in one more per
    stream. A shard belongs to one lane at a time.

    Args:
        link: To the server.
        invoke: Sends unary calls.
        request: Opens the push.
        source: What is sent.
        options: Of the caller.
        retry: How long a cut link is taken up again.
        on_source_free: Called once the caller's tensors are not in use any more.
        keeper: Gets the bytes of every tensor as they are digested.
    """

    def __init__(
        self,
        link: Link,
        invoke: Invoke,
        request: pb.BeginPushRequest,
        source: Source,
        options: PushOptions,
        retry: Retry,
        on_source_free: Callable[[], None] | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._link = link
        self._ask = Asking(link, invoke, retry, lambda: self._stop)
        self._request = request
        self._source = source
        self._options = options
        self._retry = retry
        self._streams = options.get("streams", 1)
        self._width = self._streams
        self._chunk_bytes = options.get("chunk_bytes", CHUNK_BYTES)
        self._keep = keeper.keep if keeper else None
        self._push_id = ""
        self._commit_asked = False
        self._on_source_free = on_source_free
        self._freed = False
        #: The version had been committed before, under this push's key: nothing was sent.
        self.joined = False
        #: How long the latest attempt to send took.
        self.sending_s = 0.0
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._sent = 0
        self._cancelled = False
        why = why_streamed(link.address, source, options)
        facts = link, self._ask, source, why, keeper, self._count
        collects = options.get("same_host", "auto") == "auto"
        self._same_host = SameHost(*facts, collects=collects)
        self._reset()

    def _reset(self) -> None:
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._jobs = Jobs()
        self._permits = threading.Semaphore(self._streams)
        self._held: dict[int, pb.ShardProgress] = {}
        self._layout_known = False
        self._done: list[_Done] = []
        self._same_host.reset()
        if self._cancelled:
            self.cancel()

    @property
    def digests(self) -> dict[str, bytes]:
        """Digest of every tensor that was sent, by name."""
        return {
            tensor.name: digest
            for tensors, digests in self._done
            for tensor, digest in zip(tensors, digests, strict=True)
        }

    @property
    def copied(self) -> bool:
        """The server has copied everything from GPUs itself."""
        return self._same_host.copied

    # The whole of it.

    def run(self) -> PushResult:
        """Send everything and return the committed version."""
        started = time.monotonic()
        restarts = 0
        while True:
            try:
                reply = self._run_once()
            except ClientError as error:
                restarts += 1
                if restarts > 3 or not self._may_restart(error):
                    self._clean_up(error)
                    raise
                if error.reason is Reason.WRITER_LEFT:
                    self._same_host.give_up(Streamed.WRITER_LEFT)
                self._reset()
            except BaseException as error:
                self._clean_up(error)
                raise
            else:
                return self._result(reply, time.monotonic() - started)

    def _may_restart(self, error: ClientError) -> bool:
        # Never from a source that was declared free: it may hold other weights by now.
        again = self._source.again and (self._source.delta is not None or not self._freed)
        return again and error.reason in _FORGOTTEN and self._error in (None, error)

    def cancel(self) -> None:
        """End the push from another thread; `run` then raises AbortedError."""
        # Also should it be about to begin again.
        self._cancelled = True
        self._fail(AbortedError(Reason.PUSH_ABORTED, "the push was cancelled here; push again"))

    def _run_once(self) -> pb.CommitPushResponse:
        reply = self._ask.begin(self._request, self._source.sizes)
        self.joined = reply.HasField("committed")
        # What is committed is nothing to abort.
        self._push_id = "" if self.joined else reply.push_id
        # Should this have to begin again, it is for the same version and under the same epoch.
        self._request.version, self._request.epoch = reply.version, reply.epoch
        if self.joined:
            self._compare(reply.committed)
        else:
            self._layout_known = reply.layout_known
            self._chunk_bytes = min(self._chunk_bytes, reply.max_chunk_bytes or self._chunk_bytes)
            started = time.monotonic()
            self._held = self._same_host.run(reply)
            self.sending_s = time.monotonic() - started
            if self._error is not None:
                raise self._error
            self._done += self._same_host.done.values()
            if self._same_host.reason:
                self._send_all(self._link.endpoints(reply.data_endpoints))
        self._free()
        return reply.committed if self.joined else self._commit()

    def _compare(self, committed: pb.CommitPushResponse) -> None:
        """Refuse a key that belongs to other content; the server cannot know what we hold.

        The source is read and digested for it. An iterable may be used up: whatever comes out,
        nothing is sent of it any more.
        """
        key = self._options.get("idempotency_key")
        if not key:
            return  # Made for this push, so it is ours.
        done: list[_Done] = []
        for shard in self._source.shards:
            if self._error is not None:
                raise self._error
            # What a delta holds was compared, and digested, as it was made.
            if self._source.delta is None:
                done.append((shard.tensors, self._digested(shard)))
        if self._content_digest(done) != committed.content_digest:
            raise refuse(
                Reason.VERSION_CONFLICT,
                f"the idempotency key {key!r} belongs to a push of other content, which is version "
                f"{committed.version}; choose another key",
                version=str(committed.version),
            )

    def _digested(self, shard: Shard) -> list[bytes]:
        digester, size = ShardDigester(shard), shard.entry.size
        reader = shard.open(Scratch())
        try:
            # All of it counts as held by the server, so there is nothing to be sent.
            for _ in messages.shard_bytes(
                shard, reader, digester, size, self._chunk_bytes, self._count
            ):
                pass
        finally:
            reader.close()
        return digester.digests

    def _free(self) -> None:
        if self._on_source_free is not None and not self._freed:
            self._freed = True
            self._on_source_free()

    def _content_digest(self, done: list[_Done]) -> str:
        if self._source.delta is not None:
            return self._source.delta.content_digest
        return content_digest(
            (tensor.name, tensor.dtype, tensor.shape, tensor_digest)
            for tensors, digests in done
            for tensor, tensor_digest in zip(tensors, digests, strict=True)
        )

    def _commit(self) -> pb.CommitPushResponse:
        if not self._done:
            raise refuse(Reason.LAYOUT_INVALID, "the source gave no tensor; push at least one")
        digest = self._content_digest(self._done)
        self._commit_asked = True
        reply = self._ask.commit(self._push_id, digest, len(self._done))
        if reply.content_digest != digest:
            raise refuse(
                Reason.DATA_CORRUPT,
                f"the server committed content {reply.content_digest}, but {digest} was sent; "
                "do not apply this version, push again",
            )
        return reply

    def _result(self, reply: pb.CommitPushResponse, seconds: float) -> PushResult:
        return PushResult(
            reply.version,
            reply.content_digest,
            reply.manifest_digest,
            durable=reply.durable,
            already=reply.already,
            size_bytes=reply.size_bytes,
            tensor_count=reply.tensor_count,
            sent_bytes=self._sent,
            seconds=seconds,
            dense_bytes=reply.size_bytes,
            way=self._same_host.way,
            way_reason=self._same_host.reason,
        )

    def _clean_up(self, error: BaseException) -> None:
        lost = isinstance(error, (UnavailableError, DeadlineError))
        if lost and (self._commit_asked or self._options.get("idempotency_key")):
            return  # It may be committed, or be taken up again under its key.
        if self._push_id:
            self._ask.abort(self._push_id)

    # Handing out.

    def _send_all(self, endpoints: list[str]) -> None:
        shards, count = self._source.shards, self._streams
        if isinstance(shards, list):
            # All lie there already, so more lanes hold no more of them.
            count = min(max(count, len(endpoints)), len(shards))
        self._width = max(count, self._streams)
        started = time.monotonic()
        # Pushes that have fewer lanes than there are endpoints do not all take the same ones.
        first = zlib.crc32(self._push_id.encode())
        self._lanes = [
            Lane(self._link, endpoints[(first + i) % len(endpoints)] if endpoints else "")
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
            self._fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
            for lane in self._lanes:
                lane.close()
        self.sending_s = time.monotonic() - started
        if self._error is not None:
            raise self._error

    def _hand_out(self, lanes: int) -> None:
        shards: Iterator[Shard] = iter(self._source.shards)
        again = self._source.again
        while not self._stop.is_set() and (shard := next(shards, None)) is not None:
            if shard.index in self._same_host.done:
                continue
            job = Job(shard, ShardDigester(shard, self._keep))
            job.take_up(self._held.get(shard.index))
            job.layout_held |= self._layout_known
            if not again:
                # One shard is being filled while each lane sends one, and no more are held.
                self._permits.acquire()
            self._jobs.put(job)
            del job, shard
        for _ in range(lanes):
            self._jobs.put(None)
        if self._source.delta is not None and not self._stop.is_set():
            # All that changed lies in shards of their own, whatever becomes of the link.
            self._free()
        # An iterator that was left early runs its clean-up now, in the thread that ran it.
        if isinstance(shards, Generator):
            shards.close()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._stop.set()
        self._same_host.cancel()
        for _ in range(self._width):
            self._permits.release()
            self._jobs.put(None)
        for lane in self._lanes:
            lane.cancel()

    # One lane.

    def _serve(self, lane: Lane) -> None:
        try:
            while not self._stop.is_set() and (job := self._next_job(lane)) is not None:
                pending = [job]
                del job
                self._deliver(lane, pending)
                pending.clear()
                self._permits.release()
        except BaseException as error:  # noqa: BLE001 - raised again by run
            self._fail(error)

    def _next_job(self, lane: Lane) -> Job | None:
        try:
            return self._jobs.soon()
        except queue.Empty:
            return self._wait_alive(lane)

    def _wait_alive(self, lane: Lane) -> Job | None:
        """Wait for the next shard on a stream that tells the server that there will be one."""
        found: list[Job | None] = []
        while not found and not self._stop.is_set():
            error = lane.carry(self._jobs.heartbeats(self._push_id, found))
            if error is not None and not _resumable(error):
                raise error
            if error is not None and not found:
                self._stop.wait(self._retry.max_s)
        return found[0] if found else None

    def _deliver(self, lane: Lane, pending: list[Job]) -> None:
        failures = 0
        while True:
            error = lane.carry(self._messages(lane, pending))
            if error is None:
                self._finish(pending)
                return
            if self._stop.is_set() or not _resumable(error):
                raise error
            failures += 1
            told = error.retry_after_s if isinstance(error, ClientError) else None
            self._stop.wait(self._retry.delay_s(failures, told))
            if self._take_up(pending):
                failures = 1
            if failures >= self._retry.attempts:
                raise error

    def _messages(self, lane: Lane, pending: list[Job]) -> Generator[messages.Message, None, None]:
        yield messages.join_message(self._push_id)
        for job in list(pending):
            yield from self._job_messages(lane, job)
        # A source that can be read again needs no acknowledgement before the next shard.
        while self._source.again and (next_job := self._jobs.now()) is not None:
            pending.append(next_job)
            yield from self._job_messages(lane, next_job)

    def _job_messages(self, lane: Lane, job: Job) -> Iterator[messages.Message]:
        if not job.layout_held:
            yield from messages.layout_messages(job.shard)
        reader = job.shard.open(lane.scratch)
        try:
            yield from messages.shard_bytes(
                job.shard, reader, job.digester, job.offset, self._chunk_bytes, self._count
            )
        finally:
            reader.close()
        yield from messages.digest_messages(job.shard, job.digester.digests)

    def _count(self, sent: int) -> None:
        with self._lock:
            self._sent += sent
            total = self._sent
        report = self._options.get("on_progress")
        if report is not None:
            report(total, self._request.total_bytes)

    def _finish(self, pending: list[Job]) -> None:
        with self._lock:
            for job in pending:
                self._done.append((job.shard.tensors, job.digester.digests))

    # After a cut.

    def _take_up(self, pending: list[Job]) -> bool:
        """Ask what the server holds; returns whether it holds more than when last asked."""
        reply = self._ask.get(self._push_id)
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
