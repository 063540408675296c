"""Answers of the contract that need no engine: versions kept in memory, faults to order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from weightsync.delta import apply_change, parse_shard
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import signature_of, tensor_digest
from weightsync.model.manifest import ShardEntry, TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc as pb_grpc

__all__ = ["Answers", "Shard", "StatusError", "Upload", "fail", "materialise"]


class StatusError(Exception):
    """Ends a call with a bare status, as a link or a proxy does."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


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


def materialise(base: dict[int, Shard], parcel: dict[int, Shard]) -> dict[int, Shard]:
    """Return the shards of the version that a delta makes of its base."""
    made = {
        index: Shard(shard.entry, shard.parts, shard.tensors, bytearray(shard.data))
        for index, shard in base.items()
    }
    places = {t.name: (made[t.shard], t) for shard in base.values() for t in shard.tensors}
    expect = {name: (t.dtype, t.shape) for name, (_, t) in places.items()}
    for pushed in parcel.values():
        for change in parse_shard(memoryview(bytes(pushed.data)), expect).changes.values():
            shard, t = places[change.name]
            start = shard.entry.data_start
            target = np.frombuffer(shard.data, np.uint8)[start + t.begin : start + t.end]
            apply_change(change, target)
            if tensor_digest(target.data) != change.digest:
                raise WeightSyncError(Reason.DIGEST_MISMATCH, f"{change.name} has another digest")
    return made


@dataclass
class Upload:
    request: pb.BeginPushRequest
    push_id: str
    version: int
    shards: dict[int, Shard] = field(default_factory=dict)
    #: Of a delta, as pushed; its `shards` become those of the whole version.
    parcel: dict[int, Shard] = field(default_factory=dict)
    commit: Any = None
    manifest: Any = None
    probes: Any = None
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


class Answers(pb_grpc.WeightSyncServicer):
    """Versions in memory: all calls but those that bring bytes in.

    Faults: `before` may raise for a method; `cut_at` holds numbers of received bytes at which the
    stream that reaches them is ended with `cut_code`; `bare` holds statuses without details.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.uploads: dict[str, Upload] = {}
        self.received = 0
        self.cut_at: list[int] = []
        self.cut_code = grpc.StatusCode.UNAVAILABLE
        self.before: Callable[[str, Any], None] = lambda _method, _request: None
        self.chunk: Callable[[pb.Chunk], None] = lambda _chunk: None
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.peers: set[str] = set()
        self.takes_deltas = True
        self.data_endpoints: list[str] = []
        self.models = ["policy"]
        self.engines: list[pb.EngineReport] = []
        self.applies: list[pb.ApplyRecord] = []
        #: What every gate shows; None: nothing is scored.
        self.gate: pb.GateReport | None = None
        self.live = 0
        self.epoch = 0
        #: What the engine holds: dtype and shape by name; None: as of an older server.
        self.layout: dict[str, tuple[str, tuple[int, ...]]] | None = None
        self.watchers: list[queue.SimpleQueue[Any]] = []
        self.rewrite: Callable[[bytes], bytes] = lambda data: data

    def note(self, method: str, request: Any, context: Any) -> None:
        self.calls.append(method)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
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
            kind=upload.request.kind,
            shard_count=len(upload.shards),
            metadata=upload.request.metadata,
        )
        info.commit_time.FromSeconds(1_750_000_000)
        if upload.probes is not None:
            info.probe_count = len(upload.probes.probes)
        return info

    def ListVersions(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("ListVersions", request, context)
        done = sorted((u for u in self.uploads.values() if u.commit), key=lambda u: -u.version)
        begin = int(request.page_token or 0)
        return pb.ListVersionsResponse(
            versions=[self._info(u) for u in done[begin : begin + 2]],
            next_page_token=str(begin + 2) if len(done) > begin + 2 else "",
        )

    def GetVersion(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
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
            probes=None if begin else upload.probes,
        )

    def GetEngineLayout(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        if self.layout is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")
        self.note("GetEngineLayout", request, context)
        held = sorted((self.layout or {}).items())
        signature = signature_of((name, *kind) for name, kind in held) if held else ""
        if request.known_signature == signature:
            return pb.GetEngineLayoutResponse(signature=signature)
        # Pages of two tensors.
        of, _, position = request.page_token.partition(".")
        begin = int(position) if of == signature and of else 0
        return pb.GetEngineLayoutResponse(
            signature=signature,
            tensors=[
                pb.EngineTensor(name=name, dtype=dtype, shape=shape)
                for name, (dtype, shape) in held[begin : begin + 2]
            ],
            next_page_token=f"{signature}.{begin + 2}" if len(held) > begin + 2 else "",
        )

    def PullWeights(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("PullWeights", request, context)
        upload = self._committed(request.version, context)
        yield pb.PullWeightsResponse(version=self._info(upload))
        shard = upload.shards[request.shard]
        data = self.rewrite(bytes(shard.data))
        yield pb.PullWeightsResponse(layout=pb.LayoutPart(shard=request.shard, last=True))
        for offset in range(request.offset, len(data), 1000):
            if self.cut_at and offset >= self.cut_at[0]:
                self.cut_at.pop(0)
                context.abort(self.cut_code, "Socket closed")
            piece = data[offset : offset + 1000]
            yield pb.PullWeightsResponse(
                chunk=pb.Chunk(shard=request.shard, offset=offset, data=piece)
            )
        yield pb.PullWeightsResponse(digests=pb.ShardDigests(shard=request.shard))

    def WatchVersions(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
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

    def PinVersion(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("PinVersion", request, context)
        info = self._info(self._committed(request.version, context))
        info.pinned = request.pinned
        return pb.PinVersionResponse(version=info)

    def DeleteVersion(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("DeleteVersion", request, context)
        del self.uploads[self._committed(request.version, context).push_id]
        return pb.DeleteVersionResponse()

    # Serving.

    def ApplyVersion(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
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
        if self.gate is not None:
            report.gate.CopyFrom(self.gate)
        if request.dry_run:
            report.plan.bytes = 42
        return pb.ApplyVersionResponse(report=report, engines=self.engines)

    def Rollback(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("Rollback", request, context)
        left, self.live = self.live, self.live - 1
        report = pb.ApplyReport(outcome=pb.APPLY_OUTCOME_APPLIED, version=self.live)
        return pb.RollbackResponse(report=report, rejected_version=left, engines=self.engines)

    def VerifyVersion(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("VerifyVersion", request, context)
        version = request.version or self.live
        answer = pb.VerifyVersionResponse(verified=version == self.live, version=version)
        if request.score:
            proof = pb.EngineProof(
                engine="e0", verified=answer.verified, version=version, gate=self.gate
            )
            answer.engines.append(proof)
        return answer

    def ReportLogprobs(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("ReportLogprobs", request, context)
        return pb.ReportLogprobsResponse()

    def ListApplies(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("ListApplies", request, context)
        below = int(request.page_token or len(self.applies) + 1)
        found = [one for one in reversed(self.applies) if one.number < below]
        if request.version:
            found = [one for one in found if one.version == request.version]
        # Pages of two at most.
        size = min(request.page_size or 2, 2)
        more = str(found[size - 1].number) if len(found) > size else ""
        return pb.ListAppliesResponse(applies=found[:size], next_page_token=more)

    def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
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

    def GetFleetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("GetFleetStatus", request, context)
        return pb.GetFleetStatusResponse()

    def AbortFleetApply(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.note("AbortFleetApply", request, context)
        return pb.AbortFleetApplyResponse()
