"""A small real gRPC server that keeps the contract, with faults to order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from weightsync.digest import tensor_digest
from weightsync.errors import Reason, WeightSyncError
from weightsync.layout import check_header, check_shard, check_version
from weightsync.manifest import Manifest, ShardEntry, TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc as pb_grpc
from weightsync_client import Client, Retry, Timeouts


@dataclass
class Shard:
    entry: ShardEntry
    parts: list[TensorEntry]
    tensors: tuple[TensorEntry, ...] = ()
    data: bytearray = field(default_factory=bytearray)
    claimed: dict[int, bytes] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.tensors) and len(self.data) == self.entry.size

    def digests(self, first: int = 0, count: int | None = None) -> list[bytes]:
        start = self.entry.data_start
        view = memoryview(self.data)
        tensors = self.tensors[first:] if count is None else self.tensors[first : first + count]
        return [tensor_digest(view[start + t.begin : start + t.end]) for t in tensors]


@dataclass
class Upload:
    request: pb.BeginPushRequest
    push_id: str
    version: int
    shards: dict[int, Shard] = field(default_factory=dict)
    commit: pb.CommitPushResponse | None = None
    manifest: Manifest | None = None
    aborted: bool = False

    def progress(self) -> list[pb.ShardProgress]:
        return [
            pb.ShardProgress(
                shard=i,
                received_bytes=len(s.data),
                size_bytes=s.entry.size,
                verified=s.complete and len(s.claimed) == len(s.tensors),
            )
            for i, s in self.shards.items()
            if s.tensors
        ]


def fail(context: Any, error: WeightSyncError) -> None:
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.name, domain="weightsync", metadata=error.metadata
    )
    packed = any_pb2.Any()
    packed.Pack(info)
    details = [packed]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        packed = any_pb2.Any()
        packed.Pack(retry)
        details.append(packed)
    status = status_pb2.Status(code=error.code.value[0], message=error.message, details=details)
    context.abort_with_status(rpc_status.to_status(status))


class Servicer(pb_grpc.WeightSyncServicer):
    """Keeps versions in memory.

    Faults: `before` may raise for a method; `cut_at` holds numbers of received bytes at which the
    stream that reaches them is ended with UNAVAILABLE; `bare` holds statuses without details.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.uploads: dict[str, Upload] = {}
        self.received = 0
        self.cut_at: list[int] = []
        self.before: Callable[[str, Any], None] = lambda _method, _request: None
        self.chunk: Callable[[pb.Chunk], None] = lambda _chunk: None
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.peers: set[str] = set()
        self.models = ["policy"]
        self.live = 0
        self.epoch = 0
        self.watchers: list[queue.SimpleQueue[Any]] = []
        self.rewrite: Callable[[bytes], bytes] = lambda data: data

    def note(self, method: str, request: Any, context: Any) -> None:
        self.calls.append(method)
        self.requests.append(request)
        self.metadata.append({k: v for k, v in context.invocation_metadata()})
        try:
            self.before(method, request)
            model = getattr(request, "model", None)
            if model is not None and model not in (*self.models, ""):
                raise WeightSyncError(
                    Reason.MODEL_UNKNOWN, f"unknown model {model}; configured: {self.models}"
                )
        except WeightSyncError as error:
            fail(context, error)
        except StatusError as error:
            context.abort(error.code, error.details)

    # Pushing.

    def AcquireEpoch(self, request: Any, context: Any) -> Any:
        self.note("AcquireEpoch", request, context)
        self.epoch += 1
        return pb.AcquireEpochResponse(epoch=self.epoch)

    def BeginPush(self, request: Any, context: Any) -> Any:
        self.note("BeginPush", request, context)
        with self.lock:
            for upload in self.uploads.values():
                same = upload.request.idempotency_key == request.idempotency_key
                if same and not upload.aborted:
                    return self._begun(upload)
            newest = max((u.version for u in self.uploads.values() if u.commit), default=0)
            upload = Upload(request, f"push-{len(self.uploads)}", request.version or newest + 1)
            self.uploads[upload.push_id] = upload
            return self._begun(upload)

    def _begun(self, upload: Upload) -> pb.BeginPushResponse:
        return pb.BeginPushResponse(
            push_id=upload.push_id,
            version=upload.version,
            epoch=self.epoch,
            shards=upload.progress(),
            max_chunk_bytes=2 << 20,
            committed=upload.commit,
        )

    def PushWeights(self, request_iterator: Any, context: Any) -> Any:
        self.calls.append("PushWeights")
        self.peers.add(context.peer())
        received = 0
        upload = None
        try:
            for message in request_iterator:
                match message.WhichOneof("message"):
                    case "join":
                        upload = self._upload(message.join.push_id)
                    case "layout":
                        self._layout(upload, message.layout)
                    case "chunk":
                        received += self._chunk(upload, message.chunk)
                    case "digests":
                        self._digests(upload, message.digests)
        except WeightSyncError as error:
            fail(context, error)
        except StatusError as error:
            context.abort(error.code, error.details)
        return pb.PushWeightsResponse(
            push_id=upload.push_id, version=upload.version, received_bytes=received
        )

    def _upload(self, push_id: str) -> Upload:
        upload = self.uploads.get(push_id)
        if upload is None or upload.aborted:
            raise WeightSyncError(
                Reason.PUSH_UNKNOWN, f"there is no open push {push_id}; push again"
            )
        return upload

    def _layout(self, upload: Upload, part: pb.LayoutPart) -> None:
        assert part.ByteSize() <= 1 << 20
        with self.lock:
            shard = upload.shards.get(part.shard)
            if shard is None or shard.tensors:
                assert shard is None, "a layout was sent twice"
                entry = ShardEntry(part.shard_name, part.size_bytes, part.header_bytes)
                shard = upload.shards[part.shard] = Shard(entry, [])
            shard.parts += [
                TensorEntry(t.name, t.dtype, tuple(t.shape), part.shard, t.begin, t.end)
                for t in part.tensors
            ]
            if part.last:
                shard.tensors = check_shard(shard.entry, shard.parts)

    def _chunk(self, upload: Upload, chunk: pb.Chunk) -> int:
        self.chunk(chunk)
        with self.lock:
            shard = upload.shards[chunk.shard]
            held = len(shard.data)
            if chunk.offset > held:
                raise WeightSyncError(
                    Reason.OFFSET_MISMATCH, "beyond", metadata={"offset": str(held)}
                )
            shard.data += chunk.data[held - chunk.offset :]
            self.received += len(chunk.data)
            if self.cut_at and self.received >= self.cut_at[0]:
                self.cut_at.pop(0)
                raise StatusError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return len(chunk.data)

    def _digests(self, upload: Upload, message: pb.ShardDigests) -> None:
        shard = upload.shards[message.shard]
        assert shard.complete, "digests before the bytes"
        if message.first == 0:
            check_header(shard.data[8 : shard.entry.data_start], shard.tensors)
        ours = shard.digests(message.first, len(message.digests) // 16)
        for i, digest in enumerate(ours):
            theirs = message.digests[16 * i : 16 * i + 16]
            if theirs != digest:
                raise WeightSyncError(
                    Reason.DIGEST_MISMATCH,
                    f"tensor {shard.tensors[message.first + i].name!r} came with another digest",
                )
            shard.claimed[message.first + i] = theirs

    def CommitPush(self, request: Any, context: Any) -> Any:
        self.note("CommitPush", request, context)
        try:
            with self.lock:
                return self._commit(self._upload(request.push_id), request)
        except WeightSyncError as error:
            fail(context, error)

    def _commit(self, upload: Upload, request: Any) -> pb.CommitPushResponse:
        if upload.commit is None:
            shards = [upload.shards[i] for i in sorted(upload.shards)]
            missing = [i for i, s in upload.shards.items() if not s.complete]
            if missing or len(shards) != request.shard_count:
                raise WeightSyncError(Reason.PUSH_INCOMPLETE, f"shards {missing} are missing")
            assert all(len(s.claimed) == len(s.tensors) for s in shards), "digests are missing"
            layout = check_version([s.entry for s in shards], [s.tensors for s in shards])
            upload.manifest = Manifest(layout, tuple(d for s in shards for d in s.digests()))
            if upload.manifest.content_digest != request.content_digest:
                raise WeightSyncError(Reason.DIGEST_MISMATCH, "content digest differs")
            same = [u for u in self.uploads.values() if u.commit and u.version == upload.version]
            if same and same[0].commit.content_digest != request.content_digest:
                raise WeightSyncError(
                    Reason.VERSION_CONFLICT, f"version {upload.version} has other content"
                )
            upload.commit = pb.CommitPushResponse(
                version=upload.version,
                content_digest=upload.manifest.content_digest,
                manifest_digest=upload.manifest.manifest_digest,
                already=bool(same),
                size_bytes=layout.size,
                tensor_count=len(layout.tensors),
            )
            for watcher in self.watchers:
                watcher.put(upload)
        return upload.commit

    def AbortPush(self, request: Any, context: Any) -> Any:
        self.note("AbortPush", request, context)
        if request.push_id in self.uploads:
            self.uploads[request.push_id].aborted = True
        return pb.AbortPushResponse()

    def GetPush(self, request: Any, context: Any) -> Any:
        self.note("GetPush", request, context)
        try:
            upload = self._upload(request.push_id)
        except WeightSyncError as error:
            fail(context, error)
        with self.lock:
            for index in [i for i, s in upload.shards.items() if not s.tensors]:
                del upload.shards[index]
            return pb.GetPushResponse(
                model=upload.request.model,
                version=upload.version,
                durability=pb.DURABILITY_RECEIVING,
                shards=upload.progress(),
            )

    # Versions.

    def _committed(self, version: int, context: Any) -> Upload:
        for upload in self.uploads.values():
            if upload.commit and upload.version == (version or self.live):
                return upload
        fail(context, WeightSyncError(Reason.VERSION_UNKNOWN, f"there is no version {version}"))
        raise AssertionError

    def _info(self, upload: Upload) -> pb.VersionInfo:
        info = pb.VersionInfo(
            model="policy",
            version=upload.version,
            durability=pb.DURABILITY_COMMITTED,
            residency=pb.RESIDENCY_STAGED,
            serving=pb.SERVING_LIVE if upload.version == self.live else pb.SERVING_NO,
            content_digest=upload.commit.content_digest,
            size_bytes=upload.commit.size_bytes,
            tensor_count=upload.commit.tensor_count,
            shard_count=len(upload.shards),
            metadata=upload.request.metadata,
        )
        info.commit_time.FromSeconds(1_750_000_000)
        return info

    def ListVersions(self, request: Any, context: Any) -> Any:
        self.note("ListVersions", request, context)
        done = sorted((u for u in self.uploads.values() if u.commit), key=lambda u: -u.version)
        begin = int(request.page_token or 0)
        return pb.ListVersionsResponse(
            versions=[self._info(u) for u in done[begin : begin + 2]],
            next_page_token=str(begin + 2) if len(done) > begin + 2 else "",
        )

    def GetVersion(self, request: Any, context: Any) -> Any:
        self.note("GetVersion", request, context)
        upload = self._committed(request.version, context)
        pairs = sorted(
            zip(upload.manifest.layout.tensors, upload.manifest.digests, strict=True),
            key=lambda pair: pair[0].name,
        )
        size = min(request.page_size, 3)
        begin = int(request.page_token or 0)
        page = [
            pb.TensorInfo(
                spec=pb.TensorSpec(
                    name=t.name, dtype=t.dtype, shape=t.shape, begin=t.begin, end=t.end
                ),
                shard=t.shard,
                digest=digest.hex(),
            )
            for t, digest in pairs[begin : begin + size]
        ]
        more = size and len(pairs) > begin + size
        return pb.GetVersionResponse(
            version=self._info(upload),
            tensors=page,
            next_page_token=str(begin + size) if more else "",
        )

    def PullWeights(self, request: Any, context: Any) -> Any:
        self.note("PullWeights", request, context)
        upload = self._committed(request.version, context)
        yield pb.PullWeightsResponse(version=self._info(upload))
        shard = upload.shards[request.shard]
        data = self.rewrite(bytes(shard.data))
        yield pb.PullWeightsResponse(layout=pb.LayoutPart(shard=request.shard, last=True))
        for offset in range(request.offset, len(data), 1000):
            if self.cut_at and offset >= self.cut_at[0]:
                self.cut_at.pop(0)
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            piece = data[offset : offset + 1000]
            yield pb.PullWeightsResponse(
                chunk=pb.Chunk(shard=request.shard, offset=offset, data=piece)
            )
        yield pb.PullWeightsResponse(digests=pb.ShardDigests(shard=request.shard))

    def WatchVersions(self, request: Any, context: Any) -> Any:
        self.note("WatchVersions", request, context)
        feed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.watchers.append(feed)
        context.add_callback(lambda: feed.put(None))
        for upload in list(self.uploads.values()):
            if upload.commit:
                yield pb.WatchVersionsResponse(version=self._info(upload), initial=True)
        while (upload := feed.get()) is not None:
            if isinstance(upload, StatusError):
                context.abort(upload.code, upload.details)
            yield pb.WatchVersionsResponse(version=self._info(upload), revision=7)

    def PinVersion(self, request: Any, context: Any) -> Any:
        self.note("PinVersion", request, context)
        info = self._info(self._committed(request.version, context))
        info.pinned = request.pinned
        return pb.PinVersionResponse(version=info)

    def DeleteVersion(self, request: Any, context: Any) -> Any:
        self.note("DeleteVersion", request, context)
        del self.uploads[self._committed(request.version, context).push_id]
        return pb.DeleteVersionResponse()

    # Serving.

    def ApplyVersion(self, request: Any, context: Any) -> Any:
        self.note("ApplyVersion", request, context)
        newest = max((u.version for u in self.uploads.values() if u.commit), default=0)
        upload = self._committed(request.version or newest, context)
        previous, self.live = self.live, upload.version
        report = pb.ApplyReport(
            apply_id="apply-1",
            outcome=pb.APPLY_OUTCOME_APPLIED,
            version=upload.version,
            content_digest=upload.commit.content_digest,
            previous_version=previous,
            pause=request.pause,
            ranks=[pb.RankResult(rank="0/0/0", version=upload.version)],
        )
        report.phases.paused_total.FromNanoseconds(12_500_000)
        if request.dry_run:
            report.plan.bytes = 42
        return pb.ApplyVersionResponse(report=report)

    def Rollback(self, request: Any, context: Any) -> Any:
        self.note("Rollback", request, context)
        left, self.live = self.live, self.live - 1
        report = pb.ApplyReport(outcome=pb.APPLY_OUTCOME_APPLIED, version=self.live)
        return pb.RollbackResponse(report=report, rejected_version=left)

    def VerifyVersion(self, request: Any, context: Any) -> Any:
        self.note("VerifyVersion", request, context)
        version = request.version or self.live
        return pb.VerifyVersionResponse(verified=version == self.live, version=version)

    def GetStatus(self, request: Any, context: Any) -> Any:
        self.note("GetStatus", request, context)
        models = [
            pb.ModelStatus(
                model=name,
                live_version=self.live,
                engine=pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, kind="bridge"),
                slots=[pb.SlotStatus(slot=0, state="free")],
            )
            for name in self.models
        ]
        return pb.GetStatusResponse(server_version="0.1.0", models=models, fetchers=2)


