"""A push: it is opened, its shards are handed over or sent, and then it is committed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weightsync.errors import Reason
from weightsync.model.digest import content_digest
from weightsync.model.manifest import Manifest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import (
    AbortedError,
    ClientError,
    DeadlineError,
    UnavailableError,
    refuse,
)
from weightsync_client.options import CHUNK_BYTES, PushOptions, Retry
from weightsync_client.push_reasons import Streamed
from weightsync_client.rpc.channels import Link
from weightsync_client.rpc.retry import Invoke, RetryingCalls
from weightsync_client.source.shards import ByteSink, Shard
from weightsync_client.source.source import Source
from weightsync_client.source.tensors import Scratch
from weightsync_client.transport import messages
from weightsync_client.transport.digester import ShardDigester
from weightsync_client.transport.grpc_transport import Done, GrpcTransport, OpenedPush
from weightsync_client.transport.shm_transport import ShmTransport, why_streamed
from weightsync_client.types import PushResult

__all__ = ["NOTHING_SENT", "PushSession"]

NOTHING_SENT = "nothing was sent, and no version was made"
_UNKNOWN = (
    "`weightsync versions` tells whether the version is committed, and `weightsync status` whether "
    "the push is still open"
)
# A server that restarted may know less of a push: none of it with memory://, else at most 64 MiB of
# each shard less.
# What was left open by another process of ours may be sent in place of written.
_FORGOTTEN = frozenset({Reason.PUSH_UNKNOWN, Reason.PUSH_INCOMPLETE, Reason.WRITER_LEFT})


class PushSession:
    """One push; `run` is called once.

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
        keeper: ByteSink | None = None,
    ) -> None:
        self._link = link
        self._ask = RetryingCalls(link, invoke, retry, lambda: self._sending.stop)
        self._request = request
        self._source = source
        self._options = options
        self._retry = retry
        self._chunk_bytes = options.get("chunk_bytes", CHUNK_BYTES)
        self._keep = keeper.keep if keeper else None
        self._push_id = ""
        self._commit_asked = False
        self._on_source_free = on_source_free
        self._freed = False
        #: The version had been committed before, under this push's key: nothing was sent.
        self.joined = False
        #: What is to be said of it should it be interrupted now.
        self.state = NOTHING_SENT
        #: How long the latest attempt to send took.
        self.sending_s = 0.0
        self._lock = threading.Lock()
        self._sent = 0
        self._cancelled = False
        why = why_streamed(link.address, source, options)
        facts = link, self._ask, source, why, keeper, self._count
        collects = options.get("same_host", "auto") == "auto"
        self._same_host = ShmTransport(*facts, collects=collects)
        self._reset()

    def _reset(self) -> None:
        self._sending = GrpcTransport(
            self._link,
            self._ask,
            self._source,
            self._retry,
            self._options.get("streams", 1),
            self._keep,
            self._count,
            self._free,
        )
        self._same_host.reset()
        if self._cancelled:
            self.cancel()

    @property
    def digests(self) -> dict[str, bytes]:
        """Digest of every tensor that was sent, by name."""
        return {
            tensor.name: digest
            for tensors, digests in self._done()
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
                self.state = f"version {reply.version} is committed"
                return self._result(reply, time.monotonic() - started)

    def _may_restart(self, error: ClientError) -> bool:
        # Never from a source that was declared free: it may hold other weights by now.
        again = self._source.again and (self._source.delta is not None or not self._freed)
        return again and error.reason in _FORGOTTEN and self._sending.error in (None, error)

    def cancel(self) -> None:
        """End the push from another thread; `run` then raises AbortedError."""
        # Also should it be about to begin again.
        self._cancelled = True
        self._sending.fail(
            AbortedError(Reason.PUSH_ABORTED, "the push was cancelled here; push again")
        )
        self._same_host.cancel()

    def _run_once(self) -> pb.CommitPushResponse:
        self.state = _UNKNOWN
        reply = self._ask.begin(self._request, self._source.sizes)
        self.joined = reply.HasField("committed")
        # What is committed is nothing to abort.
        self._push_id = "" if self.joined else reply.push_id
        # Should this have to begin again, it is for the same version and under the same epoch.
        self._request.version, self._request.epoch = reply.version, reply.epoch
        if self.joined:
            self.state = f"version {reply.version} had been committed under this key"
            self._compare(reply.committed)
        else:
            self._chunk_bytes = min(self._chunk_bytes, reply.max_chunk_bytes or self._chunk_bytes)
            started = time.monotonic()
            self._send_all(reply)
            self.sending_s = time.monotonic() - started
        self._free()
        return reply.committed if self.joined else self._commit()

    def _send_all(self, reply: pb.BeginPushResponse) -> None:
        held = self._same_host.run(reply)
        if self._sending.error is not None:
            raise self._sending.error
        if self._same_host.reason:
            self._sending.run(
                OpenedPush(
                    push_id=reply.push_id,
                    endpoints=self._link.endpoints(reply.data_endpoints),
                    chunk_bytes=self._chunk_bytes,
                    held=held,
                    layout_known=reply.layout_known,
                    elsewhere=self._same_host.done,
                )
            )

    def _done(self) -> list[Done]:
        return [*self._same_host.done.values(), *self._sending.done]

    def _count(self, sent: int) -> None:
        with self._lock:
            self._sent += sent
            total = self._sent
        report = self._options.get("on_progress")
        if report is not None:
            report(total, self._request.total_bytes)

    def _compare(self, committed: pb.CommitPushResponse) -> None:
        """Refuse a key that belongs to other content; the server cannot know what we hold.

        The source is read and digested for it. An iterable may be used up: whatever comes out,
        nothing is sent of it any more.
        """
        key = self._options.get("idempotency_key")
        if not key:
            return  # Made for this push, so it is ours.
        done: list[Done] = []
        for shard in self._source.shards:
            if self._sending.error is not None:
                raise self._sending.error
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

    def _content_digest(self, done: list[Done]) -> str:
        if self._source.delta is not None:
            return self._source.delta.content_digest
        layout = self._source.layout
        if layout is not None:
            held = {tensors[0].shard: digests for tensors, digests in done if tensors}
            ordered = [d for shard in range(len(layout.shards)) for d in held.get(shard, ())]
            if len(ordered) == len(layout.tensors):
                # The layout knows from the push before what stands beside the digests.
                return Manifest(layout, tuple(ordered)).content_digest
        return content_digest(
            (tensor.name, tensor.dtype, tensor.shape, tensor_digest)
            for tensors, digests in done
            for tensor, tensor_digest in zip(tensors, digests, strict=True)
        )

    def _commit(self) -> pb.CommitPushResponse:
        done = self._done()
        if not done:
            raise refuse(Reason.LAYOUT_INVALID, "the source gave no tensor; push at least one")
        digest = self._content_digest(done)
        self._commit_asked = True
        reply = self._ask.commit(self._push_id, digest, len(done))
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
            way_reason=self._same_host.way_reason,
        )

    def _clean_up(self, error: BaseException) -> None:
        lost = isinstance(error, (UnavailableError, DeadlineError)) or (
            isinstance(error, AbortedError) and error.reason is Reason.CANCELLED
        )
        if lost and (self._commit_asked or self._options.get("idempotency_key")):
            return  # It may be committed, or be taken up again under its key.
        if not self._push_id:
            return
        kept = self._ask.abort(self._push_id)
        if kept is None:
            self.state = "the push was dropped, and no version was made"
        elif kept.reason is Reason.VERSION_IN_USE:
            self.state = kept.message
