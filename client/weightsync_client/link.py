"""Channels to a server and the arguments that every call gets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import grpc

from weightsync import __version__
from weightsync.errors import Reason
from weightsync_client.errors import refuse
from weightsync_client.options import Timeouts

__all__ = ["MAX_MESSAGE_BYTES", "Link"]

#: gRPC's default of 4 MiB and room for the fields around the largest chunk.
MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)

_SERVICE = "weightsync.v1.WeightSync"
_STREAMS = {"PushWeights", "PullWeights", "WatchVersions"}

# Every unary call is idempotent on its own or by its key, so a lost answer may be asked for again.
# Streams are taken up by this client where they stopped, never replayed from the start.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": _SERVICE}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            },
            {"name": [{"service": _SERVICE, "method": method} for method in sorted(_STREAMS)]},
        ]
    }
)

_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.write_buffer_size", 4 << 20),
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.primary_user_agent", f"weightsync-client/{__version__}"),
    # Without it, gRPC lets channels of one process share a connection: a stream of bytes would
    # hold up the calls beside it, and several streams would be one.
    ("grpc.use_local_subchannel_pool", 1),
    # A link that broke is tried again within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(frozen=True)
class Link:
    """Where the server is and how to speak with it.

    Attributes:
        address: HOST:PORT or unix:PATH.
        token: Sent with every call as a bearer token; never shown.
        credentials: TLS; None: plain text.
        timeouts: Of all calls.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if not self.address:
            raise refuse(
                Reason.REQUEST_INVALID, "the server address is empty; use HOST:PORT or unix:PATH"
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def channel(self, address: str = "") -> grpc.Channel:
        """Open a channel with a connection of its own, to this server or one of its data ports."""
        target = address or self.address
        if self.credentials is None:
            return grpc.insecure_channel(target, _OPTIONS)
        return grpc.secure_channel(target, self.credentials, _OPTIONS)

    def aio_channel(self) -> grpc.aio.Channel:
        """Open an asyncio channel; needs a running event loop."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, _OPTIONS)
        return grpc.aio.secure_channel(self.address, self.credentials, _OPTIONS)
