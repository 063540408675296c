"""An origin that is a server: the one that takes the pushes, or another follower of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync.wire.grpc_channels import CLIENT_KEEPALIVE, proxy_hint
from weightsync.wire.rpc_status import from_call
from weightsync_server.auth.tls import ClientTls, read_private
from weightsync_server.ops.tasks import cancel_tasks
from weightsync_server.push.parts import Push, Pushes
from weightsync_server.push.sources.grpc_stream import UploadStream
from weightsync_server.replicate.fetch_plan import Fetch
from weightsync_server.replicate.replica_settings import grpc_target, is_encrypted
from weightsync_server.store.store_records import CommitRecord

#: Above the largest chunk and the fields around it.
_MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    *CLIENT_KEEPALIVE,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
#: Seconds for a call that carries no weights, and between two tries to watch.
_CALL_S, _WATCH_AGAIN_S = 10.0, 1.0

_Message = TypeVar("_Message")


class OriginAccess(NamedTuple):
    """How another server knows that it is we, and we that it is that one.

    `url` is `grpc://HOST:PORT` or `grpcs://HOST:PORT`. The `token_file` is read again for each
    call; None: no token is sent.
    """

    url: str
    tls: ClientTls
    token_file: Path | None = None

    def channel(self) -> grpc.aio.Channel:
        target = grpc_target(self.url)
        if is_encrypted(self.url, ca=self.tls.ca is not None):
            return grpc.aio.secure_channel(target, self.tls.credentials(), _OPTIONS)
        return grpc.aio.insecure_channel(target, _OPTIONS)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        if self.token_file is None:
            return ()
        token = read_private(self.token_file, f"the token for {self.tls.peer}").decode().strip()
        return (("authorization", f"Bearer {token}"),)

    async def stream(
        self, method: Callable[..., AsyncIterable[_Message]], request: object
    ) -> AsyncGenerator[_Message, None]:
        """Yield what a call of the other server is answered; close this to end the call."""
        with self.refusing():
            call: Any = method(request, metadata=self.metadata())
            try:
                async for message in call:
                    yield message
            finally:
                call.cancel()

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Have calls in the block fail with the other server's reason, or that it is away."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_call(error) or WeightSyncError(
                Reason.SERVER_AWAY,
                f"{self.tls.peer} {self.url} does not answer ({error.code().name}: "
                f"{error.details()}); check its address and that it runs{_through(self.url)}",
            ) from None


def _through(url: str) -> str:
    hint = proxy_hint(url.rpartition("://")[2])
    return f"; {hint}" if hint else ""


class GrpcOrigin:
    """Follows a server. Its commits are told by a watch; that it is asked too is a backstop.

    `interval_s` is how often it is asked while the watch brings nothing. `patience_s` is not 0,
    because the origin may be a follower, which begins to fetch the same version a moment later.
    """

    patience_s = 3.0

    def __init__(self, access: OriginAccess, model: str, pushes: Pushes, interval_s: float) -> None:
        self.url = access.url
        self._access = access
        self._model = model
        self._pushes = pushes
        self._interval_s = interval_s
        self._channel = access.channel()
        self._stub = weightsync_pb2_grpc.WeightSyncStub(self._channel)
        self._changes = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    async def versions(self) -> Sequence[CommitRecord]:
        infos: list[pb.VersionInfo] = []
        request = pb.ListVersionsRequest(model=self._model)
        with self._access.refusing():
            while True:
                page = await self._stub.ListVersions(
                    request, timeout=_CALL_S, metadata=self._access.metadata()
                )
                infos += page.versions
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
        return _records(infos)

    async def changed(self) -> None:
        # Not wait_for: in Python 3.11 it swallows a cancellation that comes with a change.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._changes.wait()
        # What is told from now on is not in what is asked for now.
        self._changes.clear()

    async def bring(self, push: Push, fetch: Fetch) -> None:
        """Take its PullWeights stream as if a trainer sent it, from where the push stands on."""
        async with contextlib.aclosing(self._messages(push, fetch)) as messages:
            await UploadStream(self._pushes, messages, None).run()

    async def probes(self, version: CommitRecord) -> pb.Probes | None:
        """Ask for them, unless the list of versions says that there are none."""
        if not version.probes:
            return None
        request = pb.GetVersionRequest(model=self._model, version=version.version)
        with self._access.refusing():
            found = await self._stub.GetVersion(
                request, timeout=_CALL_S, metadata=self._access.metadata()
            )
        self._check_same(found.version, version)
        return found.probes if found.HasField("probes") else None

    async def close(self) -> None:
        await cancel_tasks(self._watching)
        await self._channel.close()

    async def _messages(
        self, push: Push, fetch: Fetch
    ) -> AsyncGenerator[pb.PushWeightsRequest, None]:
        yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=push.state.id))
        for request in self._requests(push, fetch):
            async with contextlib.aclosing(self._pulled(request, fetch)) as pulled:
                async for message in pulled:
                    yield message

    def _requests(self, push: Push, fetch: Fetch) -> Iterator[pb.PullWeightsRequest]:
        """Yield what is to be asked for: all at once, or what lacks of a push that goes on."""
        version = fetch.version
        whole = pb.PullWeightsRequest(model=self._model, version=version.version, delta=fetch.delta)
        if not push.state.shards:
            yield whole
            return
        count = max(version.shard_count, max(push.state.shards) + 1)
        for index in range(count) if not fetch.delta else ():
            shard = push.state.shards.get(index)
            if shard is None or not shard.complete:
                request = pb.PullWeightsRequest(shard=index)
                request.MergeFrom(whole)
                request.offset = shard.received if shard is not None else 0
                yield request
        if fetch.delta:
            # How many shards it has is not known; what came already is passed over.
            yield whole

    async def _pulled(
        self, request: pb.PullWeightsRequest, fetch: Fetch
    ) -> AsyncGenerator[pb.PushWeightsRequest, None]:
        compare = fetch.delta or fetch.version.trainer_verified
        pulling = self._access.stream(self._stub.PullWeights, request)
        async with contextlib.aclosing(pulling) as messages:
            async for message in messages:
                await failpoints.reach("follow.chunk")
                if message.HasField("chunk"):
                    yield pb.PushWeightsRequest(chunk=message.chunk)
                elif message.HasField("layout"):
                    yield pb.PushWeightsRequest(layout=message.layout)
                elif message.HasField("digests") and compare:
                    yield pb.PushWeightsRequest(digests=message.digests)
                elif message.HasField("version"):
                    self._check_same(message.version, fetch.version)

    def _check_same(self, found: pb.VersionInfo, wanted: CommitRecord) -> None:
        if found.content_digest != wanted.content_digest:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {wanted.version} at {self.url} has content {found.content_digest} now, "
                f"but was listed with {wanted.content_digest}; the server checks it again",
            )

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, WeightSyncError):
                # Until the origin ends it; what it has told before is the state at the beginning.
                request = pb.WatchVersionsRequest(model=self._model)
                async for _ in self._stub.WatchVersions(request, metadata=self._access.metadata()):
                    self._changes.set()
            await asyncio.sleep(_WATCH_AGAIN_S)


def _records(infos: Sequence[pb.VersionInfo]) -> list[CommitRecord]:
    """Return the commit records of those versions that are committed, by number."""
    committed = {i.version: i for i in infos if i.durability == pb.DURABILITY_COMMITTED}
    return [_record(committed[number], committed) for number in sorted(committed)]


def _record(info: pb.VersionInfo, committed: dict[int, pb.VersionInfo]) -> CommitRecord:
    base = committed.get(info.base_version) if info.kind == pb.PUSH_KIND_DELTA else None
    return CommitRecord(
        model=info.model,
        version=info.version,
        content_digest=info.content_digest,
        manifest_digest=info.manifest_digest,
        layout_digest=info.layout_digest,
        epoch=info.epoch,
        commit_time_ns=info.commit_time.ToNanoseconds(),
        metadata=dict(info.metadata),
        size_bytes=info.size_bytes,
        tensor_count=info.tensor_count,
        shard_count=info.shard_count,
        trainer_verified=info.trainer_verified,
        adopted=False,
        base_version=base.version if base is not None else 0,
        base_content_digest=base.content_digest if base is not None else "",
        delta_bytes=info.stored_bytes if base is not None else 0,
        changed_fraction=info.changed_fraction,
        traceparent=info.traceparent,
        # What they are is asked for when the version is fetched.
        probes=f"{info.probe_count}:" if info.probe_count else "",
    )
