"""The same-host hand-off of a push: tried where it can be, and what it leaves over is sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.grpc_channels import is_private
from weightsync_client.errors import refuse, typed_errors
from weightsync_client.push_reasons import Streamed
from weightsync_client.source.slice_shards import SliceShard
from weightsync_client.transport import messages
from weightsync_client.transport.grpc_transport import StreamConnection
from weightsync_client.transport.protocol import Sent, ShardDigests
from weightsync_client.transport.shm_writer import ShmWriter

if TYPE_CHECKING:
    from weightsync_client.options import PushOptions
    from weightsync_client.rpc.retry import RetryingCalls
    from weightsync_client.source.shards import ByteSink, Shard
    from weightsync_client.source.source import Source
    from weightsync_client.transport.protocol import OpenedPush


def why_streamed(address: str, source: Source, options: PushOptions) -> Streamed | None:
    if options.get("same_host", "auto") == "never":
        return Streamed.OFF
    if not is_private(address):
        return Streamed.OTHER_HOST
    if source.delta is not None:
        return Streamed.DELTA
    return Streamed.ITERABLE if source.layout is None else None


class ShmTransport:
    """A `Transport` into memory that the server on the same host grants for one push.

    The layout of `source` is known. `sink` gets the bytes of every tensor as they are digested, and
    `on_bytes` is called from writing threads. With `collects` the server may copy from GPUs.
    """

    def __init__(
        self,
        calls: RetryingCalls,
        source: Source,
        sink: ByteSink | None,
        on_bytes: Callable[[int], None],
        *,
        collects: bool = True,
    ) -> None:
        self._link = calls.link
        self._calls = calls
        self._source = source
        self._writer = ShmWriter(source, sink, on_bytes, collects=collects)

    def cancel(self) -> None:
        self._writer.cancel()

    def send(self, opened: OpenedPush, shards: Iterable[Shard]) -> Sent:
        """What was begun over the link is left to it."""
        if opened.offer is None:
            return Sent(reason=Streamed.NOT_OFFERED)
        begun = {index for index, shard in opened.progress.items() if shard.received_bytes}
        flow = self._source.flow
        if flow is not None and begun:
            # Its tensors come in their order, whatever the server has of them.
            return Sent(reason=Streamed.RESUMED)
        try:
            if not opened.layout_known or self._source.writer is not None:
                self._declare(opened)
            done = self._writer.done.keys() | begun
            if flow is not None:
                self._writer.run_in_turn(opened.offer, iter(shards))
            else:
                self._writer.run(opened.offer, [s for s in shards if s.index not in done])
        except (OSError, WeightSyncError) as error:
            if flow is not None and flow.failed:
                raise
            if not self._writer.cancelled:
                return self._left_over(opened.push_id, error)
        return self._writer.sent(Streamed.RESUMED if begun else None)

    def _declare(self, opened: OpenedPush) -> None:
        lane = StreamConnection(self._link, "")
        done: dict[int, ShardDigests] = {}
        try:
            parts = (_declared(s, opened, done) for s in self._source.outline)
            join = messages.join_message(opened.push_id, opened.writer)
            error = lane.carry(message for message in itertools.chain([join], *parts))
        finally:
            lane.close()
        if error is not None:
            raise error
        self._writer.done |= done

    def _left_over(self, push_id: str, error: OSError | WeightSyncError) -> Sent:
        refused = isinstance(error, WeightSyncError)
        reply = self._calls.get(push_id)
        if reply.durability == pb.DURABILITY_FAILED:
            with typed_errors():
                raise error if refused else refuse(Reason.PUSH_ABORTED, reply.error)
        progress = {progress.shard: progress for progress in reply.shards}
        sent = self._writer.sent(Streamed.REFUSED if refused else Streamed.UNREACHABLE)
        return replace(sent, progress=progress, left=self._writer.left)


def _declared(
    shard: Shard, opened: OpenedPush, done: dict[int, ShardDigests]
) -> Iterator[messages.Message]:
    """Yield what comes before a shard's bytes, or all of one of which there is nothing to write."""
    yield from messages.declaration(shard, layout_known=opened.layout_known)
    if isinstance(shard, SliceShard) and not shard.entry.size:
        digests = [tensor_digest(b"") for _ in shard.sent]
        yield from messages.digest_messages(shard, shard.all_digests(digests))
        done[shard.index] = ShardDigests(shard.tensors, digests)
