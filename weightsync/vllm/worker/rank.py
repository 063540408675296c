"""What one rank knows and does: plans, prepared versions, and what its live parameters hold."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightsync import failpoints
from weightsync.shm.staged_version import StagedDocuments, StagedVersion, document_of, read_document
from weightsync.vllm.apply.device_ops import DeviceOps, RankPrepared
from weightsync.vllm.apply.parallel import SliceThreads, commit_thread_count, yield_cores
from weightsync.vllm.apply.segment_mappings import RankSegments
from weightsync.vllm.apply.transform import Prepared, TransformRequest, VersionTransform
from weightsync.vllm.plan.live_params import LiveParameters, why_not_plain
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.plan_cache import PlanCache
from weightsync.vllm.plan.staged_tensors import ViewCache
from weightsync.vllm.shadow.loader_process import LoaderError
from weightsync.vllm.worker.live_digests import LiveDigests, changed_since, digest_live
from weightsync.vllm.worker.live_memory import LIVE_WRITERS, ModelFacts, serve_attach
from weightsync.vllm.worker.plan_transform import PlanTransform
from weightsync.vllm.worker.rank_job import NAMES, Background, RankJob, RefusedCallError, refused

if TYPE_CHECKING:
    from weightsync.vllm.shadow.shadow_transform import ShadowTransform


logger = logging.getLogger(__name__)


@dataclass
class LiveContent:
    """What the live parameters were last proved to hold.

    Attributes:
        apply_id: By which it came; "": by none.
        content_digest: Of what they held when that was last proved.
        dirty: They may be half written.
        digests: Of what another process has written, not yet compared with a version; else None.
        known: Of a version that they are proved to hold, taken in that comparison; else None.
        writes: Rises before and after every write, so that a comparison notices one.
    """

    apply_id: str = ""
    content_digest: str = ""
    dirty: bool = False
    digests: LiveDigests | None = None
    known: LiveDigests | None = None
    writes: int = 0

    @property
    def proved(self) -> str:
        """Content digest of what they hold whole; "" if unknown or half written."""
        return "" if self.dirty else self.content_digest

    def known_of(self, target: Prepared) -> LiveDigests | None:
        """Return what was taken of a version, if that is what they are proved to hold."""
        proved = self.known is not None and self.known.target.content_digest == self.proved
        return self.known if proved and self.proved == target.content_digest else None

    def unprove(self) -> None:
        """Know nothing of what they hold, before somebody else writes them."""
        self.begin("")
        self.writes += 2

    def begin(self, apply_id: str) -> None:
        """Take them for half written, by an apply."""
        self.apply_id, self.content_digest, self.dirty = apply_id, "", True
        self.digests = self.known = None

    def accept(self, name: str, digests: LiveDigests) -> None:
        """Take what somebody else has written for whole, under a name in place of a digest."""
        self.content_digest, self.dirty = name, False
        self.digests, self.known = digests, None

    def prove(self, apply_id: str, content_digest: str) -> None:
        self.apply_id, self.content_digest = apply_id, content_digest
        self.dirty, self.digests, self.known = False, None, None


class Rank:
    """State of one worker process. Calls come from one thread; a job or two run beside them.

    `segment_socket` is where the server's segments are unless a call says otherwise. `make_shadow`
    makes what serves a model that no load plan serves. `alone` says whether no other rank loads a
    tensor that this one does not.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        name: str,
        segment_socket: str,
        ops: DeviceOps,
        ranks: int = 1,
        make_shadow: Callable[[], ShadowTransform] | None = None,
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
        self._make_shadow = make_shadow
        self._shadow: ShadowTransform | None = None
        self._prepared: dict[str, Prepared] = {}
        self._live = LiveContent()
        self._background = Background(name, self._socket, ops.enter_background, self._drop)
        self._loads = Background(name, self._socket, yield_cores, lambda _: None)

    def hello(self, args: Mapping[str, Any]) -> dict[str, Any]:
        reason = why_not_plain(self._model)
        about = {"pid": os.getpid(), "device": str(self._device), "plain": reason is None}
        return {**about, "reason": str(reason or ""), **self.state(args)}

    def state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Tell what the live parameters were last proved to hold; "" if unknown or half written.

        With `settle`, which comes before sleep mode, whatever reads ahead or loads is ended, and
        busy until it has, and a loader lets go of all that it has taken.
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
            **(self._shadow.status() if self._shadow else {}),
            **self._ops.memory_stats(),
            **LIVE_WRITERS.state(),
        }

    def _settle(self) -> str:
        """Return the name of what still runs; "": nothing, and no loader holds memory."""
        busy, load = self._background.settle(), self._loads.job
        load.cancelled.set()
        if load.running():
            return busy or load.apply_id
        if self._shadow is not None:
            self._shadow.unload()
        return busy

    @property
    def _transform(self) -> VersionTransform:
        return self._shadow or self._plan

    def capture(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Make the load plan of a document's layout. The engine is paused meanwhile.

        The reply's `ignored` are the names that this rank loads nothing from: what all ranks ignore
        is told to each as `unloaded`, when it prepares a version. Where the engine's own checkpoint
        has no plan, the reply tells why its versions must be loaded.
        """
        failpoints.hit("worker.capture")
        socket = self._socket(args)
        staged = self._documents.read(socket, str(args["document"]))
        try:
            return self._plan.capture(staged, socket)
        except PlanRefusedError as error:
            if self._plan.proved or self._make_shadow is None:
                raise
            why = {"why": error.cause, "remedy": error.remedy}
            return {"transform": "twin", **why, **refused(error), "error": ""}

    def check(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Tell whether the model takes some tensors of a version, or with `whole` all of it.

        The reply's `unplaced` have no place on this rank. Names that the adopted checkpoint does
        not have are shown to the model's own loaders, which takes as long as a capture.
        """
        failpoints.hit("worker.check")
        # A part of a version, which nobody reads again.
        layout = read_document(self._socket(args), str(args["document"])).manifest.layout
        whole = bool(args.get("whole"))
        return {"unplaced": (self._shadow or self._plan).check(layout, whole=whole)}

    def load(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Start loading a version beside generation; the outcome comes on the status page.

        From then on what this rank makes live was loaded so. Raises RefusedCallError if another
        load is at work, or the loaders were ended.
        """
        failpoints.hit("worker.load")
        if self._shadow is None:
            if self._make_shadow is None:
                raise PlanRefusedError("this rank has no loader beside generation")
            # A plan that the start has not proved may have taken as much as the loader needs.
            self._ops.drop_staging()
            self._shadow = self._make_shadow()
        shadow = self._shadow
        if not shadow.is_of(args):
            # What the loaders before are at work on is waited for by nobody any more.
            self._loads.job.cancelled.set()
        try:
            shadow.begin(args)
        except LoaderError as error:
            raise RefusedCallError(str(error)) from error

        def load(job: RankJob, asked: Mapping[str, Any]) -> dict[str, Any]:
            path, document = self._socket(asked), str(asked["document"])
            staged = self._documents.read(path, document)
            return shadow.load(staged.manifest, path, document, job.cancelled.is_set, job.report)

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

        Where the version that its patch is based on is proved to be live, only the patch is
        written.
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
        return self._live.proved

    def holds(self, apply_id: str) -> bool:
        target = self._prepared.get(apply_id)
        return target is not None and target.content_digest == self.proved

    def verify(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Start digesting the live parameters again; the outcome comes on the status page.

        With `gives_way`, the next job ends it. With `quick`, the engine stands still, and digests
        are enough that were taken when they were last compared, if there are any.
        """
        self._known(str(args["apply_id"]))
        self._background.start(args, self._verify)
        return {}

    def attach(self, args: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
        """Start handing out where what is live lies; the outcome comes on the status page."""

        def work(job: RankJob, asked: Mapping[str, Any]) -> dict[str, Any]:
            about = self._name, facts
            return serve_attach(
                asked, self._socket(asked), about, lambda: self._known(job.apply_id)
            )

        self._background.start(args, work)
        return {}

    def unprove(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.unprove")
        self._end_staging()
        self._live.unprove()
        return self.state(args)

    def digest(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Digest what somebody else has written, and take it for whole under a given name.

        The engine is paused meanwhile. With `parts`, the reply has the digest of each.
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

        With `segments`, those that it does not name and that no kept version uses are unmapped, on
        a device after the reply, beside a job not at all; mapping them again is slow. Only what
        `mapped` does not tell has been unmapped, and while it is `busy` a job may map more.
        """
        failpoints.hit("worker.release")
        keep = set(map(str, args["keep"]))
        job = self._background.job
        if job.apply_id not in keep:
            job.cancelled.set()
        for apply_id in set(self._prepared) - keep:
            # A job that was cancelled takes back its own.
            self._prepared.pop(apply_id, None)
        busy, mappings, shadow = self._background.busy, self._segments.mappings, self._shadow
        if args.get("segments") is not None:
            existing = frozenset(map(str, args["segments"]))
            if not busy:
                gone = (name for name in mappings.ids if document_of(name) not in existing)
                self._segments.unmap(frozenset(gone))
            if shadow is not None:
                shadow.unmap(existing)
        loaded = shadow.mapped if shadow is not None else frozenset()
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

    def _prepare(self, job: RankJob, args: dict[str, Any]) -> dict[str, Any]:
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

    def _prefetch(self, job: RankJob, args: dict[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.ahead")
        if self._shadow is None:
            document = str(args["document"])
            self._plan.prefetch(job, self._socket(args), document, self._live.proved)
        return {"phase": "ready"}

    def _base(self, apply_id: str) -> Prepared | None:
        base = self._prepared.get(apply_id)
        if base is None or base.content_digest != self._live.proved:
            return None
        return base

    def _verify(self, job: RankJob, args: dict[str, Any]) -> dict[str, Any]:
        target, live = self._known(job.apply_id), self._live
        report = LIVE_WRITERS.state() | {"phase": "ready"}
        writes = live.writes
        quick = bool(args.get("quick"))
        known = live.known_of(target) if quick else None
        # While the engine stands still, a device need not leave room for what it computes.
        stop = None if quick else job.cancelled.is_set
        wrong = changed_since(known or live.digests, self._ops, self._threads, stop)
        if not wrong and known is None:
            before = None
            if report["unguarded"] and isinstance(target, RankPrepared):
                before = digest_live(target, self._ops, self._threads, stop)
            report |= self._compare(target, job.cancelled.is_set)
            if before is None or not report["proved"]:
                return report
            wrong = changed_since(before, self._ops, self._threads, stop)
            known = before
        self._check_unwritten(writes)
        if wrong:
            live.unprove()
        else:
            live.known = known
        return report | {"proved": not wrong, "mismatched": wrong[:NAMES]}

    def _check_unwritten(self, writes: int) -> None:
        """Refuse a comparison beside which something was written here, since `writes`."""
        if self._live.writes != writes or writes % 2:
            msg = "the parameters were written while they were compared; compare again"
            raise RefusedCallError(msg)

    def _compare(
        self, target: Prepared, stop: Callable[[], bool], *, claim: bool = True
    ) -> dict[str, Any]:
        failpoints.hit("worker.verify")
        writes = self._live.writes
        wrong = self._transform.compare(target, stop)
        self._check_unwritten(writes)
        live = self._live
        if not wrong and claim:
            live.prove(target.apply_id, target.content_digest)
        elif wrong and live.content_digest == target.content_digest:
            live.content_digest, live.dirty = "", True
        return {"proved": not wrong, "mismatched": wrong[:NAMES]}


def _check_content(staged: StagedVersion, expected: str) -> None:
    if expected and staged.manifest.content_digest != expected:
        raise RefusedCallError(
            f"content {staged.manifest.content_digest} is staged on this node, not {expected}; "
            "restart the weightsync-server of this node"
        )
