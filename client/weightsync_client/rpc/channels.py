"""Channels to a server and the arguments that every call gets."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from weightsync import __version__
from weightsync.wire.grpc_channels import CLIENT_KEEPALIVE, is_private
from weightsync_client.access import Access
from weightsync_client.errors import invalid
from weightsync_client.options import DEFAULT_ADDRESS, Timeouts

#: Milliseconds until a data port that nobody answers for, as behind a firewall, is given up.
_REACH_MS = 3000
#: gRPC's default of 4 MiB and room for the fields around the largest chunk.
MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)

_URLS = ("http://", "https://", "grpc://", "grpcs://")
_MAX_PORT = 65535
_DEFAULT_PORT = DEFAULT_ADDRESS.rpartition(":")[2]
#: What may come before HOST:PORT; targets of other schemes need no port.
_SCHEME = re.compile(r"(dns:(//[^/]*/)?|ipv4:|ipv6:)")

_Options = list[tuple[str, str | int]]
_OPTIONS: _Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *CLIENT_KEEPALIVE,
    ("grpc.http2.write_buffer_size", 4 << 20),
    ("grpc.primary_user_agent", f"weightsync-client/{__version__}"),
    # Without it, gRPC lets channels of one process share a connection: a stream of bytes would
    # hold up the calls beside it, and several streams would be one.
    ("grpc.use_local_subchannel_pool", 1),
    # A link that broke is tried again within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def current_span() -> str:
    """Return what names the caller's span, as W3C Trace Context writes it; "": there is none.

    OpenTelemetry is asked only where the program has imported it.
    """
    # It is there already, without its functions, while another thread imports it.
    get = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if get is None:
        return ""
    found = get().get_span_context()
    if not found.is_valid:
        return ""
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


@dataclass(frozen=True)
class Link:
    """Where the server is and how to speak with it; `address` is HOST:PORT or unix:PATH."""

    address: str
    access: Access = field(default_factory=Access)
    timeouts: Timeouts = field(default_factory=Timeouts)
    _credentials: grpc.ChannelCredentials | None = field(default=None, repr=False, init=False)

    def __post_init__(self) -> None:
        if not self.address:
            raise invalid("the server address is empty; use HOST:PORT or unix:PATH")
        if self.address.startswith(_URLS):
            raise invalid(
                f"the server address is {self.address!r}, a URL; use HOST:PORT without "
                f"{self.address.partition('://')[0]}://, or unix:PATH",
            )
        if not self.address.startswith("unix:"):
            self._check_port()
            object.__setattr__(self, "_credentials", self.access.channel_credentials())
        self._protection(self.address)

    def _check_port(self) -> None:
        place = _SCHEME.sub("", self.address, count=1)
        host, _, port = place.rpartition(":")
        wrong = ""
        if "://" not in place and (":" not in place or not port or port.endswith("]")):
            wrong = "which has no port"
        elif ":" in host and "/" not in host and not host.startswith("["):
            wrong = "but an IPv6 address stands in [ ] before its port"
        elif port.isdecimal() and int(port[:30]) > _MAX_PORT:
            wrong = f"but ports end at {_MAX_PORT}"
        if wrong:
            raise invalid(
                f"the server address is {self.address!r}, {wrong}; use HOST:PORT "
                f"(weightsync-server listens on port {_DEFAULT_PORT} by default), or unix:PATH",
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call, with the token and the span of this moment."""
        token, span = self.access.bearer(), current_span()
        found = (("authorization", f"Bearer {token}"), ("traceparent", span))
        return tuple(each for each, there in zip(found, (token, span), strict=True) if there)

    def channel(self, address: str = "") -> grpc.Channel:
        """Open a channel with a connection of its own, to this server or one of its data ports."""
        target = address or self.address
        credentials, options = self._protection(target)
        if address:
            options = [*options, ("grpc.min_reconnect_backoff_ms", _REACH_MS)]
        if credentials is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, credentials, options)

    def endpoints(self, advertised: Sequence[str]) -> list[str]:
        """Return the data ports that BeginPush told, as this client dials them."""
        if self.address.startswith("unix:"):
            return [one for one in advertised if one.startswith("unix:")]
        host = self.address.rpartition(":")[0]
        return [f"{host}{one}" for one in advertised if one.startswith(":")]

    def aio_channel(self) -> grpc.aio.Channel:
        """Open an asyncio channel; needs a running event loop."""
        credentials, options = self._protection(self.address)
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, credentials, options)

    def _protection(self, target: str) -> tuple[grpc.ChannelCredentials | None, _Options]:
        """Return credentials (None: plain text) and options for a target.

        Raises REQUEST_INVALID if a token would leave in plain text.
        """
        if target.startswith("unix:"):
            return None, _OPTIONS
        private = is_private(target)
        if self._credentials is None and not private and self.access.bearer():
            raise invalid(
                f"a token would go to {target} in plain text; set WEIGHTSYNC_TLS_CA (tls_ca) to "
                "the CA of the server's certificate, or use 127.0.0.1 or unix:PATH",
            )
        # Through a proxy named by http_proxy, plain text to this host would leave it.
        return self._credentials, [*_OPTIONS, ("grpc.enable_http_proxy", 0 if private else 1)]
