"""A member in etcd: a key on a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.etcd.v3 import etcd_pb2 as pb
from weightsync_server.register.membership import Renewal

if TYPE_CHECKING:
    from weightsync_server.register.etcd_channels import EtcdChannels, EtcdStubs

__all__ = ["EtcdLease"]


class EtcdLease:
    """One lease and the key on it; both are made anew when etcd has ended the lease.

    Args:
        channels: To etcd's members.
        key: The member's key, for sentences.
        path: The key in etcd.
        value: Its value.
        ttl_s: Seconds that the lease outlives its last renewal.
    """

    def __init__(
        self, channels: EtcdChannels, key: str, path: bytes, value: bytes, ttl_s: int
    ) -> None:
        self.key = key
        self._channels, self._path, self._value, self._ttl_s = channels, path, value, ttl_s
        self._id = 0

    async def renew(self) -> Renewal:
        """Keep the lease alive, or make it, and see that the key is on it."""
        left_s = 0
        if self._id:
            left_s = await self._channels.call(f"renewing {self.key}", self._keep_alive)
        if left_s:
            ours, free = await self._look()
            if free:
                await self._put(self._id)
            return Renewal(left_s, ours)
        self._id = 0
        grant = pb.LeaseGrantRequest(ttl=self._ttl_s)
        granted = await self._channels.call(
            f"a lease for {self.key}",
            lambda stubs, limit: stubs.lease.LeaseGrant(grant, timeout=limit),
        )
        await self._put(granted.id)
        self._id = granted.id
        return Renewal(granted.ttl, kept=False)

    async def release(self) -> None:
        """End the lease and with it the key."""
        request = pb.LeaseRevokeRequest(id=self._id)
        await self._channels.call(
            f"removing {self.key}",
            lambda stubs, limit: stubs.lease.LeaseRevoke(request, timeout=limit),
        )

    async def _keep_alive(self, stubs: EtcdStubs, limit: float) -> int:
        """Return for how many seconds the lease lives; 0: it does not."""
        call = stubs.lease.LeaseKeepAlive(
            iter([pb.LeaseKeepAliveRequest(id=self._id)]), timeout=limit
        )
        left_s = 0
        async for reply in call:
            left_s = max(reply.ttl, 0)
        return left_s

    async def _look(self) -> tuple[bool, bool]:
        """Return whether the key is on the lease, and whether it is to be put there.

        A put that was given up may be done late and move the key to a lease that nobody renews.
        It is not put there again where another member took its place.
        """
        ours = pb.Compare(
            result=pb.Compare.COMPARE_RESULT_EQUAL,
            target=pb.Compare.COMPARE_TARGET_LEASE,
            key=self._path,
            lease=self._id,
        )
        read = pb.RequestOp(request_range=pb.RangeRequest(key=self._path))
        request = pb.TxnRequest(compare=[ours], failure=[read])
        reply = await self._channels.call(
            f"looking for {self.key}", lambda stubs, limit: stubs.kv.Txn(request, timeout=limit)
        )
        if reply.succeeded:
            return True, False
        found = reply.responses[0].response_range.kvs
        return False, not found or found[0].value == self._value

    async def _put(self, lease: int) -> None:
        created = [
            pb.Compare(
                result=pb.Compare.COMPARE_RESULT_GREATER,
                target=pb.Compare.COMPARE_TARGET_CREATE,
                key=self._path,
                create_revision=0,
            ),
            pb.Compare(
                result=pb.Compare.COMPARE_RESULT_EQUAL,
                target=pb.Compare.COMPARE_TARGET_LEASE,
                key=self._path,
                lease=0,
            ),
        ]
        put = pb.PutRequest(key=self._path, value=self._value, lease=lease)
        # Every number of a missing key is 0, so that only a key that was created is refused.
        request = pb.TxnRequest(compare=created, failure=[pb.RequestOp(request_put=put)])
        reply = await self._channels.call(
            f"putting {self.key}", lambda stubs, limit: stubs.kv.Txn(request, timeout=limit)
        )
        if reply.succeeded:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{self.key} was created and is no member's; use another key",
            )
