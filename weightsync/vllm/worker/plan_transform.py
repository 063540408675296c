"""Versions through the load plan: every live byte is a copy of a byte of the version."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weightsync import failpoints
from weightsync.model.manifest import Layout
from weightsync.model.name_sets import pack
from weightsync.shm.incoming_version import ArrivalReader, IpcAddresses
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedVersion
from weightsync.vllm.apply.device_ops import (
    DeviceOps,
    PrefetchRequest,
    PrepareRequest,
    RankPrepared,
    Stop,
    describe,
)
from weightsync.vllm.apply.host_patch import digest_all
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.apply.transform import Prepared, TransformRequest
from weightsync.vllm.plan.capture import capture_plan, unplaced
from weightsync.vllm.plan.halves import in_live_order
from weightsync.vllm.plan.int_views import memory_of
from weightsync.vllm.plan.live_params import LiveParameters, why_not_plain
from weightsync.vllm.plan.load_plan import (
    LoadPlan,
    PlanRefusedError,
    check_coverage,
    check_known,
    check_lacks_none,
    merge_neighbours,
    placeless,
)
from weightsync.vllm.plan.load_watch import check_complete, check_read
from weightsync.vllm.plan.plan_cache import PlanCache, find_plan
from weightsync.vllm.worker.rank_job import RankJob, RefusedCallError

if TYPE_CHECKING:
    from weightsync.vllm.apply.segment_mappings import RankSegments
    from weightsync.vllm.apply.writes import ParamWriter
    from weightsync.vllm.plan.staged_tensors import ViewCache

#: Versions of which it is known whether they bring a draft.
_VERSIONS = 64
#: Drafts that are kept.
_DRAFTS = 2


class KeptDraft:
    """Keeps a draft in the host's memory as long as it may be asked for.

    The draft that was live before a version brought another one, for versions that bring none: the
    way back from a version with a draft to one without must bring back what was there; where that
    came from nobody may have any more.
    """

    def __init__(self, live: LiveParameters) -> None:
        self._live = live
        self._brings: OrderedDict[str, bool] = OrderedDict()
        #: Bytes of drafts, by the version that they were live with.
        self._kept: OrderedDict[str, Mapping[str, torch.Tensor]] = OrderedDict()

    def note(self, content_digest: str, plan: LoadPlan) -> None:
        self._brings[content_digest] = bool(plan.draft)
        self._brings.move_to_end(content_digest)
        while len(self._brings) > _VERSIONS:
            self._brings.popitem(last=False)

    def around(
        self, writer: ParamWriter, content_digest: str, plan: LoadPlan, live: str
    ) -> ParamWriter:
        """Return what writes a version as `writer` does, and what it does to the draft.

        `live` is the content digest of what is live; "" if unknown.
        """
        if plan.draft:
            keep = partial(self.keep, live, plan.draft)
            return _WithDraft(writer, self._live, keep=keep)
        tensors = self._kept.get(content_digest)
        return writer if tensors is None else _WithDraft(writer, self._live, tensors)

    def keep(self, live: str, params: frozenset[str]) -> None:
        """Keep the draft that is live, if its version would not bring it back."""
        if not live:
            # Half written: what was kept before that is what may be asked for.
            return
        if self._brings.get(live, False):
            return
        self._kept[live] = {
            name: memory_of(self._live.tensor(name)).to("cpu", copy=True) for name in params
        }
        self._kept.move_to_end(live)
        while len(self._kept) > _DRAFTS:
            self._kept.popitem(last=False)


@dataclass(frozen=True)
class _WithDraft:
    """Writes as `writer` does, and what a version without a draft had beside it: `tensors`."""

    writer: ParamWriter
    live: LiveParameters
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    #: Called before anything is written.
    keep: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return self.writer.nbytes + sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def patched(self) -> bool:
        return self.writer.patched

    @property
    def compared_all(self) -> bool:
        return self.writer.compared_all

    def write(self, threads: SliceThreads) -> None:
        self.keep()
        self.writer.write(threads)
        for name, tensor in self.tensors.items():
            memory_of(self.live.tensor(name)).copy_(tensor)

    def verify(self, threads: SliceThreads) -> list[str]:
        wrong = self.writer.verify(threads)
        for name, tensor in self.tensors.items():
            if not torch.equal(memory_of(self.live.tensor(name)).cpu(), tensor):
                wrong.append(name)
        return wrong


#: A trainer that is slower than this is not worth a thread that waits for it, and segments that
#: stay mapped for it, seconds.
_PATIENCE_S = 10.0


@contextlib.contextmanager
def open_arrivals(socket: str, document: str) -> Iterator[ArrivalReader | None]:
    """Map what the server tells of a version that comes in; None: the push was over before."""
    try:
        with SegmentClient(socket) as client:
            ((fd, size),) = client.map([document])
    except LookupError:
        yield None
        return
    mapped = MappedSegment(fd, size)
    try:
        yield ArrivalReader(mapped.view)
    finally:
        mapped.close()


def turns(reader: ArrivalReader, job: RankJob) -> Iterator[tuple[int, IpcAddresses | None]]:
    """Yield the place in `Layout.largest_first` of each shard that comes; ends with the job.

    A shard that lies on a GPU is yielded before, with where.
    """
    place = {shard: turn for turn, shard in enumerate(reader.layout.largest_first)}
    for shard, on_gpu in reader.arrivals(job.cancelled.wait, _PATIENCE_S):
        yield place[shard], reader.ipc_addresses(shard) if on_gpu else None


class PlanTransform:
    """See `VersionTransform`. Captures the plans of layouts while the engine stands still."""

    name = "plan"

    def __init__(
        self,
        model: Any,
        live: LiveParameters,
        views: ViewCache,
        segments: RankSegments,
        ops: DeviceOps,
        threads: SliceThreads,
        plans: PlanCache,
    ) -> None:
        self._model = model
        self._live = live
        self._views = views
        self._segments = segments
        self._ops = ops
        self._threads = threads
        self._plans = plans
        self._draft = KeptDraft(live)

    @property
    def proved(self) -> bool:
        """Whether there is a plan of the adopted checkpoint."""
        return self._plans.base is not None

    def capture(self, staged: StagedVersion, socket: str) -> dict[str, Any]:
        """Make the plan of a layout, in a pause; returns what the reply tells."""
        self._refuse_repacked()
        layout = staged.manifest.layout
        self._plans.check(layout.signature)
        plan, seconds = self._plans.by_signature.get(layout.signature), 0.0
        if plan is None:
            plan, seconds = self._captured(staged, socket)
        ignored = pack(frozenset(plan.ignored), plan.tensors)
        return {"seconds": seconds, "slices": len(plan.slices), "ignored": ignored}

    def _captured(self, staged: StagedVersion, socket: str) -> tuple[LoadPlan, float]:
        layout, base = staged.manifest.layout, self._plans.base
        with self._plans.remembering(layout.signature):
            names = {tensor.name for tensor in layout.tensors}
            draft = base is None or base.brings_draft(names)
            plan, seconds = capture_plan(
                self._model, self._live, layout, self._live_digests, draft=draft
            )
            if base is not None:
                check_coverage(plan, base)
            else:
                check_complete(self._model, map(self._live.tensor, plan.written))
                plan = check_read(self._model, plan)
            loaded = partial(self._segments.tensors, socket, layout, staged.segments)
            plan = merge_neighbours(in_live_order(plan, self._live, base, loaded))
        self._plans.add(plan)
        self._ops.warm_up(plan)
        return plan, seconds

    def learn(self, layout: Layout, unloaded: str) -> None:
        self._plans.learn(layout.signature, unloaded)

    def check(self, layout: Layout, *, whole: bool) -> str:
        """Accept tensors of a version, or all if `whole`, by names, dtypes and shapes.

        Returns those without a place on this rank, packed by `name_sets`.
        """
        base = self._plans.base
        if base is None:
            raise RefusedCallError("no checkpoint is adopted yet")
        known = {tensor.name for tensor in check_known(layout, base)}
        if whole:
            check_lacks_none(layout, base)
        others = tuple(tensor for tensor in layout.tensors if tensor.name not in known)
        lost: list[str] = []
        if others:
            part = Layout(layout.shards, others)
            ignored = unplaced(self._model, self._live, part, self._live_digests, base.entries)
            lost = placeless(part, base, ignored)
        return pack(frozenset(lost), (tensor.name for tensor in layout.tensors))

    def prepare(self, request: TransformRequest, stop: Stop) -> tuple[Prepared, Mapping[str, Any]]:
        """See `VersionTransform`; raises NeedsCaptureError if the layout is new."""
        staged, layout = request.staged, request.staged.manifest.layout
        uniform = partial(self._segments.uniform, request.socket, layout, staged.segments)
        # Where there is none, a capture finds out whether there can be, or versions are loaded.
        plan = find_plan(staged.manifest, self._plans, uniform)
        self._refuse_repacked()
        failpoints.hit("worker.map")
        read = self._segments.read(request.socket, layout, staged.segments, plan)
        target = describe(request.apply_id, staged, plan, read, self._views.targets(plan))
        self._draft.note(target.content_digest, plan)
        base = _of_plan(request.base)
        if base is not None and base.plan is not plan:
            base = None
        asked = PrepareRequest(target, base, request.progress, request.stage, request.ticket)
        sent = self._ops.sent
        prep = self._ops.prepare(asked, stop)
        report = {
            "slices": len(plan.slices),
            "h2d_bytes": self._ops.sent - sent + prep.prefetched,
            **prep.proof.report(layout),
        }
        return target, report

    def prefetch(self, job: RankJob, socket: str, document: str, live: str) -> None:
        """Read what has come of a version that still comes in, if versions are staged.

        The segment `document` says what has come. `live` is the content digest of what is proved to
        be live, "" if unknown.
        """
        with open_arrivals(socket, document) as reader:
            known = self._plans.by_signature
            plan = known.get(reader.layout.signature) if reader is not None else None
            if reader is None or plan is None or not self._ops.stages:
                # It is prepared as a whole, once it is complete.
                return
            what = socket, reader.layout, reader.segments, plan
            with self._segments.incoming(*what) as read:
                request = PrefetchRequest(
                    job.apply_id,
                    reader.segments,
                    plan,
                    self._views.targets(plan),
                    read,
                    reader.layout,
                    turns(reader, job),
                    live,
                    lambda: job.unwanted,
                )
                self._ops.prefetch(request, job.cancelled.is_set)

    def writer(self, target: Prepared, live: str) -> ParamWriter:
        """See `VersionTransform`: a patch where its base is live, else all of it."""
        own = _own(target)
        writer = self._ops.writer(own, live)
        return self._draft.around(writer, own.content_digest, own.plan, live)

    def invalidate(self, target: Prepared) -> None:
        self._ops.invalidate(_own(target))

    def compare(self, target: Prepared, stop: Stop) -> list[str]:
        return self._ops.compare(_own(target), stop)

    def _refuse_repacked(self) -> None:
        reason = why_not_plain(self._model)
        if reason is not None:
            raise PlanRefusedError(reason.cause, remedy=reason.remedy)

    def _live_digests(self) -> dict[str, bytes]:
        """Digest every parameter and buffer, on the device where it can; the engine stands."""
        tensors = {name: self._live.tensor(name) for name in self._live.names()}
        return digest_all(self._ops, tensors, self._threads)


def _of_plan(prepared: Prepared | None) -> RankPrepared | None:
    return prepared if isinstance(prepared, RankPrepared) else None


def _own(prepared: Prepared) -> RankPrepared:
    assert isinstance(prepared, RankPrepared)  # noqa: S101 - a rank keeps to one transform
    return prepared
