"""One method per RPC of `weightsync.v1.WeightSync`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_server.catalog.model_name import check_model
from weightsync_server.rpc.pull_stream import pull
from weightsync_server.rpc.requests import chosen, tensor_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from weightsync_server.engine import Applier
    from weightsync_server.fleet_host.fleet_service import FleetService
    from weightsync_server.model import Model
    from weightsync_server.push import Message, PushService, SameHostOffers

__all__ = ["WeightSyncServicer"]

_MAX_VERSIONS = 1000
_MAX_TENSORS = 5000


class WeightSyncServicer(weightsync_pb2_grpc.WeightSyncServicer):
    """Hands calls to the parts of the server that know.

    Args:
        model: The one model.
        pushes: Uploads.
        applier: Applies.
        status: Makes the answer of GetStatus.
        lender: Makes the offers of the same-host hand-off; None: none are made.
        endpoints: Tells by the peer of a call where it may open streams besides.
        origin: The origin that this server follows: it takes no pushes; empty: it follows none.
        fleet: What this server is a member of; None: of no fleet.
    """

    def __init__(
        self,
        model: Model,
        pushes: PushService,
        applier: Applier,
        status: Callable[[], pb.GetStatusResponse],
        lender: SameHostOffers | None = None,
        endpoints: Callable[[str], list[str]] = lambda _: [],
        origin: str = "",
        fleet: FleetService | None = None,
    ) -> None:
        self._model = model
        self._pushes = pushes
        self._applier = applier
        self._status = status
        self._lender = lender
        self._endpoints = endpoints
        self._origin = origin
        self._fleet = fleet

    async def AcquireEpoch(self, request: pb.AcquireEpochRequest, context: Any) -> Any:
        """Make the caller the writer."""
        self._check_model(request.model)
        self._refuse_on_follower()
        epoch = await self._model.epochs.acquire(request.holder, request.client_run)
        return pb.AcquireEpochResponse(epoch=epoch)

    async def BeginPush(self, request: pb.BeginPushRequest, context: Any) -> Any:
        """Open an upload."""
        self._check_model(request.model)
        self._refuse_on_follower()
        response = await self._pushes.begin(request, context.time_remaining())
        if self._lender is not None and request.HasField("same_host"):
            self._lender.offer(response, context.peer(), request.writer)
        response.data_endpoints.extend(self._endpoints(context.peer()))
        return response

    async def PushWeights(self, request_iterator: AsyncIterator[Message], context: Any) -> Any:
        """Receive layout, bytes and digests."""
        self._refuse_on_follower()
        return await self._pushes.stream(request_iterator, context.time_remaining())

    async def CommitPush(self, request: pb.CommitPushRequest, context: Any) -> Any:
        """End an upload."""
        self._refuse_on_follower()
        return await self._pushes.commit(request)

    async def AbortPush(self, request: pb.AbortPushRequest, context: Any) -> Any:
        """Drop an upload."""
        self._refuse_on_follower()
        return await self._pushes.abort(request)

    async def GetPush(self, request: pb.GetPushRequest, context: Any) -> Any:
        """Tell how far an upload has come."""
        return self._pushes.get(request)

    async def ApplyVersion(self, request: pb.ApplyVersionRequest, context: Any) -> Any:
        """Make a version live."""
        self._check_model(request.model)
        if _for_fleet(request.scope):
            return await self._in_fleet().apply(request)
        return await self._applier.apply(request)

    async def Rollback(self, request: pb.RollbackRequest, context: Any) -> Any:
        """Go back."""
        self._check_model(request.model)
        if _for_fleet(request.scope):
            return await self._in_fleet().rollback(request)
        return await self._applier.rollback(request)

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Any) -> Any:
        """List versions, newest first; the page token is the last version of the page before."""
        below = _token(request.page_token)
        size = min(request.page_size or _MAX_VERSIONS, _MAX_VERSIONS)
        self._check_model(request.model)
        records = [
            record for record in self._model.table.list() if below is None or record.version < below
        ]
        page = records[:size]
        more = str(page[-1].version) if len(records) > size else ""
        return pb.ListVersionsResponse(
            versions=[record.to_info() for record in page], next_page_token=more
        )

    async def GetVersion(self, request: pb.GetVersionRequest, context: Any) -> Any:
        """Tell about one version; the page token is the position of the next tensor."""
        self._check_model(request.model)
        record = chosen(self._model.table, self._model.serving, request.version)
        answer = pb.GetVersionResponse(version=record.to_info())
        if request.page_size:
            manifest = await self._model.commits.manifest(record)
            first = _token(request.page_token) or 0
            size = min(request.page_size, _MAX_TENSORS)
            answer.tensors.extend(tensor_page(manifest, first, size))
            if first + size < len(manifest.digests):
                answer.next_page_token = str(first + size)
        return answer

    async def GetEngineLayout(self, request: pb.GetEngineLayoutRequest, context: Any) -> Any:
        """Tell what the engines hold; the page token names what that was, and a position."""
        self._check_model(request.model)
        page = await self._model.engine_layouts.page(request.known_signature, request.page_token)
        tensors = [pb.EngineTensor(name=t.name, dtype=t.dtype, shape=t.shape) for t in page.tensors]
        return pb.GetEngineLayoutResponse(
            signature=page.signature, tensors=tensors, next_page_token=page.next_token
        )

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Any
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        """Send the present state, then changes."""
        self._check_model(request.model)
        async for change in self._model.feed.watch():
            yield pb.WatchVersionsResponse(
                version=change.info,
                revision=change.revision,
                deleted=change.deleted,
                initial=change.initial,
            )

    async def PinVersion(self, request: pb.PinVersionRequest, context: Any) -> Any:
        """Pin or unpin."""
        self._check_model(request.model)
        await self._model.serving.pin(request.version, pinned=request.pinned)
        return pb.PinVersionResponse(version=self._model.table.get(request.version).to_info())

    async def DeleteVersion(self, request: pb.DeleteVersionRequest, context: Any) -> Any:
        """Delete."""
        self._check_model(request.model)
        await self._model.collector.delete(request.version, force=request.force)
        return pb.DeleteVersionResponse()

    async def PullWeights(
        self, request: pb.PullWeightsRequest, context: Any
    ) -> AsyncIterator[pb.PullWeightsResponse]:
        """Send bytes back out."""
        self._check_model(request.model)
        async for message in pull(self._model, request, context.time_remaining()):
            yield message

    async def VerifyVersion(self, request: pb.VerifyVersionRequest, context: Any) -> Any:
        """Prove what every rank serves."""
        self._check_model(request.model)
        return await self._applier.verify(request)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> Any:
        """Tell the state of everything."""
        if request.model:
            self._check_model(request.model)
        return self._status()

    async def GetFleetStatus(self, request: pb.GetFleetStatusRequest, context: Any) -> Any:
        """Tell the state of the fleet."""
        if request.model:
            self._check_model(request.model)
        return await self._in_fleet().status()

    async def AbortFleetApply(self, request: pb.AbortFleetApplyRequest, context: Any) -> Any:
        """End the apply of the fleet that runs."""
        if request.model:
            self._check_model(request.model)
        return await self._in_fleet().abort(request)

    def _in_fleet(self) -> FleetService:
        if self._fleet is None:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                "this server is a member of no fleet; start it with engines, --fleet and "
                "--fleet-register, or ask one that is",
            )
        return self._fleet

    def _refuse_on_follower(self) -> None:
        if self._origin:
            raise WeightSyncError(
                Reason.SERVER_FOLLOWS,
                f"this server follows {self._origin} and takes no pushes; push there",
                metadata={"origin": self._origin},
            )

    def _check_model(self, name: str) -> None:
        check_model(name, self._model.table.name)


def _for_fleet(scope: int) -> bool:
    if scope not in pb.Scope.values():
        raise WeightSyncError(
            Reason.REQUEST_INVALID, "scope must be HOST or FLEET; leave it out for HOST"
        )
    return scope == pb.SCOPE_FLEET


def _token(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise WeightSyncError(
            Reason.REQUEST_INVALID, "page_token is none of ours; use next_page_token of a reply"
        )
    return int(text)
