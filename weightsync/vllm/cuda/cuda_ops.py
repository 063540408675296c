"""Parameters on a GPU: versions are staged in its memory, and found, written and compared there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from weightsync.gpu.device_kernels import Kernels
from weightsync.model.dtypes import torch_dtype
from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.apply.device_ops import (
    Exchange,
    MemoryRegistrar,
    PrefetchRequest,
    PrepareRequest,
    PrepareResult,
    RankPrepared,
    StagingProof,
    Stop,
)
from weightsync.vllm.apply.host_ops import ExpectedDigests
from weightsync.vllm.apply.host_params import find_between
from weightsync.vllm.apply.parallel import SliceThreads, background_thread_count, yield_cores
from weightsync.vllm.apply.writes import ParamWriter
from weightsync.vllm.cuda.cuda_runtime import Registrar, Runtime
from weightsync.vllm.cuda.device_patch import DevicePatch, PatchFinder, fill, fill_sent, groups_of
from weightsync.vllm.cuda.memory_budget import Arena, MemoryBudget, lay_out
from weightsync.vllm.cuda.prefetched import IpcCopier, IpcMappings, PrefetchedBlocks
from weightsync.vllm.cuda.scatter import Scatter, Scatters, SpanExchange, launch_of
from weightsync.vllm.cuda.staged_write import Direct, Staged, StagedPlan, send_blocks
from weightsync.vllm.cuda.staging_proof import Proof, digests_of, small_digests
from weightsync.vllm.cuda.uploader import CHUNK, ReadProgress, StreamThrottle, Uploader
from weightsync.vllm.env import Amount
from weightsync.vllm.plan.live_params import LiveParameters, Targets
from weightsync.vllm.plan.load_plan import LoadPlan, Slice, Strides

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key", int, str)
#: Truth values that are compared at a time; they stay in the device's cache. On an H200 16 MiB are
#: compared at 3.34 TB/s of both sides, 32 MiB at 3.59; a bare read reaches 4.2.
_MASK = 32 << 20
#: What is held whatever the room is, to convert, cut and compare.
_SCRATCH = 2 * CHUNK + _MASK


@dataclass(frozen=True)
class _Ready:
    """What was made ready of a version; each is None if it is not there.

    `staged` writes all of it from staging memory, and `patch` what changes since the version that
    was live at the prepare.
    """

    staged: Staged | None
    patch: DevicePatch | None


class CudaOps:
    """Stages and finds on a stream of its own, one version at a time; see `DeviceOps`.

    What is staged or found of a version holds until another one is prepared or prefetched; then it
    is written from host memory. `amount` is how much memory the user gave it, None what vLLM
    leaves; `share` is the part of the device that vLLM may take, and `ranks` counts the engine's
    workers on this host.
    """

    stages = True

    def __init__(
        self, device: torch.device, amount: Amount | None, share: float, ranks: int = 1
    ) -> None:
        cuda = device.type == "cuda"
        runtime = Runtime.find() if cuda else None
        self.device = device
        self.registrar: MemoryRegistrar | None = Registrar(device, runtime) if cuda else None
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]  # torch annotates nothing there
        self._threads = SliceThreads(background_thread_count(device, ranks), self.enter_background)
        self._budget = MemoryBudget(device, amount, share)
        self._arena = Arena(self._budget)
        scratch = torch.empty(_SCRATCH, dtype=torch.uint8, device=device)
        self._kernels = Kernels.find(device)
        self._scatters = Scatters(self._budget, device, self._kernels)
        self._mask = scratch[2 * CHUNK :].view(torch.bool)
        self._finder = PatchFinder()
        self._uploader = Uploader(scratch[: 2 * CHUNK], runtime)
        # Of the plan that was used last.
        self._plan: StagedPlan | None = None
        self._expected = ExpectedDigests()
        # Of one version at most: the one that lies in staging memory.
        self._ready: WeakKeyDictionary[RankPrepared, _Ready] = WeakKeyDictionary()
        self._prefetched: PrefetchedBlocks | None = None

    @property
    def sent(self) -> int:
        return self._uploader.sent

    def memory_stats(self) -> dict[str, int]:
        return {"device_room": self._budget.limit, "device_used": self._budget.used + _SCRATCH}

    def drop_staging(self) -> None:
        """See `DeviceOps`: also what torch would keep of it, for another process needs it."""
        self.set_budget(self._budget.limit)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def set_budget(self, size: int) -> None:
        self._ready.clear()
        self._prefetched = None
        if self._plan is not None:
            self._plan.drop()
        self._arena.drop()
        self._scatters.arena.drop()
        self._budget.limit = size

    def enter_background(self) -> None:
        yield_cores()
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    @torch.inference_mode()
    def warm_up(self, plan: LoadPlan) -> None:
        pairs = {
            (torch_dtype(plan.tensors[item.tensor][0]), torch_dtype(plan.param_dtypes[item.param]))
            for item in plan.slices
        }
        for of, to in pairs:
            if of is not None and to is not None:
                warm_up(of, to, self._uploader, self._mask, self._kernels)

    @torch.inference_mode()
    def prefetch(self, request: PrefetchRequest, stop: Stop) -> None:
        self._ready.clear()
        begun, self._prefetched = self._prefetched, None
        plan = self._plan_of(request.plan, request.targets)
        blocks = plan.blocks
        memory = self._arena.reserve(blocks.size)
        # A source that was copied was copied before its bytes had come.
        if memory is None or request.read.copied:
            return
        names = request.ticket, request.segments, request.targets, memory
        if begun is None or not begun.is_of(*names):
            begun = PrefetchedBlocks(*names)
        self._prefetched = begun
        # What it was found with is about to be used again.
        begun.forget_patch()
        proof = plan.proof(memory)
        pace = StreamThrottle(self.device)
        with IpcMappings.until_done(memory) as mappings:
            sent = proof.begin if proof is not None else _nothing
            copier = None
            if proof is not None:
                copier = IpcCopier(mappings, request.layout, request.plan, proof)
            arrivals, read = request.arrivals, request.read
            begun.fill(blocks, read, arrivals, self._uploader, pace, stop, sent, copier)
        if request.live and len(begun.there) == len(blocks.all):
            staged = plan.staged(memory)
            begun.patch = self._found_here(staged, request.live, request.unwanted)
            begun.compared = request.live

    @torch.inference_mode()
    def prepare(self, request: PrepareRequest, stop: Stop) -> PrepareResult:
        target, base = request.target, request.base
        self._ready.clear()
        self._expected.take_proved(target)
        plan = self._plan_of(target.plan, target.targets)
        memory = self._arena.reserve(plan.blocks.size)
        begun, self._prefetched = self._prefetched, None
        if not request.stage:
            return PrepareResult()
        if memory is None:
            logger.info("weightsync: no room on the device for %d bytes", plan.blocks.size)
            patch = self._found_on_host(target, base, stop) if base is not None else None
            self._ready[target] = _Ready(None, patch)
            return PrepareResult()
        names = request.ticket, target.segments, target.targets, memory
        if begun is not None and not begun.is_of(*names):
            begun = None
        proof = plan.proof(memory)
        # What is proved here is not proved elsewhere. What comes after reads device memory only.
        report = request.progress if proof is None else _nothing
        read_progress = ReadProgress(target.turns, len(target.segments), report)
        rest = request, plan, memory, proof, read_progress, stop
        proved = self._staged_and_proved(begun, *rest)
        if proved.unlike and begun is not None and begun.has_ipc_blocks:
            # Its trainer has written to it, or has let go of it, before the rank had read it.
            logger.warning("weightsync: what was copied from a trainer's GPU is read again")
            begun.drop(plan.blocks, target.plan, frozenset(proved.unlike))
            proved = self._staged_and_proved(begun, *rest)
        # A commit uses another stream.
        StreamThrottle(self.device).drain()
        return PrepareResult(begun.sent if begun is not None else 0, proved)

    def _staged_and_proved(
        self,
        begun: PrefetchedBlocks | None,
        request: PrepareRequest,
        plan: StagedPlan,
        memory: torch.Tensor,
        proof: Proof | None,
        read_progress: ReadProgress,
        stop: Stop,
    ) -> StagingProof:
        target, base = request.target, request.base
        there = begun.there if begun is not None else frozenset()
        sent = proof.begin if proof is not None else _nothing
        pace = StreamThrottle(self.device)
        rest = self._uploader, pace, stop, read_progress, there, sent
        send_blocks(plan.blocks, target.sources, memory, *rest)
        staged = plan.staged(memory)
        live = base.content_digest if base is not None else ""
        if live and begun is not None and begun.compared == live:
            patch = begun.patch
        else:
            patch = self._found_here(staged, live, stop) if live else None
        self._ready[target] = _Ready(staged, patch)
        return proof.end(target, stop) if proof is not None else StagingProof()

    def writer(self, target: RankPrepared, live: str) -> ParamWriter:
        ready = self._ready.get(target, _Ready(None, None))
        if ready.patch is not None and ready.patch.base == live:
            return ready.patch
        return ready.staged or self._direct(target, range(len(target.sources)))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def invalidate(self, target: RankPrepared) -> None:
        ready = self._ready.get(target)
        if ready is not None:
            self._ready[target] = _Ready(ready.staged, None)
        if self._prefetched is not None:
            self._prefetched.forget_patch()

    @torch.inference_mode()
    def compare(self, target: RankPrepared, stop: Stop) -> list[str]:
        views = dict(enumerate(target.targets.views()))
        found = digests_of(self._kernels, views, StreamThrottle(self.device), stop)
        return self._expected.mismatched(target, self._threads, stop, found)

    @torch.inference_mode()
    def digests(
        self, tensors: Mapping[_Key, torch.Tensor], stop: Stop | None = None
    ) -> dict[_Key, bytes]:
        pace = StreamThrottle(self.device) if stop is not None else None
        found = digests_of(self._kernels, tensors, pace, stop or bool)
        rest = {key: tensor for key, tensor in tensors.items() if key not in found}
        return found | small_digests(rest)

    def exchange(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Exchange:
        return SpanExchange(self._kernels, pairs)

    def _plan_of(self, plan: LoadPlan, targets: Targets) -> StagedPlan:
        """Return what is staged by; its blocks and views are those of the version before."""
        if self._plan is None or self._plan.targets is not targets:
            if self._plan is not None:
                self._plan.drop()
            self._plan = StagedPlan(plan, targets, self._mask, self._kernels)
        return self._plan

    def _direct(self, target: RankPrepared, indices: Sequence[int]) -> Direct:
        return Direct(
            target.targets,
            target.plan.slices,
            target.sources,
            indices,
            self._uploader,
            self._mask,
            self._expected.known(target),
            self._kernels,
        )

    def _found_here(self, staged: Staged, live: str, stop: Stop) -> DevicePatch | None:
        """Return what turns the live parameters, of that content digest, into what is staged."""
        try:
            return self._searched(staged, live, stop)
        except torch.OutOfMemoryError:
            logger.warning(
                "weightsync: the device has too little memory to find which parameters changed, "
                "so all are copied"
            )
            return None

    def _searched(self, staged: Staged, live: str, stop: Stop) -> DevicePatch | None:
        pace = StreamThrottle(self.device)
        found = self._finder.find(staged, pace, stop)
        if found is None:
            return None
        params = [staged.targets.param(name) for name in staged.targets.names]
        made = self._scatters.make(params, found.counts)
        if made is None:
            return None
        fill(found, made, pace, stop)
        pace.drain()
        rest = Staged(staged.targets, found.dense, staged.memory, self._mask, self._kernels)
        rest.make_views()
        return DevicePatch(live, staged.targets, list(made.values()), rest)

    def _found_on_host(
        self, target: RankPrepared, base: RankPrepared, stop: Stop
    ) -> DevicePatch | None:
        if not self._budget.limit or any(item.cast for item in target.plan.slices):
            # What is converted on the device can differ from what the host would make of it.
            return None
        found = find_between(base, target, self._threads, stop)
        if found is None:
            return None
        targets = target.targets
        counts: dict[int, int] = {}
        for change in found.changes.values():
            width = change.values.element_size()
            counts[width] = counts.get(width, 0) + change.values.numel()
        made = self._scatters.make([targets.param(name) for name in targets.names], counts)
        if made is None:
            return None
        changes = (found.changes[index] for index in sorted(found.changes))
        fill_sent(changes, made, targets, self._uploader, StreamThrottle(self.device))
        rest = self._direct(target, sorted(found.dense))
        return DevicePatch(base.content_digest, targets, list(made.values()), rest)


def _nothing(what: object) -> None:
    del what


_SIDE = 64
_WHOLE = Strides(0, (_SIDE, _SIDE), (_SIDE, 1))
#: The left half of a matrix, as row-parallel layers have it.
_HALF = Strides(0, (_SIDE, _SIDE // 2), (_SIDE, 1))


def warm_up(
    of: torch.dtype,
    to: torch.dtype,
    uploader: Uploader,
    mask: torch.Tensor,
    kernels: Kernels | None,
) -> None:
    """Stage, find, write and compare two small tensors in every way, on the current stream.

    The first use of a kernel takes tens of milliseconds, which must be those of no pause.
    """
    device, threads = mask.device, SliceThreads(1)
    model = torch.nn.Module()
    for name, width in (("whole", _SIDE), ("left", _SIDE // 2)):
        model.register_buffer(name, torch.zeros(_SIDE, width, dtype=to, device=device))
    narrow = Strides(0, (_SIDE, _SIDE // 2), (_SIDE // 2, 1))
    slices = [
        Slice("whole", "whole", _WHOLE, _WHOLE, cast=of != to),
        Slice("left", "left", _HALF, narrow, cast=of != to),
    ]
    tensor = torch.zeros(_SIDE, _SIDE, dtype=of)
    # A change whatever it is converted to: the smallest bit would be nothing in another dtype.
    tensor[0, 0] = 1
    sources = [tensor, tensor[:, : _SIDE // 2]]
    targets = Targets(LiveParameters(model), slices)
    blocks = lay_out(slices, {"whole": to, "left": to})
    targets.views()
    memory = torch.zeros(blocks.size, dtype=torch.uint8, device=device)
    pace = StreamThrottle(device)
    reading = ReadProgress([0, 0], 1, lambda _: None)
    send_blocks(blocks, sources, memory, uploader, pace, bool, reading)
    staged = Staged(targets, blocks.all, memory, mask, kernels)
    _patch(staged, pace, threads)
    direct = Direct(targets, slices, sources, range(2), uploader, mask, [None] * 2, None)
    digests_of(kernels, dict(enumerate(targets.views())))
    for work in (staged, direct):
        work.write(threads)
        work.verify(threads)


def _patch(staged: Staged, pace: StreamThrottle, threads: SliceThreads) -> None:
    found = PatchFinder().find(staged, pace, bool)
    if found is None:
        return
    made = {}
    for width, count in found.counts.items():
        row = as_ints(staged.targets.param("whole")).reshape(-1)
        positions = torch.zeros(count, dtype=torch.int64, device=row.device)
        whole = torch.zeros(count, dtype=torch.int64, device=row.device)
        values = row.new_zeros(count)
        launch = launch_of(staged.kernels, row, positions, values)
        made[width] = Scatter(row, positions, values, whole.view(row.dtype)[:count], whole, launch)
    fill(found, made, pace, bool)
    # Also as for what our kernels do not look at.
    plain = Staged(staged.targets, staged.blocks, staged.memory, staged.mask)
    (group,) = groups_of(plain, plain.blocks)
    for scatter in made.values():
        group.finder.count(pace.step)
        chosen, begin = [True] * len(group.pieces), scatter.row.data_ptr()
        group.finder.take(chosen, begin, scatter.positions, scatter.values, pace.step)
        # Both parameters are not in one row here.
        scatter.positions.zero_()
    rest = Staged(staged.targets, found.dense, staged.memory, staged.mask, staged.kernels)
    patch = DevicePatch("", staged.targets, list(made.values()), rest)
    patch.write(threads)
    patch.verify(threads)
