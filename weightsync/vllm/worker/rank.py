"""What one rank knows and does: plans, prepared versions, and what its live parameters hold."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weightsync import failpoints
from weightsync.model.manifest import Layout
from weightsync.vllm.apply.device_ops import PrefetchRequest, PrepareRequest
from weightsync.vllm.apply.parallel import SliceThreads, commit_thread_count
from weightsync.vllm.apply.prepared import describe
from weightsync.vllm.plan.capture import capture_plan, unplaced
from weightsync.vllm.plan.in_place import why_not_plain
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.live_params import LiveParameters
from weightsync.vllm.plan.load_plan import (
    PlanRefusedError,
    check_coverage,
    check_known,
    check_places,
)
from weightsync.vllm.plan.load_watch import check_complete
from weightsync.vllm.plan.plan_cache import PlanCache, find_plan
from weightsync.vllm.plan.view_cache import ViewCache
from weightsync.vllm.worker.arrival_order import open_arrivals, turns
from weightsync.vllm.worker.background import Background
from weightsync.vllm.worker.rank_job import NAMES, RefusedCallError
from weightsync.vllm.worker.segment_mappings import RankSegments, read_document

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync.vllm.apply.device_ops import DeviceOps, Prep
    from weightsync.vllm.apply.prepared import RankPrepared
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.worker.rank_job import Job

__all__ = ["Rank"]

logger = logging.getLogger(__name__)


@dataclass
class _LiveState:
    """What the live parameters were last proved to hold."""

    apply_id: str = ""
    content_digest: str = ""
    dirty: bool = False
    #: Rises before and after every write, so that a comparison notices one that ran meanwhile.
    writes: int = 0

    @property
    def proved(self) -> str:
        """Content digest of what they hold whole; "" if unknown or half written."""
        return "" if self.dirty else self.content_digest


class Rank:
    """State of one worker process. Calls come from one thread; one job runs beside them.

    Args:
        model: The rank's model.
        device: Where its parameters are.
        name: `dp/pp/tp`.
        segment_socket: Where the server's segments are unless a call says otherwise.
        ops: Prepares, writes and compares the parameters where they are.
        ranks: Workers of the engine on this host.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        name: str,
        segment_socket: str,
        ops: DeviceOps,
        ranks: int = 1,
    ) -> None:
        self._model = model
        self._device = device
        self._name = name
        self._segment_socket = segment_socket
        self._live = LiveParameters(model)
        self._views = ViewCache(self._live)
        # What writes in a pause; what runs beside generation has threads of its own.
        self._threads = SliceThreads(commit_thread_count(device, ranks))
        self._plans = PlanCache()
        self._prepared: dict[str, RankPrepared] = {}
        self._ops = ops
        self._segments = RankSegments(self._views, ops.registrar, self._segments_in_use)
        self._live_state = _LiveState()
        self._background = Background(name, self._socket, ops.enter_background, self._drop)

    def hello(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Tell what this rank is and holds."""
        reason = why_not_plain(self._model)
        about = {"pid": os.getpid(), "device": str(self._device), "plain": not reason}
        return {**about, "reason": reason, **self.state(args)}

    def state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Tell what the live parameters were last proved to hold; "" if unknown or half written.

        With `settle` whatever reads ahead is ended, and counts as busy until it has.
        """
        failpoints.hit("worker.state")
        live = self._live_state
        return {
            "apply_id": live.apply_id,
            "content_digest": live.proved,
            "dirty": live.dirty,
            "prepared": sorted(self._prepared),
            "busy": self._background.settle() if args.get("settle") else self._background.busy,
            "segments": len(self._segments.mappings),
            **self._ops.memory_stats(),
        }

    def capture(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Make the load plan of a document's layout. The engine is paused meanwhile.

        Raises:
            PlanRefusedError: The model cannot take this layout.
        """
        failpoints.hit("worker.capture")
        self._refuse_repacked()
        layout = read_document(self._socket(args), str(args["document"])).manifest.layout
        self._plans.check(layout.signature)
        with self._plans.remembering(layout.signature):
            plan, seconds = capture_plan(self._model, self._live, layout, self._live_digests)
            if self._plans.base is not None:
                check_coverage(plan, self._plans.base)
            else:
                check_complete(self._model, map(self._live.tensor, plan.written))
        self._plans.add(plan)
        self._ops.warm_up(plan)
        return {"seconds": seconds, "slices": len(plan.slices)}

    def check(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Tell whether the model takes some tensors of a version, by names, dtypes and shapes.

        Names that the adopted checkpoint does not have are shown to the model's own loaders, which
        takes as long as a capture: the server asks once for each.

        Raises:
            PlanRefusedError: The model cannot take these tensors.
            RefusedCallError: Nothing is adopted yet.
        """
        failpoints.hit("worker.check")
        base = self._plans.base
        if base is None:
            msg = "no checkpoint is adopted yet"
            raise RefusedCallError(msg)
        layout = read_document(self._socket(args), str(args["document"])).manifest.layout
        known = {tensor.name for tensor in check_known(layout, base)}
        others = tuple(tensor for tensor in layout.tensors if tensor.name not in known)
        if others:
            part = Layout(layout.shards, others)
            check_places(part, base, unplaced(self._model, self._live, part, self._live_digests))
        return {}

    def prepare(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Start making a version ready; the outcome comes on the status page."""
        self._background.start(args, self._prepare, stages=self._ops.stages)
        return {}

    def prefetch(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Start reading a version that still comes in; the next job ends it.

        A prepare that names its `apply_id` as `ahead` reads the rest, and waits for what all of it
        is just found to change.
        """
        self._background.start(args, self._prefetch, stages=self._ops.stages, prefetches=True)
        return {}

    def commit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Write a prepared version, then prove that the live parameters hold what was written.

        Where they are proved to hold the version that its patch is based on, that is the patch; in
        every other case all of it.
        """
        apply_id = str(args["apply_id"])
        target = self._known(apply_id)
        failpoints.hit("worker.commit")
        self._end_staging()
        live, sent = self._live_state, self._ops.sent
        writer = self._ops.writer(target, live.proved)
        live.apply_id, live.content_digest, live.dirty = apply_id, "", True
        begin = time.perf_counter()
        live.writes += 1
        try:
            with torch.inference_mode():
                writer.write(self._threads)
                self._ops.synchronize()
                written = time.perf_counter()
                failpoints.hit("worker.written")
                wrong = writer.verify(self._threads)
        finally:
            live.writes += 1
            self._ops.invalidate(target)
        done = time.perf_counter()
        if not wrong:
            live.content_digest, live.dirty = target.content_digest, False
        reply = {
            "apply_id": apply_id,
            "content_digest": live.content_digest,
            "written_bytes": writer.nbytes,
            "patched": writer.patched,
            "compared_all": writer.compared_all,
            "h2d_bytes": self._ops.sent - sent,
            "commit_s": written - begin,
            "verify_s": done - written,
            "mismatched": wrong[:NAMES],
            **self._ops.memory_stats(),
        }
        if wrong:
            text = f"{len(wrong)} parameters do not hold what was written, first {wrong[0]}"
            return {**reply, "ok": False, "error": text}
        return reply

    @property
    def proved(self) -> str:
        """Content digest of what the live parameters hold whole; "" if unknown or half written."""
        return self._live_state.proved

    def holds(self, apply_id: str) -> bool:
        """Whether the live parameters are proved to hold that prepared version."""
        target = self._prepared.get(apply_id)
        return target is not None and target.content_digest == self.proved

    def verify(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Start digesting the live parameters again; the outcome comes on the status page.

        With `gives_way`, the next job ends it.
        """
        self._known(str(args["apply_id"]))
        self._background.start(args, self._verify)
        return {}

    def release(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Forget prepared versions that are not kept.

        Segments stay mapped, because mapping them again is slow, unless `segments` is given: then
        those that it does not name and that no kept version uses are unmapped, on a device after
        the reply, beside a job not at all. Only what `mapped` does not tell has been unmapped, and
        while it is `busy` a job may map more.
        """
        failpoints.hit("worker.release")
        keep = set(map(str, args["keep"]))
        job = self._background.job
        if job.apply_id not in keep:
            job.cancelled.set()
        for apply_id in set(self._prepared) - keep:
            # A job that was cancelled takes back its own.
            self._prepared.pop(apply_id, None)
        busy, mappings = self._background.busy, self._segments.mappings
        if args.get("segments") is not None and not busy:
            self._segments.unmap(mappings.ids.difference(map(str, args["segments"])))
        mapped = sorted(mappings.ids)
        prepared = sorted(self._prepared)
        return {"prepared": prepared, "segments": len(mapped), "mapped": mapped, "busy": busy}

    def _drop(self, apply_id: str) -> None:
        self._prepared.pop(apply_id, None)

    def _known(self, apply_id: str) -> RankPrepared:
        target = self._prepared.get(apply_id)
        if target is None:
            msg = f"apply {apply_id} is not prepared on this rank; prepare it first"
            raise RefusedCallError(msg)
        return target

    def _refuse_repacked(self) -> None:
        reason = why_not_plain(self._model)
        if reason:
            raise PlanRefusedError(reason)

    def _live_digests(self) -> dict[str, bytes]:
        """Digest every parameter and buffer, on the device where it can; the engine stands."""
        tensors = {name: self._live.tensor(name) for name in self._live.names()}
        found = self._ops.digests(tensors)
        rest = [name for name in tensors if name not in found]

        def digest(index: int) -> None:
            found[rest[index]] = tensor_digest_of(tensors[rest[index]])

        self._threads.each(digest, [tensors[name].nbytes for name in rest])
        return found

    def _socket(self, args: Mapping[str, Any]) -> str:
        return str(args.get("socket") or self._segment_socket)

    def set_budget(self, size: int) -> None:
        """Give the rank another budget of device memory, bytes; no job runs."""
        self._ops.set_budget(size)

    def _end_staging(self) -> None:
        """See to it that no prepare writes what a commit is about to read on the device."""
        job = self._background.job
        if job.stages and job.running():
            job.end()

    def _segments_in_use(self) -> set[str]:
        kept = list(self._prepared.values())
        return {segment for target in kept for segment in target.segments}

    def _prepare(self, job: Job, args: dict[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.prepare")
        self._refuse_repacked()
        socket = self._socket(args)
        staged = read_document(socket, str(args["document"]))
        layout = staged.manifest.layout
        uniform = partial(self._segments.uniform, socket, layout, staged.segments)
        plan = find_plan(staged.manifest, self._plans, uniform)
        failpoints.hit("worker.map")
        read = self._segments.read(socket, layout, staged.segments, plan)
        target = describe(job.apply_id, staged, plan, read, self._views.targets(plan))
        sent = self._ops.sent
        prep = self._make_ready(target, job, args)
        proved: dict[str, Any] = {"proved": None}
        if args.get("compare_live"):
            claim = not args.get("proof_only")
            proved = self._compare(target, job.cancelled.is_set, claim=claim)
        self._prepared[job.apply_id] = target
        writer = self._ops.writer(target, self._live_state.proved)
        report = {"slices": len(plan.slices), "bytes": writer.nbytes, "patched": writer.patched}
        report |= {"h2d_bytes": self._ops.sent - sent + prep.prefetched, **self._ops.memory_stats()}
        report |= prep.proof.report(layout)
        return {"phase": "ready", **report, **proved}

    def _prefetch(self, job: Job, args: dict[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.ahead")
        socket = self._socket(args)
        with open_arrivals(socket, str(args["document"])) as reader:
            known = self._plans.by_signature
            plan = known.get(reader.layout.signature) if reader is not None else None
            if reader is None or plan is None or not self._ops.stages:
                # It is prepared as a whole, once it is complete.
                return {"phase": "ready"}
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
                    self._live_state.proved,
                    lambda: job.unwanted,
                )
                self._ops.prefetch(request, job.cancelled.is_set)
        return {"phase": "ready"}

    def _make_ready(self, target: RankPrepared, job: Job, args: Mapping[str, Any]) -> Prep:
        base = self._base(str(args.get("base", "")), target.plan)
        # Without a base the engine stands, and is proved by what the server received: a copy
        # beside it would shorten no pause. What is live already needs none either.
        stage = bool(args.get("base")) and not args.get("compare_live")
        ticket = str(args.get("ahead", ""))
        request = PrepareRequest(target, base, job.progress, stage, ticket)
        return self._ops.prepare(request, job.cancelled.is_set)

    def _base(self, apply_id: str, plan: LoadPlan) -> RankPrepared | None:
        """Return what a patch may be based on: what the live parameters are proved to hold."""
        base = self._prepared.get(apply_id)
        if base is None or base.plan is not plan or base.content_digest != self._live_state.proved:
            return None
        return base

    def _verify(self, job: Job, args: dict[str, Any]) -> dict[str, Any]:
        del args
        target = self._known(job.apply_id)
        return {"phase": "ready", **self._compare(target, job.cancelled.is_set)}

    def _compare(
        self, target: RankPrepared, stop: Callable[[], bool], *, claim: bool = True
    ) -> dict[str, Any]:
        failpoints.hit("worker.verify")
        writes = self._live_state.writes
        wrong = self._ops.compare(target, stop)
        live = self._live_state
        if live.writes != writes or writes % 2:
            msg = "the parameters were written while they were compared; compare again"
            raise RefusedCallError(msg)
        if not wrong and claim:
            live.apply_id, live.content_digest = target.apply_id, target.content_digest
            live.dirty = False
        elif wrong and live.content_digest == target.content_digest:
            live.content_digest, live.dirty = "", True
        return {"proved": not wrong, "mismatched": wrong[:NAMES]}
