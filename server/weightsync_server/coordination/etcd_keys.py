"""A register in etcd: keys created by one transaction and read by consensus, members on leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence

import grpc

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.etcd.v3 import etcd_pb2 as pb
from weightsync_server.coordination.coordination import (
    Creation,
    MemberList,
    Membership,
    Renewal,
    check_key,
    check_prefix,
    check_value,
    not_creatable,
)
from weightsync_server.coordination.etcd_channels import EtcdChannels, EtcdStubs, refusal, refused


class EtcdLease:
    """One lease and the key on it; both are made anew when etcd has ended the lease.

    `key` is the member's key, for sentences; `path` is the key in etcd.
    """

    def __init__(
        self, channels: EtcdChannels, key: str, path: bytes, value: bytes, ttl_s: int
    ) -> None:
        self.key = key
        self._channels, self._path, self._value, self._ttl_s = channels, path, value, ttl_s
        self._id = 0

    async def renew(self) -> Renewal:
        left_s = 0
        if self._id:
            left_s = await self._channels.call(f"renewing {self.key}", self._keep_alive)
        if left_s:
            ours, free = await self._look()
            if free:
                await self._put(self._id)
            # Nobody sees this member by a key that another one has.
            return Renewal(left_s if ours or free else 0, ours)
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

        A put that was given up may be done late and move the key to a lease that nobody renews. A
        key that another member has taken is left alone.
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
                f"{self.key} was created and does not belong to a member; use another key",
            )


#: Keys of one answer: with values of 4 KB they stay far below gRPC's 4 MiB.
_PAGE = 256
#: Of one transaction, as etcd is set up by itself.
_MOST_OPERATIONS = 128
#: How long a watch lasts until another takes its place, and the pause after a fault, in seconds.
_WATCH_S, _PAUSE_S = 30.0, 0.2
#: A member of etcd without a leader ends the watch, instead of staying silent.
_LEADER = (("hasleader", "true"),)


class EtcdKeys:
    """Keeps keys below `prefix` in etcd; see `CoordinationStore` for what is promised."""

    def __init__(self, channels: EtcdChannels, url: str, prefix: str) -> None:
        self.url = url
        self._channels, self._prefix = channels, prefix

    async def create(self, key: str, value: bytes) -> Creation:
        """Create the key by a transaction that is sent again where its answer is lost.

        If the key is there by then, it writes nothing and reads what the key holds.
        """
        created = await self._create(key, value)
        if created is None:
            raise WeightSyncError(Reason.FAULT, f"{key} was created and deleted; check etcd's log")
        return created

    async def create_among(
        self, key: str, value: bytes, prefix: str, known: Collection[str]
    ) -> Creation | None:
        reach = self._all(check_prefix(prefix))
        while True:
            alive, _, revision = await self._look(prefix)
            if not alive.keys() <= set(known):
                found = await self.get(key)
                return Creation(created=False, value=found) if found is not None else None
            # Whoever has come since then has come later than that.
            same = pb.Compare(
                result=pb.Compare.COMPARE_RESULT_LESS,
                target=pb.Compare.COMPARE_TARGET_CREATE,
                key=reach.key,
                range_end=reach.range_end,
                create_revision=revision + 1,
            )
            if (created := await self._create(key, value, same)) is not None:
                return created

    async def members(self, prefix: str) -> MemberList:
        alive, permanent, _ = await self._look(prefix)
        return MemberList(alive, permanent)

    async def get(self, key: str) -> bytes | None:
        found = await self._range(f"reading {key}", pb.RangeRequest(key=self._path(check_key(key))))
        return found.kvs[0].value if found.kvs else None

    async def list(self, prefix: str, start: str = "") -> dict[str, bytes]:
        return await self.list_each([prefix], start)

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        ranges = [self._all(check_prefix(prefix)) for prefix in prefixes]
        if ranges:
            ranges[0].key = max(ranges[0].key, self._path(start))
        what = f"listing {', '.join(prefixes) or 'all keys'}"
        found: dict[str, bytes] = {}
        while ranges:
            for one in ranges:
                one.limit = max(1, _PAGE // len(ranges))
            reads = [pb.RequestOp(request_range=one) for one in ranges]
            # One that only reads is answered by consensus, as a range is.
            reply = await self._change(what, pb.TxnRequest(success=reads))
            pages = [response.response_range for response in reply.responses]
            found |= {self._key(one.key): one.value for page in pages for one in page.kvs}
            ranges = [one for one, page in zip(ranges, pages, strict=True) if page.more]
            for one, page in zip(ranges, (page for page in pages if page.more), strict=True):
                one.key = page.kvs[-1].key + b"\0"
                one.revision = one.revision or reply.header.revision
        return found

    async def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(check_key(key)) for key in keys]
        for at in range(0, len(paths), _MOST_OPERATIONS):
            request = pb.TxnRequest(
                success=[
                    pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=path))
                    for path in paths[at : at + _MOST_OPERATIONS]
                ]
            )
            await self._change(f"removing {len(keys)} keys", request)

    async def watch(self, prefix: str) -> AsyncGenerator[frozenset[str], None]:
        """Yield changes as etcd tells them.

        Each stream ends by its deadline, or earlier by a fault, and another begins, so that
        time-outs, faults and the backstop take one way.
        """
        reach, what = self._all(check_prefix(prefix)), f"watching {prefix or 'all keys'}"
        create = pb.WatchCreateRequest(key=reach.key, range_end=reach.range_end)
        request = pb.WatchRequest(create_request=create)
        while True:
            stubs, begun, watched = self._channels.stubs, clock.monotonic(), False
            call = stubs.watch.Watch(timeout=_WATCH_S, metadata=_LEADER)
            try:
                await call.write(request)
                async for news in call:
                    if news.canceled:
                        raise refused(Reason.PERMISSION_DENIED, what, news.cancel_reason)
                    watched = True
                    # What changed before the watch was there is read by the caller after this.
                    if news.created or news.events:
                        yield frozenset(self._key(event.kv.key) for event in news.events)
            except grpc.aio.AioRpcError as error:
                if final := refusal(error, what):
                    raise final from error
            except asyncio.InvalidStateError:
                pass  # no connection, so that the call ended before its request was written
            finally:
                call.cancel()
            early = clock.monotonic() < begun + _WATCH_S / 2
            if early or not watched:
                self._channels.leave(stubs)
            if early:
                # A fault; after a deadline, whoever waits for a decision would wait for this, too.
                await asyncio.sleep(_PAUSE_S)

    async def member(self, key: str, value: bytes, ttl_s: int) -> Membership:
        check_value(check_key(key), value)
        lease = EtcdLease(self._channels, key, self._path(key), value, ttl_s)
        return await Membership(lease, ttl_s).start()

    async def close(self) -> None:
        await self._channels.close()

    async def _create(self, key: str, value: bytes, *also: pb.Compare) -> Creation | None:
        """Create a key where `also` holds; None: it does not."""
        check_value(check_key(key), value)
        path = self._path(key)
        absent = pb.Compare(
            result=pb.Compare.COMPARE_RESULT_EQUAL,
            target=pb.Compare.COMPARE_TARGET_CREATE,
            key=path,
            create_revision=0,
        )
        request = pb.TxnRequest(
            compare=[absent, *also],
            success=[pb.RequestOp(request_put=pb.PutRequest(key=path, value=value))],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=path))],
        )
        reply = await self._change(f"creating {key}", request)
        if reply.succeeded:
            return Creation(created=True, value=value)
        found = reply.responses[0].response_range.kvs
        if not found:
            return None
        if found[0].lease:
            raise not_creatable(key)
        return Creation(created=False, value=found[0].value)

    async def _look(self, prefix: str) -> tuple[dict[str, bytes], frozenset[str], int]:
        """Return who is there, keys of nobody, and the revision at which that was so."""
        reach, alive, permanent = self._all(check_prefix(prefix)), {}, set()
        reach.limit = _PAGE
        while True:
            page = await self._range(f"listing {prefix or 'all keys'}", reach)
            for one in page.kvs:
                if one.lease:
                    alive[self._key(one.key)] = one.value
                else:
                    permanent.add(self._key(one.key))
            reach.revision = reach.revision or page.header.revision
            if not page.more:
                return alive, frozenset(permanent), reach.revision
            reach.key = page.kvs[-1].key + b"\0"

    async def _range(self, what: str, request: pb.RangeRequest) -> pb.RangeResponse:
        return await self._channels.call(
            what, lambda stubs, limit: stubs.kv.Range(request, timeout=limit)
        )

    async def _change(self, what: str, request: pb.TxnRequest) -> pb.TxnResponse:
        return await self._channels.call(
            what, lambda stubs, limit: stubs.kv.Txn(request, timeout=limit)
        )

    def _all(self, prefix: str) -> pb.RangeRequest:
        start = self._path(prefix)
        # `0` follows `/`, in which every start ends.
        return pb.RangeRequest(key=start, range_end=start[:-1] + b"0")

    def _path(self, key: str) -> bytes:
        return f"/{self._prefix}/{key}".encode()

    def _key(self, path: bytes) -> str:
        # What is no text names nothing of ours.
        return path.decode(errors="replace").removeprefix(f"/{self._prefix}/")
