"""Calls to etcd, tried again at the next of its members until one answers or the time is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.etcd.v3 import etcd_pb2_grpc
from weightsync.wire.grpc_channels import keepalive
from weightsync_server.auth.tls import ClientTls
from weightsync_server.coordination.coordination import check_key


@dataclass(frozen=True)
class EtcdTls(ClientTls):
    peer: str = "etcd"


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
    Reason.PERMISSION_DENIED: "give this client's user in etcd the rights that "
    "docs/how-to/bucket-and-etcd-rights.md "
    "lists",
    Reason.UNAUTHENTICATED: "use a client certificate whose common name is a user of etcd with the "
    "rights that docs/how-to/bucket-and-etcd-rights.md lists",
}


class EtcdStubs:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.kv: etcd_pb2_grpc.KVAsyncStub = etcd_pb2_grpc.KVStub(channel)
        self.lease: etcd_pb2_grpc.LeaseAsyncStub = etcd_pb2_grpc.LeaseStub(channel)
        self.watch: etcd_pb2_grpc.WatchAsyncStub = etcd_pb2_grpc.WatchStub(channel)


class EtcdChannels:
    """Every call is answered, refused or given up within `timeout_s`, with all tries.

    Each member has a channel, and calls stay with one member until it fails: a channel that takes
    turns over all goes on sending its share to a member that is frozen.
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
        """Return the answer to a call that may be sent more than once.

        `what` names it as the subject of a sentence. `invoke` sends it, within the seconds that it
        is given. After DEADLINE_EXCEEDED it may have been done, or may still be; any other error is
        a refusal.
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
            f"{what} was not answered by etcd within {self._timeout_s:g} s ({last}), so it may or "
            "may not have been done; check that a majority of etcd's members run and that "
            "addresses and TLS are right, then call again",
        )

    @property
    def stubs(self) -> EtcdStubs:
        return self._stubs[0]

    def leave(self, stubs: EtcdStubs) -> None:
        """Go on to the next member, unless another call has already left this one."""
        if stubs is self.stubs:
            self._stubs.append(self._stubs.pop(0))

    async def close(self) -> None:
        await asyncio.gather(*(stubs.channel.close() for stubs in self._stubs))


def refusal(error: grpc.aio.AioRpcError, what: str) -> WeightSyncError | None:
    """Return what an error is that no other try can change; None: it is worth another."""
    reason = _REFUSALS.get(error.code())
    return refused(reason, what, error.details() or "") if reason else None


def refused(reason: Reason, what: str, why: str) -> WeightSyncError:
    reason = Reason.UNAUTHENTICATED if _NOBODY in why else reason
    remedy = _REMEDIES.get(reason, "see etcd's log")
    return WeightSyncError(reason, f"{what} was refused by etcd: {why}; {remedy}")


_MAX_PORT = 65535


def parse_etcd_url(url: str) -> tuple[list[str], str]:
    place, _, prefix = url.partition("://")[2].partition("/")
    if "@" in place:
        # Not quoted: the sentence may end in a log.
        raise _invalid(
            "the URL of a register cannot have a user and password; use etcds:// and certificates"
        )
    addresses = place.split(",")
    for address in addresses:
        host, _, port = address.rpartition(":")
        bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
        if not host or bare or not port.isdecimal() or not 0 < int(port[:9]) <= _MAX_PORT:
            raise _invalid(
                f"{address!r} in {url!r} is not an address of etcd; use host:port, as in "
                "etcd://10.0.0.1:2379,10.0.0.2:2379/weightsync/NAME"
            )
    if len(set(addresses)) < len(addresses):
        raise _invalid(f"{url!r} names an address twice; name each member of etcd once")
    if not (prefix := prefix.rstrip("/")):
        raise _invalid(
            f"{url!r} has no prefix; end it with one that only this fleet uses: /weightsync/NAME"
        )
    return addresses, check_key(prefix)


def _invalid(sentence: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, sentence)
