"""The same-host hand-off of a push: tried where it can be, and what it leaves over is sent."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.addresses import is_private
from weightsync_client.errors import refuse, typed_errors
from weightsync_client.push_reasons import Streamed, Way
from weightsync_client.transport import messages
from weightsync_client.transport.shm_writer import ShmWriter
from weightsync_client.transport.stream import StreamConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.model.manifest import TensorEntry
    from weightsync_client.options import PushOptions
    from weightsync_client.rpc.channels import Link
    from weightsync_client.rpc.retry import RetryingCalls
    from weightsync_client.source.shards import ByteSink
    from weightsync_client.source.source import Source

__all__ = ["ShmTransport", "why_streamed"]


def why_streamed(address: str, source: Source, options: PushOptions) -> Streamed | None:
    """Return why a push cannot ask for the hand-off; None: it can."""
    if options.get("same_host", "auto") == "never":
        return Streamed.OFF
    if not is_private(address):
        return Streamed.OTHER_HOST
    if source.delta is not None:
        return Streamed.DELTA
    return Streamed.ITERABLE if source.layout is None else None


class ShmTransport:
    """What one push hands over; `run` may be called again after `reset`.

    Attributes:
        reason: Why bytes are sent over the link; empty: none are.

    Args:
        link: To the server.
        ask: Sends unary calls of the push.
        source: What is pushed.
        reason: Why the hand-off is not even tried; None: it is.
        keeper: Gets the bytes of every tensor as they are digested.
        on_bytes: Called from writing threads with the size of every piece.
        collects: Whether the server may copy what lies on a GPU.
    """

    def __init__(
        self,
        link: Link,
        ask: RetryingCalls,
        source: Source,
        reason: Streamed | None,
        keeper: ByteSink | None,
        on_bytes: Callable[[int], None],
        *,
        collects: bool = True,
    ) -> None:
        self._link = link
        self._ask = ask
        self._source = source
        self._tried = reason is None
        self._keeper = keeper
        self._on_bytes = on_bytes
        self._collects = collects
        self.reason: Streamed | str = reason or ""
        self.reset()

    def reset(self) -> None:
        """Forget what was handed over, for a push that begins again."""
        facts = self._source, self._keeper, self._on_bytes
        self._work = ShmWriter(*facts, collects=self._collects)

    def give_up(self, reason: Streamed) -> None:
        """Hand nothing over any more."""
        self._tried, self.reason = False, reason

    def cancel(self) -> None:
        """End it from another thread."""
        self._work.cancel()

    @property
    def way(self) -> Way:
        """How the bytes, or some of them, went."""
        return Way.SAME_HOST if self.done else Way.STREAM

    @property
    def way_reason(self) -> Streamed | str:
        """Why the bytes, or some of them, did not go the fastest way; empty: they did."""
        return self.reason or (Streamed.SEVERAL_GPUS if self._work.several_gpus else "")

    @property
    def done(self) -> dict[int, tuple[tuple[TensorEntry, ...], list[bytes]]]:
        """Tensors and digests of the shards that were handed over, by index."""
        return self._work.done

    @property
    def copied(self) -> bool:
        """The server has copied all from GPUs itself."""
        return not self.reason and self.done.keys() == self._work.copied != set()

    def run(self, reply: pb.BeginPushResponse) -> dict[int, pb.ShardProgress]:
        """Hand over what can be; return what the server holds of each shard, for the rest.

        Raises:
            ClientError: The push has failed.
        """
        held = {progress.shard: progress for progress in reply.shards}
        if not self._tried:
            return held
        if not reply.HasField("same_host_offer"):
            self.reason = Streamed.NOT_OFFERED
            return held
        begun = frozenset(index for index, shard in held.items() if shard.received_bytes)
        self.reason = Streamed.RESUMED if begun else ""
        try:
            if not reply.layout_known:
                self._tell_layout(reply.push_id)
            self._work.run(reply.same_host_offer, begun)
        except (OSError, WeightSyncError) as error:
            if not self._work.cancelled:
                return self._left(reply.push_id, error)
        return held

    def _tell_layout(self, push_id: str) -> None:
        lane = StreamConnection(self._link, "")
        try:
            parts = (messages.layout_messages(shard) for shard in self._source.shards)
            told = itertools.chain([messages.join_message(push_id)], *parts)
            error = lane.carry(message for message in told)
        finally:
            lane.close()
        if error is not None:
            raise error

    def _left(self, push_id: str, error: OSError | WeightSyncError) -> dict[int, pb.ShardProgress]:
        refused = isinstance(error, WeightSyncError)
        self.reason = Streamed.REFUSED if refused else Streamed.UNREACHABLE
        held = self._ask.get(push_id)
        if held.durability == pb.DURABILITY_FAILED:
            with typed_errors():
                raise error if refused else refuse(Reason.PUSH_ABORTED, held.error)
        return {progress.shard: progress for progress in held.shards}
