"""What one rank knows and does: plans, prepared versions, and what its live parameters hold."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightsync import failpoints
from weightsync.model.manifest import Layout
from weightsync.vllm.apply.parallel import Crew, aside_size, crew_size, stand_aside
from weightsync.vllm.apply.prepared import Plans, Prepared, find_plan, prepare, read_document
from weightsync.vllm.cuda.cuda_ops import Made
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
from weightsync.vllm.plan.staged_tensors import Mappings, Sources
from weightsync.vllm.plan.view_cache import Views
from weightsync.vllm.worker.arrival_order import open_arrivals, turns
from weightsync.vllm.worker.background import Background
from weightsync.vllm.worker.rank_job import NAMES, RefusedCallError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync.vllm.cuda.cuda_ops import Device
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.worker.rank_job import Job

__all__ = ["Rank"]

logger = logging.getLogger(__name__)


@dataclass
class _Holding:
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
        ranks: Workers of the engine on this host.
        beside: What it has on its device; None: its parameters are written by the host.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        name: str,
        segment_socket: str,
        ranks: int = 1,
        beside: Device | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._name = name
        self._segment_socket = segment_socket
        self._live = LiveParameters(model)
        self._views = Views(self._live)
        self._crew = Crew(crew_size(device, ranks))
        # What runs beside generation: some threads, and on a GPU a stream of their own.
        self._aside = Crew(aside_size(device, ranks), self._stand_aside)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch annotates nothing there
        self._plans = Plans()
        self._prepared: dict[str, Prepared] = {}
        self._beside = beside
        self._mappings = Mappings(beside.registrar if beside else None)
        self._memory = threading.Lock()
        self._unmapping: threading.Thread | None = None
        #: Segments that are read ahead, which may be gone for the server at any time.
        self._reading: tuple[str, ...] = ()
        self._holding = _Holding()
        self._background = Background(name, self._socket, self._stand_aside, self._drop)

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
        held = self._holding
        return {
            "apply_id": held.apply_id,
            "content_digest": held.proved,
            "dirty": held.dirty,
            "prepared": sorted(self._prepared),
            "busy": self._background.settle() if args.get("settle") else self._background.busy,
            "segments": len(self._mappings),
            **self._told(),
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
        if self._beside is not None:
            self._beside.warm_up(plan)
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
        self._background.start(args, self._prepare, stages=True)
        return {}

    def ahead(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Start reading a version that still comes in; the next job ends it.

        A prepare that names its `apply_id` as `ahead` reads the rest, and waits for what all of it
        is just found to change.
        """
        self._background.start(args, self._read_ahead, stages=True, ahead=True)
        return {}

    def commit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Write a prepared version, then prove that the live parameters hold what was written.

        Where they are proved to hold the version that its patch is based on, that is the patch; in
        every other case all of it.
        """
        apply_id = str(args["apply_id"])
        ready = self._known(apply_id)
        failpoints.hit("worker.commit")
        self._end_staging()
        if self._beside is not None:
            self._beside.written()
        held, sent = self._holding, self._sent
        work = ready.work(held.proved)
        held.apply_id, held.content_digest, held.dirty = apply_id, "", True
        begin = time.perf_counter()
        held.writes += 1
        try:
            with torch.inference_mode():
                work.write(self._crew)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                written = time.perf_counter()
                failpoints.hit("worker.written")
                wrong = work.mismatched(self._crew)
        finally:
            held.writes += 1
        done = time.perf_counter()
        if not wrong:
            held.content_digest, held.dirty = ready.content_digest, False
        reply = {
            "apply_id": apply_id,
            "content_digest": held.content_digest,
            "written_bytes": work.nbytes,
            "patched": work.patched,
            "compared_all": work.compared_all,
            "h2d_bytes": self._sent - sent,
            "commit_s": written - begin,
            "verify_s": done - written,
            "mismatched": wrong[:NAMES],
            **self._told(),
        }
        # Its base is gone, or soon will be.
        ready.patch = None
        if wrong:
            text = f"{len(wrong)} parameters do not hold what was written, first {wrong[0]}"
            return {**reply, "ok": False, "error": text}
        return reply

    @property
    def proved(self) -> str:
        """Content digest of what the live parameters hold whole; "" if unknown or half written."""
        return self._holding.proved

    def holds(self, apply_id: str) -> bool:
        """Whether the live parameters are proved to hold that prepared version."""
        ready = self._prepared.get(apply_id)
        return ready is not None and ready.content_digest == self.proved

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
        busy = self._background.busy
        if args.get("segments") is not None and not busy:
            self._unmap_aside(self._mappings.ids.difference(map(str, args["segments"])))
        mapped = sorted(self._mappings.ids)
        prepared = sorted(self._prepared)
        return {"prepared": prepared, "segments": len(mapped), "mapped": mapped, "busy": busy}

    def _drop(self, apply_id: str) -> None:
        self._prepared.pop(apply_id, None)

    def _known(self, apply_id: str) -> Prepared:
        ready = self._prepared.get(apply_id)
        if ready is None:
            msg = f"apply {apply_id} is not prepared on this rank; prepare it first"
            raise RefusedCallError(msg)
        return ready

    def _refuse_repacked(self) -> None:
        reason = why_not_plain(self._model)
        if reason:
            raise PlanRefusedError(reason)

    def _live_digests(self) -> dict[str, bytes]:
        """Digest every parameter and buffer, on the device where it can; the engine stands."""
        tensors = {name: self._live.tensor(name) for name in self._live.names()}
        found = self._beside.digests_of(tensors) if self._beside is not None else {}
        rest = [name for name in tensors if name not in found]

        def digest(index: int) -> None:
            found[rest[index]] = tensor_digest_of(tensors[rest[index]])

        self._crew.each(digest, [tensors[name].nbytes for name in rest])
        return found

    def _socket(self, args: Mapping[str, Any]) -> str:
        return str(args.get("socket") or self._segment_socket)

    def set_room(self, size: int) -> None:
        """Give the rank another budget of device memory; no job runs."""
        if self._beside is not None:
            self._beside.set_room(size)

    @property
    def _sent(self) -> int:
        return self._beside.sent if self._beside is not None else 0

    def _told(self) -> dict[str, int]:
        return self._beside.told() if self._beside is not None else {}

    def _end_staging(self) -> None:
        """See to it that no prepare writes what a commit is about to read on the device."""
        job = self._background.job
        if self._beside is not None and job.stages and job.running():
            job.end()

    def _unmap_aside(self, gone: frozenset[str]) -> None:
        if self._beside is None:
            self._unmap(gone)
        elif gone and (self._unmapping is None or not self._unmapping.is_alive()):
            # Taking gigabytes from a device lasts longer than a step.
            self._unmapping = threading.Thread(
                target=self._unmap, args=(gone,), name="weightsync", daemon=True
            )
            self._unmapping.start()

    def _unmap(self, gone: frozenset[str]) -> None:
        # A prepare that begins meanwhile maps none of these, for they do not exist any more.
        with self._memory:
            kept = list(self._prepared.values())
            gone = gone.difference(self._reading, *(ready.segments for ready in kept))
            self._views.forget(gone)
            self._mappings.unmap(gone)

    def _stand_aside(self) -> None:
        stand_aside()
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def _prepare(self, job: Job, args: dict[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.prepare")
        self._refuse_repacked()
        socket = self._socket(args)
        staged = read_document(socket, str(args["document"]))
        layout = staged.manifest.layout

        def uniform(name: str) -> bool:
            with self._memory:
                segments = self._mappings.map(socket, staged.segments)
                return Sources(layout, segments).uniform(name)

        plan = find_plan(staged, self._plans, uniform)
        failpoints.hit("worker.map")
        with self._memory:
            segments = self._mappings.map(socket, staged.segments)
            read = self._views.read(layout, staged.segments, plan, segments)
        stop = job.cancelled.is_set
        ready = prepare(job.apply_id, staged, plan, read, self._views.targets(plan))
        sent = self._sent
        made = self._make_ready(ready, job, args)
        compare, claim = args.get("compare_live"), not args.get("proof_only")
        proved = self._compare(ready, stop, claim=claim) if compare else {"proved": None}
        self._prepared[job.apply_id] = ready
        work = ready.work(self._holding.proved)
        size = {"slices": len(plan.slices), "bytes": work.nbytes, "patched": work.patched}
        told = {"h2d_bytes": self._sent - sent + made.ahead, **self._told()}
        told |= made.proved.told(layout)
        return {"phase": "ready", **size, **told, **proved}

    def _read_ahead(self, job: Job, args: dict[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.ahead")
        socket = self._socket(args)
        with open_arrivals(socket, str(args["document"])) as reader:
            known = self._plans.by_signature
            plan = known.get(reader.layout.signature) if reader is not None else None
            if reader is None or plan is None or self._beside is None:
                # It is prepared as a whole, once it is complete.
                return {"phase": "ready"}
            try:
                with self._memory:
                    self._reading = reader.segments
                    segments = self._mappings.map(socket, reader.segments)
                    read = self._views.read(reader.layout, reader.segments, plan, segments)
                self._beside.read_ahead(
                    job.apply_id,
                    reader.segments,
                    plan,
                    self._views.targets(plan),
                    read,
                    reader.layout,
                    turns(reader, job),
                    self._holding.proved,
                    job.cancelled.is_set,
                    lambda: job.unwanted,
                )
            finally:
                self._reading = ()
        return {"phase": "ready"}

    def _make_ready(self, ready: Prepared, job: Job, args: Mapping[str, Any]) -> Made:
        stop = job.cancelled.is_set
        base = self._base(str(args.get("base", "")), ready.plan)
        if self._beside is not None:
            # Without a base the engine stands, and is proved by what the server received: a copy
            # beside it would shorten no pause. What is live already needs none either.
            staging = bool(args.get("base")) and not args.get("compare_live")
            ahead = str(args.get("ahead", ""))
            return self._beside.make_ready(
                ready, base, self._aside, stop, job.tell, staging=staging, ahead=ahead
            )
        if base:
            ready.find_patch(base, self._aside, stop)
        if ready.patch is None:
            ready.expect_all(self._aside, stop)
        return Made()

    def _base(self, apply_id: str, plan: LoadPlan) -> Prepared | None:
        """Return what a patch may be based on: what the live parameters are proved to hold."""
        base = self._prepared.get(apply_id)
        if base is None or base.plan is not plan or base.content_digest != self._holding.proved:
            return None
        return base

    def _verify(self, job: Job, args: dict[str, Any]) -> dict[str, Any]:
        del args
        ready = self._known(job.apply_id)
        return {"phase": "ready", **self._compare(ready, job.cancelled.is_set)}

    def _compare(
        self, ready: Prepared, stop: Callable[[], bool], *, claim: bool = True
    ) -> dict[str, Any]:
        failpoints.hit("worker.verify")
        writes = self._holding.writes
        found = self._beside.digests(ready.targets, stop) if self._beside is not None else {}
        wrong = ready.mismatched(self._aside, stop, found)
        held = self._holding
        if held.writes != writes or writes % 2:
            msg = "the parameters were written while they were compared; compare again"
            raise RefusedCallError(msg)
        if not wrong and claim:
            held.apply_id, held.content_digest = ready.apply_id, ready.content_digest
            held.dirty = False
        elif wrong and held.content_digest == ready.content_digest:
            held.content_digest, held.dirty = "", True
        return {"proved": not wrong, "mismatched": wrong[:NAMES]}
