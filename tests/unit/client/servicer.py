"""A small real gRPC server that keeps the contract, with faults to order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

from tests.unit.client.answers import Answers, Shard, StatusError, Upload, fail, materialise
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import check_header, check_shard, check_version
from weightsync.model.manifest import Manifest, ShardEntry, TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc as pb_grpc

__all__ = ["Running", "Servicer", "StatusError", "start"]


class Servicer(Answers):
    """Takes pushes as well."""

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
            self._check_base(request, context)
            newest = max((u.version for u in self.uploads.values() if u.commit), default=0)
            upload = Upload(request, f"push-{len(self.uploads)}", request.version or newest + 1)
            self.uploads[upload.push_id] = upload
            return self._begun(upload)

    def _check_base(self, request: Any, context: Any) -> None:
        if request.kind != pb.PUSH_KIND_DELTA:
            return
        if not self.takes_deltas:
            fail(context, WeightSyncError(Reason.NOT_SUPPORTED, "no deltas here; push in full"))
        base = self._base(request)
        run_id = request.metadata.get("run_id", "")
        theirs = base.request.metadata.get("run_id", run_id) if base else ""
        if base is None or (run_id and run_id != theirs):
            error = WeightSyncError(Reason.BASE_MISMATCH, "another base is held; push in full")
            fail(context, error)

    def _base(self, request: Any) -> Upload | None:
        wanted = request.base_content_digest
        bases = [u for u in self.uploads.values() if u.commit and u.commit.content_digest == wanted]
        return bases[-1] if bases else None

    def _begun(self, upload: Upload) -> pb.BeginPushResponse:
        return pb.BeginPushResponse(
            push_id=upload.push_id,
            version=upload.version,
            epoch=self.epoch,
            shards=upload.progress(),
            max_chunk_bytes=2 << 20,
            committed=upload.commit,
            data_endpoints=self.data_endpoints,
        )

    def PushWeights(self, request_iterator: Any, context: Any) -> Any:
        self.calls.append("PushWeights")
        self.peers.add(context.peer())
        received = 0
        upload: Any = None
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
                raise StatusError(self.cut_code, "Socket closed")
        return len(chunk.data)

    def _digests(self, upload: Upload, message: pb.ShardDigests) -> None:
        shard = upload.shards[message.shard]
        assert shard.complete, "digests before the bytes"
        if message.first == 0:
            check_header(bytes(shard.data[8 : shard.entry.data_start]), shard.tensors)
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
            if upload.request.kind == pb.PUSH_KIND_DELTA:
                base = self._base(upload.request)
                assert base is not None
                upload.parcel, upload.shards = (
                    upload.shards,
                    materialise(base.shards, upload.shards),
                )
                shards = [upload.shards[i] for i in sorted(upload.shards)]
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
            upload.probes = request.probes if request.HasField("probes") else None
            for watcher in self.watchers:
                watcher.put(upload)
        reply: pb.CommitPushResponse = upload.commit
        return reply

    def AbortPush(self, request: Any, context: Any) -> Any:
        self.note("AbortPush", request, context)
        upload = self.uploads.get(request.push_id)
        if upload is not None and upload.commit is not None:
            sentence = f"the push is committed as version {upload.version}; delete that instead"
            fail(context, WeightSyncError(Reason.VERSION_IN_USE, sentence))
        if upload is not None:
            upload.aborted = True
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


@dataclass
class Running:
    servicer: Servicer
    server: grpc.Server
    address: str

    def stop(self) -> None:
        self.server.stop(0).wait()


def start(
    servicer: Servicer,
    address: str = "127.0.0.1:0",
    add: Callable[[grpc.Server], None] = lambda _server: None,
) -> Running:
    """Start a server; `add` may add services to it."""
    server = grpc.server(
        futures.ThreadPoolExecutor(32),
        options=[
            ("grpc.max_receive_message_length", (4 << 20) + (64 << 10)),
            ("grpc.so_reuseport", 0),
        ],
    )
    pb_grpc.add_WeightSyncServicer_to_server(servicer, server)
    add(server)
    port = server.add_insecure_port(address)
    server.start()
    return Running(servicer, server, f"127.0.0.1:{port}")
