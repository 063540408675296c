"""Calls to etcd, tried again at the next of its members until one answers or the time is over."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, TypeVar

import grpc

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.etcd.v3 import etcd_pb2_grpc
from weightsync.wire.keepalive import keepalive
from weightsync_server.register.etcd_tls import EtcdTls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["EtcdChannels", "EtcdStubs", "refusal", "refused"]

_T = TypeVar("_T")

_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.enable_http_proxy", 0),
    # A member that is frozen still has its connection. etcd hangs up on whoever pings more often
    # than every 5 s, or without a call.
    *keepalive(6, 2),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
#: Of the first try, in seconds; each later one may take twice as long, for a disk that is slow.
_FIRST_TRY_S = 1.0
_PAUSE_S = 0.1
#: Answers that another try cannot change.
_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION: Reason.FAULT,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.FAULT,
    grpc.StatusCode.NOT_FOUND: Reason.FAULT,
    grpc.StatusCode.OUT_OF_RANGE: Reason.FAULT,
    grpc.StatusCode.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED: Reason.NOT_SUPPORTED,
}
#: What etcd answers, as if the request were wrong, to a client that shows no certificate.
_NOBODY = "user name is empty"
_REMEDIES = {
    Reason.PERMISSION_DENIED: "give this client's user in etcd the rights that docs/security.md "
    "lists",
    Reason.UNAUTHENTICATED: "use a client certificate whose common name is a user of etcd with the "
    "rights that docs/security.md lists",
}


class EtcdStubs:
    """The services of etcd over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.kv: etcd_pb2_grpc.KVAsyncStub = etcd_pb2_grpc.KVStub(channel)
        self.lease: etcd_pb2_grpc.LeaseAsyncStub = etcd_pb2_grpc.LeaseStub(channel)
        self.watch: etcd_pb2_grpc.WatchAsyncStub = etcd_pb2_grpc.WatchStub(channel)


class EtcdChannels:
    """Every call is answered, refused or given up within `timeout_s`.

    Each member has a channel, and calls stay with one member until it fails. A channel that takes
    turns over all of them goes on sending its share to a member that is frozen.

    Args:
        addresses: HOST:PORT of each member.
        timeout_s: The longest time of a call with all tries, in seconds.
        secure: Use TLS.
        tls: Its files; None: this host's authorities and no client certificate.

    Raises:
        WeightSyncError: REQUEST_INVALID; the files cannot be used.
    """

    def __init__(
        self, addresses: Sequence[str], timeout_s: float, *, secure: bool, tls: EtcdTls | None
    ) -> None:
        self._timeout_s = timeout_s
        if secure:
            credentials = (tls or EtcdTls()).credentials()
            channels = [grpc.aio.secure_channel(one, credentials, _OPTIONS) for one in addresses]
        else:
            channels = [grpc.aio.insecure_channel(one, _OPTIONS) for one in addresses]
        # Not all processes of a fleet begin at the same member.
        random.shuffle(channels)
        self._stubs = [EtcdStubs(channel) for channel in channels]

    async def call(self, what: str, invoke: Callable[[EtcdStubs, float], Awaitable[_T]]) -> _T:
        """Return what a call answers that may be done more than once.

        Args:
            what: What it is for, as the subject of a sentence.
            invoke: Sends it, given the services and its longest time in seconds.

        Raises:
            WeightSyncError: DEADLINE_EXCEEDED: nobody answered, and it may have been done or yet
                be done. PERMISSION_DENIED, UNAUTHENTICATED, NOT_SUPPORTED, FAULT: it was refused.
        """
        end = clock.monotonic() + self._timeout_s
        longest, last = _FIRST_TRY_S, ""
        while (left := end - clock.monotonic()) > 0:
            stubs = self.stubs
            try:
                return await invoke(stubs, min(longest, left))
            except grpc.aio.AioRpcError as error:
                if final := refusal(error, what):
                    raise final from error
                last = error.details() or error.code().name
            self.leave(stubs)
            longest *= 2
            await asyncio.sleep(_PAUSE_S)
        raise WeightSyncError(
            Reason.DEADLINE_EXCEEDED,
            f"{what} was not answered by etcd within {self._timeout_s:g} s ({last}), so that it "
            "may be done or not; see that most of etcd's own members run and that addresses and "
            "TLS fit, then call again",
        )

    @property
    def stubs(self) -> EtcdStubs:
        """The services of the present member."""
        return self._stubs[0]

    def leave(self, stubs: EtcdStubs) -> None:
        """Go on to the next member, unless another call has already left this one."""
        if stubs is self.stubs:
            self._stubs.append(self._stubs.pop(0))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(stubs.channel.close() for stubs in self._stubs))


def refusal(error: grpc.aio.AioRpcError, what: str) -> WeightSyncError | None:
    """Return what an error is that no other try can change; None: it is worth another.

    Args:
        error: Of a call.
        what: What it was for, as the subject of a sentence.
    """
    reason = _REFUSALS.get(error.code())
    return refused(reason, what, error.details() or "") if reason else None


def refused(reason: Reason, what: str, why: str) -> WeightSyncError:
    """Return the refusal of a call, with etcd's own words for it."""
    reason = Reason.UNAUTHENTICATED if _NOBODY in why else reason
    remedy = _REMEDIES.get(reason, "see etcd's log")
    return WeightSyncError(reason, f"{what} was refused by etcd: {why}; {remedy}")
