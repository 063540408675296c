"""One PushWeights stream: the call, and the iterator that gRPC takes its messages from."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import grpc

from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import (
    ClientError,
    InvalidError,
    cancelled_error,
    from_rpc,
    passing,
    refuse,
)
from weightsync_client.source.tensors import Scratch
from weightsync_client.transport.messages import Message, serialize

if TYPE_CHECKING:
    from weightsync_client.rpc.channels import Link

__all__ = ["RequestIterator", "StreamConnection"]

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

    Once `close` returned, no message is being made and none will be: the source is not in use.

    Attributes:
        exhausted: True when every message was taken.
        error: What reading the source raised.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._lock = threading.Lock()
        self._closed = False
        self.exhausted = False
        self.error: BaseException | None = None

    def __next__(self) -> Message:
        """Make the next message."""
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

    Args:
        link: To the server.
        address: Of one of its data ports; once that fails, the lane goes on over the server's own
            address. Empty: that from the beginning.

    Attributes:
        scratch: Host memory for device tensors of this lane.
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
        return refuse(Reason.SERVER_AWAY, f"a data port is not that of this server: {error}")

    def send(self, feed: RequestIterator) -> pb.PushWeightsResponse:
        """Send what the feed gives and return the answer, which acknowledges every byte.

        Raises:
            ClientError: The stream ended otherwise.
        """
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
        """End the present stream and refuse new ones."""
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
