"""To look at versions, to pin and to delete them; and how replies show what is in one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Layout, Manifest, TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import Caller
from weightsync_server.catalog.kept_probes import unpack
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.serving import ServingState
from weightsync_server.catalog.table import VersionTable
from weightsync_server.usecases.core import ServerCore

_MAX_VERSIONS = 1000
_MAX_TENSORS = 5000
#: Tensors of one message: well below 1 MiB even with the longest names.
_PART = 500


async def list_versions(
    core: ServerCore, caller: Caller, request: pb.ListVersionsRequest
) -> pb.ListVersionsResponse:
    """List versions, newest first; the page token is the last version of the page before."""
    below = page_number(request.page_token)
    size = min(request.page_size or _MAX_VERSIONS, _MAX_VERSIONS)
    core.check_model(request.model)
    records = [
        record
        for record in core.versions.model.table.list()
        if below is None or record.version < below
    ]
    page = records[:size]
    more = str(page[-1].version) if len(records) > size else ""
    return pb.ListVersionsResponse(
        versions=[record.to_info() for record in page], next_page_token=more
    )


async def get_version(
    core: ServerCore, caller: Caller, request: pb.GetVersionRequest
) -> pb.GetVersionResponse:
    """Tell about one version; the page token is the position of the next tensor."""
    core.check_model(request.model)
    record = chosen(core.versions.model.table, core.versions.model.serving, request.version)
    answer = pb.GetVersionResponse(version=record.to_info())
    probes = unpack(record.commit.probes) if record.commit is not None else None
    if probes is not None and not request.page_token:
        answer.probes.CopyFrom(probes)
    if request.page_size:
        manifest = await core.versions.model.commits.manifest(record)
        first = page_number(request.page_token) or 0
        size = min(request.page_size, _MAX_TENSORS)
        answer.tensors.extend(tensor_page(manifest, first, size))
        if first + size < len(manifest.digests):
            answer.next_page_token = str(first + size)
    return answer


async def get_engine_layout(
    core: ServerCore, caller: Caller, request: pb.GetEngineLayoutRequest
) -> pb.GetEngineLayoutResponse:
    """Tell what the engines hold; the page token names what that was, and a position."""
    core.check_model(request.model)
    page = await core.versions.model.engine_layouts.page(
        request.known_signature, request.page_token
    )
    tensors = [pb.EngineTensor(name=t.name, dtype=t.dtype, shape=t.shape) for t in page.tensors]
    return pb.GetEngineLayoutResponse(
        signature=page.signature, tensors=tensors, next_page_token=page.next_token
    )


async def watch_versions(
    core: ServerCore, caller: Caller, request: pb.WatchVersionsRequest
) -> AsyncIterator[pb.WatchVersionsResponse]:
    """Send the present state, then changes."""
    core.check_model(request.model)
    async for change in core.versions.model.feed.watch():
        yield pb.WatchVersionsResponse(
            version=change.info,
            revision=change.revision,
            deleted=change.deleted,
            initial=change.initial,
        )


async def pin_version(
    core: ServerCore, caller: Caller, request: pb.PinVersionRequest
) -> pb.PinVersionResponse:
    core.check_model(request.model)
    await core.versions.model.serving.pin(request.version, pinned=request.pinned)
    return pb.PinVersionResponse(version=core.versions.model.table.get(request.version).to_info())


async def delete_version(
    core: ServerCore, caller: Caller, request: pb.DeleteVersionRequest
) -> pb.DeleteVersionResponse:
    core.check_model(request.model)
    await core.versions.model.collector.delete(request.version, force=request.force)
    return pb.DeleteVersionResponse()


def page_number(text: str) -> int | None:
    """Return the number that a page token stands for; None: the first page is asked for."""
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "page_token is not one that this server returned; use next_page_token of a reply",
        )
    return int(text)


def chosen(table: VersionTable, serving: ServingState, version: int) -> VersionRecord:
    """Return the version that a request wants to read; 0 stands for the live one.

    PUSH_INCOMPLETE: only an engine's memory has it by now.
    """
    if not version and not serving.live:
        raise WeightSyncError(
            Reason.VERSION_UNKNOWN,
            f"model {table.name} has no live version yet; name a version, or apply one first",
        )
    record = table.get(version or serving.live)
    if record.in_place:
        raise WeightSyncError(
            Reason.PUSH_INCOMPLETE,
            f"version {record.version} is live in an engine's memory alone until its trainer has "
            "pushed it; read it then, or the version before",
            retry_after_s=1.0,
        )
    return record


def tensor_spec(tensor: TensorEntry) -> pb.TensorSpec:
    return pb.TensorSpec(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        begin=tensor.begin,
        end=tensor.end,
    )


def layout_parts(layout: Layout, shard: int) -> Iterator[pb.LayoutPart]:
    """Yield what a stream tells of a shard before its bytes, also of one without a tensor."""
    entry, tensors = layout.shards[shard], layout.by_shard[shard]
    for first in range(0, max(len(tensors), 1), _PART):
        yield pb.LayoutPart(
            shard=shard,
            shard_name=entry.name,
            size_bytes=entry.size,
            header_bytes=entry.header_size,
            tensors=[tensor_spec(tensor) for tensor in tensors[first : first + _PART]],
            last=first + _PART >= len(tensors),
        )


def tensor_page(manifest: Manifest, first: int, size: int) -> Sequence[pb.TensorInfo]:
    """Return `size` tensors from position `first`, sorted by name; it looks at no others."""
    tensors, digests = manifest.layout.tensors, manifest.digests
    return [
        pb.TensorInfo(
            spec=tensor_spec(tensors[at]), shard=tensors[at].shard, digest=digests[at].hex()
        )
        # Sorted off the event loop when the manifest was made: its digests need the order.
        for at in manifest.layout.by_name[first : first + size]
    ]
