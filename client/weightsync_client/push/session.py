"""A push: it is opened, its shards are handed over or sent, and then it is committed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from weightsync.errors import Reason
from weightsync.model.digest import content_digest
from weightsync.model.manifest import Manifest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import (
    AbortedError,
    ClientError,
    DeadlineError,
    UnavailableError,
    cancelled_error,
    refuse,
)
from weightsync_client.options import CHUNK_BYTES, PushOptions
from weightsync_client.push_reasons import Streamed
from weightsync_client.rpc.retry import RetryingCalls
from weightsync_client.source.shards import ByteSink, Shard
from weightsync_client.source.source import Source
from weightsync_client.source.tensors import Scratch
from weightsync_client.transport import messages
from weightsync_client.transport.grpc_transport import GrpcTransport
from weightsync_client.transport.messages import ShardDigester
from weightsync_client.transport.protocol import OpenedPush, Sent, ShardDigests, Transport
from weightsync_client.transport.shm_transport import ShmTransport, why_streamed
from weightsync_client.types import PushResult

logger = logging.getLogger(__name__)


class PushHandle:
    """A push that runs in the background.

    Attributes:
        source_free: Done when the source may be changed: the server holds every byte, or all that
            changed was encoded, and the adapters of a PEFT model are unmerged. It fails if the push
            fails before that; they are unmerged then too.
        committed: Done when the version is committed, with its PushResult, or with the error.
    """

    def __init__(self) -> None:
        self.source_free: Future[None] = Future()
        self.committed: Future[PushResult] = Future()
        # Running futures cannot be cancelled by whoever waits for them; the push can, by `cancel`.
        self.source_free.set_running_or_notify_cancel()
        self.committed.set_running_or_notify_cancel()
        self._cancel: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], PushResult], cancel: Callable[[], None]) -> None:
        """Run the push in a thread of its own; called once, by the client."""
        self._cancel = cancel
        # No daemon: a trainer that ends after its last step does not lose that step's push.
        self._thread = threading.Thread(target=self._run, args=(run,), name="weightsync-push-run")
        self._thread.start()

    def _run(self, run: Callable[[], PushResult]) -> None:
        try:
            result = run()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            if not self.source_free.done():
                self.source_free.set_exception(error)
            self.committed.set_exception(error)
        else:
            self.committed.set_result(result)
        finally:
            # It holds the source, which may have memory of its own.
            self._cancel = lambda: None

    def cancel(self) -> None:
        """End the push; `committed` then fails with AbortedError, unless the commit came first."""
        self._cancel()

    def join(self) -> None:
        """Wait until the push has ended, well or not."""
        if self._thread is not None:
            self._thread.join()


class ByteCounter:
    """Counts the bytes of one push as they are sent; threads may share it.

    `report` is called with the bytes sent and `total`, which is 0 if not known.
    """

    def __init__(self, report: Callable[[int, int], None] | None, total: int) -> None:
        self._report = report
        self._total = total
        self._lock = threading.Lock()
        self.sent = 0

    def add(self, size: int) -> None:
        with self._lock:
            self.sent += size
            sent = self.sent
        if self._report is not None:
            self._report(sent, self._total)


class SourceRelease:
    """Tells the caller, once, that its tensors are not in use any more.

    `restore` is called right before `callback`. If `callback` is None, neither is: the caller waits
    for the end of the push. Once `done` is set, the tensors may hold other weights.
    """

    def __init__(
        self, callback: Callable[[], None] | None, restore: Callable[[], None] = lambda: None
    ) -> None:
        self._callback = callback
        self._restore = restore
        self.done = False

    def __call__(self) -> None:
        if self._callback is not None and not self.done:
            self.done = True
            self._restore()
            self._callback()


NOTHING_SENT = "nothing was sent, and no version was made"
_UNKNOWN = (
    "`weightsync versions` shows whether the version is committed, and `weightsync status` "
    "whether the push is still open"
)
# A server that restarted may know less of a push: none of it with memory://, else at most 64 MiB of
# each shard less.
# What was left open by another process of ours may be sent in place of written.
_FORGOTTEN = frozenset({Reason.PUSH_UNKNOWN, Reason.PUSH_INCOMPLETE, Reason.WRITER_LEFT})
# Of several processes all begin again after a restart of the server, and meet under their key.
_FORGOTTEN_BY_ALL = frozenset({Reason.PUSH_UNKNOWN, Reason.PUSH_INCOMPLETE})


class PushSession:
    """One push; `run` is called once.

    Attributes:
        joined: The version had been committed before, under this push's key: nothing was sent.
        state: What is to be said of it should it be interrupted now.
        base_version: Whose other tensors a partial push of several processes keeps; 0: none.
        sent: What the latest attempt to send did.
        sending_s: How long that took.
    """

    def __init__(
        self,
        calls: RetryingCalls,
        request: pb.BeginPushRequest,
        source: Source,
        options: PushOptions,
        release: SourceRelease,
        sink: ByteSink | None = None,
    ) -> None:
        self._calls = calls
        self._request = request
        self._source, self._options, self._sink = source, options, sink
        self._chunk_bytes = options.get("chunk_bytes", CHUNK_BYTES)
        self._release = release
        self._counter = ByteCounter(options.get("on_progress"), source.size)
        self._transports: Sequence[Transport] = ()
        self._push_id = ""
        self._commit_asked = False
        self.joined = False
        self.base_version = 0
        self.state = NOTHING_SENT
        self.sent = Sent(reason=why_streamed(calls.link.address, source, options))
        self.sending_s = 0.0

    @property
    def digests(self) -> dict[str, bytes]:
        return {
            tensor.name: digest
            for tensors, digests in self.sent.shards.values()
            for tensor, digest in zip(tensors, digests, strict=True)
        }

    # The whole of it.

    def run(self) -> PushResult:
        started = time.monotonic()
        restarts = 0
        streamed = self.sent.reason
        while True:
            try:
                reply = self._run_once(streamed)
            except ClientError as error:
                restarts += 1
                if restarts > 3 or not self._may_restart(error):
                    self._clean_up(error)
                    raise
                if error.reason is Reason.WRITER_LEFT:
                    streamed = Streamed.WRITER_LEFT
            except BaseException as error:
                self._clean_up(error)
                raise
            else:
                self.state = f"version {reply.version} is committed"
                _tell_other_run(reply)
                return self._result(reply, time.monotonic() - started)

    def _may_restart(self, error: ClientError) -> bool:
        # Never from a source that was declared free: it may hold other weights by now.
        again = self._source.again and (self._source.delta is not None or not self._release.done)
        # What else fails it for one of several processes, the others have been told as well.
        forgotten = _FORGOTTEN if self._source.writer is None else _FORGOTTEN_BY_ALL
        return again and error.reason in forgotten and not self._calls.stop.is_set()

    def cancel(self) -> None:
        """End the push from another thread; `run` then raises AbortedError."""
        # Also should it be about to begin again.
        self._calls.stop.set()
        for transport in self._transports:
            transport.cancel()
        if self._commit_asked and self._push_id and self._source.writer is not None:
            # It may wait for other processes, for as long as a commit may take. Who cancels does
            # not wait for the answer: it may be an event loop.
            threading.Thread(
                target=self._calls.abort,
                args=(self._push_id, "it was cancelled"),
                name="abort push",
                daemon=True,
            ).start()

    def _check_cancelled(self) -> None:
        if self._calls.stop.is_set():
            raise cancelled_error()

    def _run_once(self, streamed: Streamed | None) -> pb.CommitPushResponse:
        self.state = _UNKNOWN
        self.sent = Sent(reason=streamed)
        reply = self._calls.begin(self._request, self._source.sizes)
        self.joined = reply.HasField("committed")
        self.base_version = reply.base_version
        # What is committed is nothing to abort.
        self._push_id = "" if self.joined else reply.push_id
        # Should this have to begin again, it is for the same version and under the same epoch.
        self._request.epoch_assigned |= not self._request.epoch
        self._request.version, self._request.epoch = reply.version, reply.epoch
        if reply.base_version:
            self._request.base_version = reply.base_version
            self._request.base_content_digest = reply.base_content_digest
        if self.joined:
            self.state = f"version {reply.version} was already committed under this key"
            self._compare(reply.committed)
        else:
            self._chunk_bytes = min(self._chunk_bytes, reply.max_chunk_bytes or self._chunk_bytes)
            started = time.monotonic()
            number = self._request.writer
            self._send_all(OpenedPush.from_reply(reply, self._chunk_bytes, number))
            self.sending_s = time.monotonic() - started
        self._release()
        return reply.committed if self.joined else self._commit()

    def _send_all(self, opened: OpenedPush) -> None:
        self._transports = self._transports_for(self.sent.reason)
        shards = self._source.shards
        for transport in self._transports:
            self._check_cancelled()
            sent = transport.send(opened, shards)
            self.sent = self.sent.plus(sent)
            if sent.progress is not None:
                opened = opened._replace(progress=sent.progress)
            if isinstance(shards, list):
                shards = [shard for shard in shards if shard.index not in sent.shards]
                if not shards:
                    break
            elif sent.left:
                shards = itertools.chain(sent.left, shards)
            elif sent.reason is None:
                break
        self._check_cancelled()

    def _transports_for(self, streamed: Streamed | None) -> list[Transport]:
        """Return the transports of one attempt, in the order in which they send.

        `streamed` says why only the link is used; with None, the fastest way is tried first.
        """
        facts = self._calls, self._source
        stream = GrpcTransport(
            *facts,
            self._options.get("streams", 1),
            self._sink.keep if self._sink else None,
            self._counter.add,
            self._release,
        )
        if streamed is not None:
            return [stream]
        collects = self._options.get("same_host", "auto") == "auto"
        return [ShmTransport(*facts, self._sink, self._counter.add, collects=collects), stream]

    def _compare(self, committed: pb.CommitPushResponse) -> None:
        """Refuse a key that belongs to other content, by reading and digesting the source.

        An iterable may be used up by that; nothing of it is sent afterwards.
        """
        if self._source.writer is not None:
            raise refuse(
                Reason.VERSION_CONFLICT,
                f"all of this step has been pushed before, as version {committed.version}; push "
                "each step once, and give each run a key of its own",
                version=str(committed.version),
            )
        if not (key := self._options.get("idempotency_key")):
            return  # Made for this push, so it is ours.
        done: list[ShardDigests] = []
        for shard in self._source.shards:
            self._check_cancelled()
            # What a delta holds was compared, and digested, as it was made.
            if self._source.delta is None:
                done.append(ShardDigests(shard.tensors, self._digested(shard)))
        if self._content_digest(done) != committed.content_digest:
            raise refuse(
                Reason.VERSION_CONFLICT,
                f"the idempotency key {key!r} belongs to a push of other content, which is "
                f"version {committed.version}; choose another key",
                version=str(committed.version),
            )

    def _digested(self, shard: Shard) -> list[bytes]:
        digester, size = ShardDigester(shard), shard.entry.size
        with contextlib.closing(shard.open(Scratch())) as reader:
            # All of it counts as held by the server, so there is nothing to be sent.
            for _ in messages.shard_bytes(
                shard, reader, digester, size, self._chunk_bytes, self._counter.add
            ):
                pass
        return digester.digests

    def _content_digest(self, done: Collection[ShardDigests]) -> str:
        if self._source.delta is not None:
            return self._source.delta.content_digest
        layout = self._source.layout
        if layout is not None:
            by_shard = {tensors[0].shard: digests for tensors, digests in done if tensors}
            ordered = [d for shard in range(len(layout.shards)) for d in by_shard.get(shard, ())]
            if len(ordered) == len(layout.tensors):
                # The layout knows from the push before what stands beside the digests.
                return Manifest(layout, tuple(ordered)).content_digest
        return content_digest(
            (tensor.name, tensor.dtype, tensor.shape, tensor_digest)
            for tensors, digests in done
            for tensor, tensor_digest in zip(tensors, digests, strict=True)
        )

    def _commit(self) -> pb.CommitPushResponse:
        done = self.sent.shards.values()
        if not done:
            raise refuse(Reason.LAYOUT_INVALID, "the source gave no tensor; push at least one")
        # Of several processes none knows it.
        digest = self._content_digest(done) if self._source.writer is None else ""
        self._commit_asked = True
        self._check_cancelled()
        cast = self._source.casting.cast.total
        probes = self._options.get("probes")
        # All processes may have them, and one sends them.
        sent = probes.to_message() if probes and not self._request.writer else None
        reply = self._calls.commit(self._push_id, digest, len(done), cast, sent)
        if digest and reply.content_digest != digest:
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
            sent_bytes=self._counter.sent,
            seconds=seconds,
            dense_bytes=reply.size_bytes,
            way=self.sent.way,
            way_reason=self.sent.reason or "",
            other_run=reply.other_run,
            other_version=reply.other_version,
            runs_alternate=reply.runs_alternate,
        )

    def _clean_up(self, error: BaseException) -> None:
        lost = isinstance(error, (UnavailableError, DeadlineError)) or (
            isinstance(error, AbortedError) and error.reason is Reason.CANCELLED
        )
        key = self._options.get("idempotency_key")
        if lost and self._source.writer is None and (self._commit_asked or key):
            return  # It may be committed, or be taken up again under its key.
        if not self._push_id or self._goes_on_whole(error):
            return
        kept = self._calls.abort(self._push_id, str(error))
        if kept is None:
            self.state = "the push was dropped, and no version was made"
        elif kept.reason is Reason.VERSION_IN_USE:
            self.state = kept.message

    def _goes_on_whole(self, error: BaseException) -> bool:
        """Whether one of several processes may send its boxes whole in the same push."""
        lacking = isinstance(error, ClientError) and error.reason is Reason.BASE_MISMATCH
        joint = self._source.writer is not None and self._source.delta is not None
        return lacking and joint and not self._release.done


def _tell_other_run(reply: pb.CommitPushResponse) -> None:
    if reply.runs_alternate:
        logger.warning(
            "two trainers push: version %d is from another run, %s, between versions of this "
            "run; stop one of them, or have the right one call acquire_epoch()",
            reply.other_version,
            reply.other_run,
        )
    elif reply.other_run:
        logger.info(
            "version %d, before this one, is from another run, %s",
            reply.other_version,
            reply.other_run,
        )
