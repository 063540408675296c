"""Versions through the load plan: every live byte is a copy of a byte of the version."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from weightsync import failpoints
from weightsync.model.manifest import Layout
from weightsync.model.name_sets import pack
from weightsync.vllm.apply.device_ops import PrefetchRequest, PrepareRequest
from weightsync.vllm.apply.prepared import RankPrepared, describe
from weightsync.vllm.plan.capture import capture_plan, unplaced
from weightsync.vllm.plan.halves import in_live_order
from weightsync.vllm.plan.in_place import why_not_plain
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.load_plan import (
    PlanRefusedError,
    check_coverage,
    check_known,
    check_lacks_none,
    placeless,
)
from weightsync.vllm.plan.load_watch import check_complete, check_read
from weightsync.vllm.plan.merge import merge_neighbours
from weightsync.vllm.plan.plan_cache import find_plan
from weightsync.vllm.worker.arrival_order import open_arrivals, turns
from weightsync.vllm.worker.kept_draft import KeptDraft
from weightsync.vllm.worker.rank_job import RefusedCallError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.shm.staged_version import StagedVersion
    from weightsync.vllm.apply.device_ops import DeviceOps, Stop
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.apply.transform import Prepared, TransformRequest
    from weightsync.vllm.apply.writes import Writer
    from weightsync.vllm.plan.live_params import LiveParameters
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.plan.plan_cache import PlanCache
    from weightsync.vllm.plan.view_cache import ViewCache
    from weightsync.vllm.worker.rank_job import Job
    from weightsync.vllm.worker.rank_segments import RankSegments

__all__ = ["PlanTransform"]


class PlanTransform:
    """See `VersionTransform`. Captures the plans of layouts while the engine stands still.

    Args:
        model: The rank's model.
        live: Its parameters.
        views: Of segments and parameters.
        segments: What the rank maps.
        ops: Prepares, writes and compares the parameters where they are.
        threads: What digests in a pause.
        plans: None yet.
    """

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
        """Make the plan of a layout; returns what the reply tells. The engine is paused meanwhile.

        Args:
            staged: A version of the layout.
            socket: The segment socket.

        Raises:
            PlanRefusedError: The model cannot take this layout.
        """
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
        """Take note of what no rank loads of a layout; see `PlanCache.learn`."""
        self._plans.learn(layout.signature, unloaded)

    def check(self, layout: Layout, *, whole: bool) -> str:
        """Accept tensors of a version, some or as a whole, by names, dtypes and shapes.

        Returns the names, as `name_sets` packs them, of those that this rank has no place for.

        Raises:
            PlanRefusedError: The model cannot take them.
            RefusedCallError: Nothing is adopted yet.
        """
        base = self._plans.base
        if base is None:
            msg = "no checkpoint is adopted yet"
            raise RefusedCallError(msg)
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
        """See `VersionTransform`.

        Raises:
            NeedsCaptureError: The layout is new.
        """
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

    def prefetch(self, job: Job, socket: str, document: str, live: str) -> None:
        """Read what there is of a version that still comes in, where versions are staged.

        Args:
            job: What it does it for.
            socket: The segment socket.
            document: Segment that tells what has come.
            live: Content digest of what the live parameters are proved to hold; "": not known.
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

    def writer(self, target: Prepared, live: str) -> Writer:
        """See `VersionTransform`: a patch where its base is live, else all of it."""
        own = _own(target)
        writer = self._ops.writer(own, live)
        return self._draft.around(writer, own.content_digest, own.plan, live)

    def invalidate(self, target: Prepared) -> None:
        """See `VersionTransform`."""
        self._ops.invalidate(_own(target))

    def compare(self, target: Prepared, stop: Stop) -> list[str]:
        """See `VersionTransform`."""
        return self._ops.compare(_own(target), stop)

    def _refuse_repacked(self) -> None:
        reason = why_not_plain(self._model)
        if reason is not None:
            raise PlanRefusedError(reason.cause, remedy=reason.remedy)

    def _live_digests(self) -> dict[str, bytes]:
        """Digest every parameter and buffer, on the device where it can; the engine stands."""
        tensors = {name: self._live.tensor(name) for name in self._live.names()}
        found = self._ops.digests(tensors)
        rest = [name for name in tensors if name not in found]

        def digest(index: int) -> None:
            found[rest[index]] = tensor_digest_of(tensors[rest[index]])

        self._threads.each(digest, [tensors[name].nbytes for name in rest])
        return found


def _of_plan(prepared: Prepared | None) -> RankPrepared | None:
    return prepared if isinstance(prepared, RankPrepared) else None


def _own(prepared: Prepared) -> RankPrepared:
    assert isinstance(prepared, RankPrepared)  # noqa: S101 - a rank keeps to one transform
    return prepared
