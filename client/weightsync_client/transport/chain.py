"""The transports of a push, the fastest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync_client.transport.grpc_transport import GrpcTransport
from weightsync_client.transport.shm_transport import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_client.options import PushOptions
    from weightsync_client.push_reasons import Streamed
    from weightsync_client.rpc.channels import Link
    from weightsync_client.rpc.retry import RetryingCalls
    from weightsync_client.source.shards import ByteSink
    from weightsync_client.source.source import Source
    from weightsync_client.transport.protocol import Transport

__all__ = ["TransportChain"]


@dataclass(frozen=True)
class TransportChain:
    """Makes the transports of each attempt of one push.

    Attributes:
        link: To the server.
        calls: Sends unary calls of the push.
        source: What is sent.
        options: Of the caller.
        sink: Gets the bytes of every tensor as they are digested.
        on_bytes: Called with the size of every piece that is sent, from any thread.
        on_source_free: Called once nothing is read from the caller's tensors any more.
    """

    link: Link
    calls: RetryingCalls
    source: Source
    options: PushOptions
    sink: ByteSink | None
    on_bytes: Callable[[int], None]
    on_source_free: Callable[[], None]

    def make(self, streamed: Streamed | None) -> list[Transport]:
        """Return the transports of one attempt, in the order in which they send.

        Args:
            streamed: Why everything goes over the link; None: the fastest way is tried first.
        """
        stream = GrpcTransport(
            self.link,
            self.calls,
            self.source,
            self.options.get("streams", 1),
            self.sink.keep if self.sink else None,
            self.on_bytes,
            self.on_source_free,
        )
        if streamed is not None:
            return [stream]
        collects = self.options.get("same_host", "auto") == "auto"
        facts = self.link, self.calls, self.source, self.sink, self.on_bytes
        return [ShmTransport(*facts, collects=collects), stream]
