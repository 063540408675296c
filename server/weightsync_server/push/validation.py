"""Checks of requests that need no state."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import MAX_DIMS
from weightsync.model.manifest import MAX_VERSION, TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.epochs import check_run

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from weightsync_server.push.push_settings import PushSettings


_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_FALLBACK_BYTES = 64
#: What framing may add to a message of the largest size.
_SLACK = 1024


def refused(message: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, message)


def check_digest(field: str, value: str) -> None:
    if value and not _DIGEST.fullmatch(value):
        raise refused(f"{field} must be 32 lower-case hexadecimal digits (xxh3-128) or empty")


def check_size(message: Message, limits: PushSettings) -> None:
    """Refuse a message that is too large; for any but chunks."""
    size = message.ByteSize()
    if size > limits.max_message_bytes + _SLACK:
        raise refused(
            f"split the message into parts of at most {limits.max_message_bytes} bytes: it "
            f"has {size}"
        )


def check_begin(request: pb.BeginPushRequest, limits: PushSettings) -> None:
    if request.kind == pb.PUSH_KIND_DELTA:
        _check_delta(request)
    elif request.kind not in (pb.PUSH_KIND_UNSPECIFIED, pb.PUSH_KIND_FULL):
        raise WeightSyncError(
            Reason.NOT_SUPPORTED, f"push kind {request.kind} is not known here; use PUSH_KIND_FULL"
        )
    elif request.base_content_digest and not request.partial:
        raise refused("base_content_digest belongs to a delta; leave it empty in a full push")
    _check_part(request)
    if len(request.fallback_reason.encode()) > _MAX_FALLBACK_BYTES:
        raise refused(f"fallback_reason is over {_MAX_FALLBACK_BYTES} bytes; shorten it")
    if request.version > MAX_VERSION:
        raise refused(f"version {request.version} is above {MAX_VERSION}, the largest there is")
    if request.epoch > MAX_VERSION:
        raise refused(
            f"epoch {request.epoch} is above {MAX_VERSION}, the largest there is; use the one that "
            "AcquireEpoch returned"
        )
    if len(request.idempotency_key.encode()) > limits.max_key_bytes:
        raise refused(f"idempotency_key is over {limits.max_key_bytes} bytes; shorten it")
    check_run(request.client_run)
    check_digest("layout_digest", request.layout_digest)
    _check_writers(request, limits)
    if request.shard_count > limits.max_shards:
        raise refused(
            f"the push has {request.shard_count} shards; send at most {limits.max_shards}"
        )
    _check_metadata(request, limits)


def _check_part(request: pb.BeginPushRequest) -> None:
    if request.partial and request.writers <= 1:
        raise refused("a push of some tensors by one writer is a delta; begin with PUSH_KIND_DELTA")
    if request.partial and request.kind == pb.PUSH_KIND_DELTA:
        raise refused(
            "begin with PUSH_KIND_FULL: several writers together send all of the tensors they name"
        )
    if request.base_version and not request.partial:
        raise refused("base_version belongs to a push of some tensors; set partial with it")
    check_digest("base_content_digest", request.base_content_digest)


def _check_writers(request: pb.BeginPushRequest, limits: PushSettings) -> None:
    if request.writer >= max(request.writers, 1):
        raise refused(
            f"writer is {request.writer} of {request.writers or 1}; number writers from 0"
        )
    if request.writers <= 1:
        return
    if request.writers > limits.max_writers:
        raise refused(
            f"{request.writers} writers are too many; use at most {limits.max_writers} for one "
            "version"
        )
    if not request.idempotency_key:
        raise refused("give all writers of the push the same idempotency_key: it joins them")
    if not (request.total_bytes and request.shard_count):
        raise refused(
            "declare total_bytes and shard_count of the whole version in each of several writers"
        )


def _check_delta(request: pb.BeginPushRequest) -> None:
    if not request.base_content_digest:
        raise refused("a delta needs base_content_digest, the content digest of what it changes")
    if request.layout_digest and request.writers <= 1:
        raise refused("layout_digest belongs to a full push; a delta's layout is that of its base")
    if request.fallback_reason:
        raise refused("fallback_reason belongs to a full push; leave it empty in a delta")


def _check_metadata(request: pb.BeginPushRequest, limits: PushSettings) -> None:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in request.metadata.items())
    if len(request.metadata) > limits.max_metadata_entries or size > limits.max_metadata_bytes:
        raise refused(
            f"metadata has {len(request.metadata)} entries of {size} bytes; at most "
            f"{limits.max_metadata_entries} entries and {limits.max_metadata_bytes} bytes"
        )


def tensor_entries(part: pb.LayoutPart) -> list[TensorEntry]:
    """Return the tensors of a layout part, unchecked but for what bounds the work on them."""
    shard = part.shard
    entries = []
    for tensor in part.tensors:
        if len(tensor.shape) > MAX_DIMS:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"tensor {tensor.name[:100]!r} has {len(tensor.shape)} dimensions; "
                f"at most {MAX_DIMS}",
            )
        entries.append(
            TensorEntry(
                tensor.name, tensor.dtype, tuple(tensor.shape), shard, tensor.begin, tensor.end
            )
        )
    return entries