class StatusError(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


@dataclass
class Running:
    servicer: Servicer
    server: grpc.Server
    address: str

    def stop(self) -> None:
        self.server.stop(0).wait()


def start(servicer: Servicer, address: str = "127.0.0.1:0") -> Running:
    server = grpc.server(
        futures.ThreadPoolExecutor(32),
        options=[
            ("grpc.max_receive_message_length", (4 << 20) + (64 << 10)),
            ("grpc.so_reuseport", 0),
        ],
    )
    pb_grpc.add_WeightSyncServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    server.start()
    return Running(servicer, server, f"127.0.0.1:{port}")


@pytest.fixture
def running() -> Iterator[Running]:
    server = start(Servicer())
    yield server
    server.stop()


@pytest.fixture
def servicer(running: Running) -> Servicer:
    return running.servicer


@pytest.fixture
def start_server() -> Callable[..., Running]:
    return start


@pytest.fixture
def status_error() -> type[StatusError]:
    return StatusError


@pytest.fixture
def retry() -> Retry:
    return Retry(attempts=4, initial_s=0.01, max_s=0.05)


@pytest.fixture
def client(running: Running, retry: Retry) -> Iterator[Client]:
    timeouts = Timeouts(call_s=10, begin_s=10, stream_s=30, commit_s=10, apply_s=10)
    with Client(running.address, timeouts=timeouts, retry=retry) as client:
        yield client
