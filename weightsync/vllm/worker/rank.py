"""What one rank knows and does: plans, prepared versions, and what its live parameters hold."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from weightsync import failpoints
from weightsync.shm.staged_version import StagedDocuments, document_of, read_document
from weightsync.vllm.apply.parallel import SliceThreads, commit_thread_count, yield_cores
from weightsync.vllm.apply.transform import TransformRequest
from weightsync.vllm.plan.in_place import why_not_plain
from weightsync.vllm.plan.live_params import LiveParameters
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.plan_cache import PlanCache
from weightsync.vllm.plan.view_cache import ViewCache
from weightsync.vllm.twin.loader_process import LoaderError
from weightsync.vllm.worker.background import Background
from weightsync.vllm.worker.live_content import LiveContent
from weightsync.vllm.worker.live_digests import changed_since, digest_live
from weightsync.vllm.worker.live_memory import LIVE_WRITERS, serve_attach
from weightsync.vllm.worker.plan_transform import PlanTransform
from weightsync.vllm.worker.rank_job import NAMES, RefusedCallError, refused
from weightsync.vllm.worker.rank_segments import RankSegments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync.shm.staged_version import StagedVersion
    from weightsync.vllm.apply.device_ops import DeviceOps
    from weightsync.vllm.apply.transform import Prepared, VersionTransform
    from weightsync.vllm.twin.twin_transform import TwinTransform
    from weightsync.vllm.worker.live_memory import ModelFacts
    from weightsync.vllm.worker.rank_job import Job

__all__ = ["Rank"]

logger = logging.getLogger(__name__)


class Rank:
    """State of one worker process. Calls come from one thread; a job or two run beside them.

    Args:
        model: The rank's model.
        device: Where its parameters are.
        name: `dp/pp/tp`.
        segment_socket: Where the server's segments are unless a call says otherwise.
        ops: Prepares, writes and compares the parameters where they are.
        ranks: Workers of the engine on this host.
        make_twin: Makes what serves a model that no load plan serves; None: nothing does.
        alone: Whether no other rank loads a tensor that this one does not.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        name: str,
        segment_socket: str,
        ops: DeviceOps,
        ranks: int = 1,
        make_twin: Callable[[], TwinTransform] | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self._model = model
        self._device = device
        self._name = name
        self._segment_socket = segment_socket
        self._ops = ops
        live = LiveParameters(model)
        views = ViewCache(live)
        # What writes in a pause; what runs beside generation has threads of its own.
        self._threads = SliceThreads(commit_thread_count(device, ranks))
        self._documents = StagedDocuments()
        self._segments = RankSegments(views, ops.registrar, self._segments_in_use)
        plans = PlanCache(alone=alone)
        self._plan = PlanTransform(model, live, views, self._segments, ops, self._threads, plans)
        self._make_twin = make_twin
        self._twin: TwinTransform | None = None
        self._prepared: dict[str, Prepared] = {}
        self._live = LiveContent()
        self._background = Background(name, self._socket, ops.enter_background, self._drop)
        self._loads = Background(name, self._socket, yield_cores, lambda _: None)

    def hello(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Tell what this rank is and holds."""
        reason = why_not_plain(self._model)
        about = {"pid": os.getpid(), "device": str(self._device), "plain": reason is None}
        return {**about, "reason": str(reason or ""), **self.state(args)}

    def state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Tell what the live parameters were last proved to hold; "" if unknown or half written.

        With `settle`, which comes before sleep mode, whatever reads ahead or loads is ended and
        counts as busy until it has, and a loader lets go of all that it has taken.
        """
        failpoints.hit("worker.state")
        live = self._live
        return {
            "apply_id": live.apply_id,
            "content_digest": live.proved,
            "dirty": live.dirty,
            "written": live.dirty or live.writes > 0,
            "prepared": sorted(self._prepared),
            "busy": self._settle() if args.get("settle") else self._background.busy,
            "segments": len(self._segments.mappings),
            "transform": self._transform.name,
            **(self._twin.status() if self._twin else {}),
            **self._ops.memory_stats(),
            **LIVE_WRITERS.state(),
        }

    def _settle(self) -> str:
        """Return the name of what still runs; "": nothing, and no loader holds memory."""
        busy, load = self._background.settle(), self._loads.job
        load.cancelled.set()
        if load.running():
            return busy or load.apply_id
        if self._twin is not None:
            self._twin.unload()
        return busy

    @property
    def _transform(self) -> VersionTransform:
        return self._twin or self._plan

    def capture(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Make the load plan of a document's layout. The engine is paused meanwhile.

        The reply's `ignored` are the names that this rank loads nothing from: what all ranks
        ignore is told to each as `unloaded`, when it prepares a version of the layout. Where the
        engine's own checkpoint has no plan, the reply tells that its versions must be loaded, and
        why.

        Raises:
            PlanRefusedError: The model cannot take this layout.
        """
        failpoints.hit("worker.capture")
        socket = self._socket(args)
        staged = self._documents.read(socket, str(args["document"]))
        try:
            return self._plan.capture(staged, socket)
        except PlanRefusedError as error:
            if self._plan.proved or self._make_twin is None:
                raise
            why = {"why": error.cause, "remedy": error.remedy}
            return {"transform": "twin", **why, **refused(error), "error": ""}

    def check(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Tell whether the model takes some tensors of a version, or with `whole` all of it.

        The reply's `unplaced` are the names that this rank has no place for; another one may.
        Names that the adopted checkpoint does not have are shown to the model's own loaders, which
        takes as long as a capture: the server asks once for each.

        Raises:
            PlanRefusedError: The model cannot take these tensors.
            RefusedCallError: Nothing is adopted yet.
        """
        failpoints.hit("worker.check")
        # A part of a version, which nobody reads again.
        layout = read_document(self._socket(args), str(args["document"])).manifest.layout
        whole = bool(args.get("whole"))
        return {"unplaced": (self._twin or self._plan).check(layout, whole=whole)}

    def load(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Start loading a version beside generation; the outcome comes on the status page.

        From then on what this rank makes live was loaded so.

        Raises:
            PlanRefusedError: It cannot load.
            RefusedCallError: Another load is at work, or the group's loaders were ended.
        """
        failpoints.hit("worker.load")
        if self._twin is None:
            if self._make_twin is None:
                msg = "this rank has nothing that loads beside generation"
                raise PlanRefusedError(msg)
            # A plan that the start has not proved may have taken as much as the loader needs.
            self._ops.drop_staging()
            self._twin = self._make_twin()
        twin = self._twin
        if not twin.is_of(args):
            # What the loaders before are at work on is waited for by nobody any more.
            self._loads.job.cancelled.set()
        try:
            twin.begin(args)
        except LoaderError as error:
            raise RefusedCallError(str(error)) from error

        def load(job: Job, asked: Mapping[str, Any]) -> dict[str, Any]:
            path, document = self._socket(asked), str(asked["document"])
            staged = self._documents.read(path, document)
            return twin.load(staged.manifest, path, document, job.cancelled.is_set, job.report)

        self._loads.start(args, load)
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
        live, sent = self._live, self._ops.sent
        writer = self._transform.writer(target, live.proved)
        live.begin(apply_id)
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
            self._transform.invalidate(target)
        done = time.perf_counter()
        if not wrong:
            live.prove(apply_id, target.content_digest)
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
        return self._live.proved

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

    def attach(self, args: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
        """Start handing out where what is live lies; the outcome comes on the status page."""

        def work(job: Job, asked: Mapping[str, Any]) -> dict[str, Any]:
            about = self._name, facts
            return serve_attach(
                asked, self._socket(asked), about, lambda: self._known(job.apply_id)
            )

        self._background.start(args, work)
        return {}

    def unprove(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Take what is live for nothing proved: somebody else writes it from now on."""
        failpoints.hit("worker.unprove")
        self._end_staging()
        self._live.unprove()
        return self.state(args)

    def digest(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Digest what somebody else has written, and take it for whole under a name of its own.

        The engine is paused meanwhile. With `parts`, the reply tells the digest of each.
        """
        failpoints.hit("worker.digest")
        apply_id, begin = str(args["apply_id"]), time.perf_counter()
        # Before: what nobody can write stays as it is read.
        reply: dict[str, Any] = {"apply_id": apply_id, "writing": LIVE_WRITERS.state()["writing"]}
        found = digest_live(self._known(apply_id), self._ops, self._threads)
        self._live.accept(str(args["name"]), found)
        reply |= {"content_digest": self._live.proved, "verify_s": time.perf_counter() - begin}
        return {**reply, "parts": found.parts() if args.get("parts") else {}}

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
        busy, mappings, twin = self._background.busy, self._segments.mappings, self._twin
        if args.get("segments") is not None:
            existing = frozenset(map(str, args["segments"]))
            if not busy:
                gone = (name for name in mappings.ids if document_of(name) not in existing)
                self._segments.unmap(frozenset(gone))
            if twin is not None:
                twin.unmap(existing)
        loaded = twin.mapped if twin is not None else frozenset()
        mapped = sorted(loaded.union(map(document_of, mappings.ids)))
        prepared = sorted(self._prepared)
        return {"prepared": prepared, "segments": len(mapped), "mapped": mapped, "busy": busy}

    def _drop(self, apply_id: str) -> None:
        self._prepared.pop(apply_id, None)

    def _known(self, apply_id: str) -> Prepared:
        target = self._prepared.get(apply_id)
        if target is None:
            msg = f"apply {apply_id} is not prepared on this rank; prepare it first"
            raise RefusedCallError(msg)
        return target

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
        socket = self._socket(args)
        staged = self._documents.read(socket, str(args["document"]))
        _check_content(staged, str(args.get("content_digest", "")))
        self._plan.learn(staged.manifest.layout, str(args.get("unloaded", "")))
        # Without a base the engine stands, and is proved by what the server received: a copy
        # beside it would shorten no pause. What is live already needs none either.
        stage = bool(args.get("base")) and not args.get("compare_live")
        request = TransformRequest(
            job.apply_id,
            staged,
            socket,
            self._base(str(args.get("base", ""))),
            stage,
            str(args.get("ahead", "")),
            job.progress,
        )
        target, report = self._transform.prepare(request, job.cancelled.is_set)
        proved: dict[str, Any] = {"proved": None}
        if args.get("compare_live"):
            # A version without a draft is also live where another one is, which has a draft.
            same = self._live.proved in ("", target.content_digest)
            claim = same and not args.get("proof_only")
            proved = self._compare(target, job.cancelled.is_set, claim=claim)
        self._prepared[job.apply_id] = target
        writer = self._transform.writer(target, self._live.proved)
        about: dict[str, Any] = {"bytes": writer.nbytes, "patched": writer.patched}
        about |= {"transform": self._transform.name}
        return {"phase": "ready", **about, **self._ops.memory_stats(), **report, **proved}

    def _prefetch(self, job: Job, args: dict[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.ahead")
        if self._twin is None:
            document = str(args["document"])
            self._plan.prefetch(job, self._socket(args), document, self._live.proved)
        return {"phase": "ready"}

    def _base(self, apply_id: str) -> Prepared | None:
        """Return what a patch may be based on: what the live parameters are proved to hold."""
        base = self._prepared.get(apply_id)
        if base is None or base.content_digest != self._live.proved:
            return None
        return base

    def _verify(self, job: Job, args: dict[str, Any]) -> dict[str, Any]:
        del args
        target, stop = self._known(job.apply_id), job.cancelled.is_set
        wrong = changed_since(self._live.digests, self._ops, self._threads, stop)
        report = LIVE_WRITERS.state() | {"phase": "ready"}
        if wrong:
            self._live.unprove()
            return report | {"proved": False, "mismatched": wrong[:NAMES]}
        return report | self._compare(target, stop)

    def _compare(
        self, target: Prepared, stop: Callable[[], bool], *, claim: bool = True
    ) -> dict[str, Any]:
        failpoints.hit("worker.verify")
        writes = self._live.writes
        wrong = self._transform.compare(target, stop)
        live = self._live
        if live.writes != writes or writes % 2:
            msg = "the parameters were written while they were compared; compare again"
            raise RefusedCallError(msg)
        if not wrong and claim:
            live.prove(target.apply_id, target.content_digest)
        elif wrong and live.content_digest == target.content_digest:
            live.content_digest, live.dirty = "", True
        return {"proved": not wrong, "mismatched": wrong[:NAMES]}


def _check_content(staged: StagedVersion, expected: str) -> None:
    if expected and staged.manifest.content_digest != expected:
        msg = (
            f"content {staged.manifest.content_digest} is staged on this node, not {expected}; "
            "restart the weightsync-server of this node"
        )
        raise RefusedCallError(msg)
