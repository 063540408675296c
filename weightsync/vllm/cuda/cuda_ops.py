"""Parameters on a GPU: versions are staged in its memory, and found, written and compared there."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from weightsync.gpu.device_kernels import Kernels
from weightsync.model.dtypes import torch_dtype
from weightsync.vllm.apply.device_ops import Prep, StagingProof
from weightsync.vllm.apply.expected_digests import ExpectedDigests
from weightsync.vllm.apply.host_find import find_between
from weightsync.vllm.apply.parallel import SliceThreads, background_thread_count, yield_cores
from weightsync.vllm.cuda.blocks import lay_out
from weightsync.vllm.cuda.cuda_runtime import Registrar, Runtime
from weightsync.vllm.cuda.device_patch import DevicePatch, fill_sent
from weightsync.vllm.cuda.direct_write import Direct
from weightsync.vllm.cuda.ipc_copy import IpcCopier, IpcMappings
from weightsync.vllm.cuda.memory_budget import MemoryBudget
from weightsync.vllm.cuda.patch_find import PatchFinder, fill
from weightsync.vllm.cuda.prefetched import PrefetchedBlocks
from weightsync.vllm.cuda.read_progress import ReadProgress
from weightsync.vllm.cuda.scatter import Scatters
from weightsync.vllm.cuda.staged_write import Arena, Staged, send_blocks
from weightsync.vllm.cuda.staging_proof import Proof
from weightsync.vllm.cuda.tensor_digests import digests_of
from weightsync.vllm.cuda.uploader import CHUNK, StreamThrottle, Uploader
from weightsync.vllm.cuda.warmup import warm_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.vllm.apply.device_ops import MemoryRegistrar, PrefetchRequest, Progress, Stop
    from weightsync.vllm.apply.prepared import RankPrepared
    from weightsync.vllm.apply.writes import Writer
    from weightsync.vllm.cuda.blocks import Blocks
    from weightsync.vllm.env import Amount
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["CudaOps"]

logger = logging.getLogger(__name__)

#: Truth values that are compared at a time; they stay in the device's cache. On an H200 16 MiB are
#: compared at 3.34 TB/s of both sides, 32 MiB at 3.59; a bare read reaches 4.2.
_MASK = 32 << 20
#: What is held whatever the room is, to convert, cut and compare.
_SCRATCH = 2 * CHUNK + _MASK


@dataclass(frozen=True)
class _Ready:
    """What was made ready of a version.

    Attributes:
        staged: Writes all of it from staging memory; None: it is not there.
        patch: What changes since the version that was live at the prepare, if that is little.
    """

    staged: Staged | None
    patch: DevicePatch | None


@dataclass
class _Laid:
    """The blocks of a plan, and what is made for them and kept, whatever is staged in them.

    Attributes:
        targets: The live destinations.
        blocks: Of the plan.
        staged: Writes all of them from staging memory.
        proof: Digests them there.
    """

    targets: Targets
    blocks: Blocks
    staged: Staged | None = None
    proof: Proof | None = None

    def drop(self) -> None:
        """Let go of what looks at staging memory."""
        self.staged = None
        if self.proof is not None:
            self.proof.close()
            self.proof = None


class CudaOps:
    """Stages and finds on a stream of its own, one version at a time; see `DeviceOps`.

    What is staged or found of a version holds until another one is prepared or prefetched; then it
    is written from host memory.

    Args:
        device: Of the rank.
        amount: How much memory the user gave it; None: what vLLM leaves.
        share: Part of the device that vLLM may take.
        ranks: Workers of the engine on this host.
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
        self._laid: _Laid | None = None
        self._expected = ExpectedDigests()
        # Of one version at most: the one that lies in staging memory.
        self._ready: WeakKeyDictionary[RankPrepared, _Ready] = WeakKeyDictionary()
        self._prefetched: PrefetchedBlocks | None = None

    @property
    def sent(self) -> int:
        """Bytes that were sent to the device so far."""
        return self._uploader.sent

    def memory_stats(self) -> dict[str, int]:
        """See `DeviceOps`."""
        return {"device_room": self._budget.limit, "device_used": self._budget.used + _SCRATCH}

    def set_budget(self, size: int) -> None:
        """See `DeviceOps`; what was staged is dropped."""
        self._ready.clear()
        self._prefetched = None
        if self._laid is not None:
            self._laid.drop()
        self._arena.drop()
        self._scatters.drop()
        self._budget.limit = size

    def enter_background(self) -> None:
        """See `DeviceOps`: also on a stream of its own."""
        yield_cores()
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    @torch.inference_mode()
    def warm_up(self, plan: LoadPlan) -> None:
        """See `DeviceOps`."""
        pairs = {
            (torch_dtype(plan.tensors[item.tensor][0]), torch_dtype(plan.param_dtypes[item.param]))
            for item in plan.slices
        }
        known = [(of, to) for of, to in pairs if of is not None and to is not None]
        warm_up(known, self._uploader, self._mask, self._kernels)

    @torch.inference_mode()
    def prefetch(self, request: PrefetchRequest, stop: Stop) -> None:
        """See `DeviceOps`: sends it as far as there is room, and finds what all of it changes.

        Beside generation, on the calling thread's stream.
        """
        self._ready.clear()
        begun, self._prefetched = self._prefetched, None
        laid = self._laid_out(request.plan, request.targets)
        blocks = laid.blocks
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
        proof = self._proof_of(laid, request.plan, memory)
        pace = StreamThrottle(self.device)
        with IpcMappings.until_done(memory) as mappings:
            sent = proof.begin if proof is not None else _nothing
            copier = None
            if proof is not None:
                copier = IpcCopier(mappings, request.layout, request.plan, proof)
            arrivals, read = request.arrivals, request.read
            begun.fill(blocks, read, arrivals, self._uploader, pace, stop, sent, copier)
        if request.live and len(begun.there) == len(blocks.all):
            staged = self._staged_of(laid, memory)
            begun.patch = self._found_here(staged, request.live, request.unwanted)
            begun.compared = request.live

    @torch.inference_mode()
    def prepare(
        self,
        target: RankPrepared,
        base: RankPrepared | None,
        progress: Progress,
        stop: Stop,
        *,
        stage: bool,
        ticket: str,
    ) -> Prep:
        """See `DeviceOps`: sends it and finds what it changes, as far as there is room.

        Beside generation, on the calling thread's stream. No commit may run meanwhile.
        """
        self._ready.clear()
        self._expected.take_proved(target)
        laid = self._laid_out(target.plan, target.targets)
        memory = self._arena.reserve(laid.blocks.size)
        begun, self._prefetched = self._prefetched, None
        if not stage:
            return Prep()
        if memory is None:
            logger.info("weightsync: no room on the device for %d bytes", laid.blocks.size)
            patch = self._found_on_host(target, base, stop) if base is not None else None
            self._ready[target] = _Ready(None, patch)
            return Prep()
        if begun is not None and not begun.is_of(ticket, target.segments, target.targets, memory):
            begun = None
        proof = self._proof_of(laid, target.plan, memory)
        # What is proved here is not proved elsewhere. What comes after reads device memory only.
        report = progress if proof is None else _nothing
        read_progress = ReadProgress(target.turns, len(target.segments), report)
        rest = target, laid, memory, proof, read_progress, base, stop
        proved = self._staged_and_proved(begun, *rest)
        if proved.unlike and begun is not None and begun.has_ipc_blocks:
            # Its trainer has written to it, or has let go of it, before the rank had read it.
            logger.warning("weightsync: what was copied from a trainer's GPU is read again")
            begun.drop(laid.blocks, target.plan, frozenset(proved.unlike))
            proved = self._staged_and_proved(begun, *rest)
        # A commit uses another stream.
        StreamThrottle(self.device).drain()
        return Prep(begun.sent if begun is not None else 0, proved)

    def _staged_and_proved(
        self,
        begun: PrefetchedBlocks | None,
        target: RankPrepared,
        laid: _Laid,
        memory: torch.Tensor,
        proof: Proof | None,
        read_progress: ReadProgress,
        base: RankPrepared | None,
        stop: Stop,
    ) -> StagingProof:
        """Send the blocks that are not there, find what they change, and prove them all."""
        there = begun.there if begun is not None else frozenset()
        sent = proof.begin if proof is not None else _nothing
        pace = StreamThrottle(self.device)
        rest = self._uploader, pace, stop, read_progress, there, sent
        send_blocks(laid.blocks, target.sources, memory, *rest)
        staged = self._staged_of(laid, memory)
        live = base.content_digest if base is not None else ""
        if live and begun is not None and begun.compared == live:
            patch = begun.patch
        else:
            patch = self._found_here(staged, live, stop) if live else None
        self._ready[target] = _Ready(staged, patch)
        return proof.end(target, stop) if proof is not None else StagingProof()

    def writer(self, target: RankPrepared, live: str) -> Writer:
        """See `DeviceOps`."""
        ready = self._ready.get(target, _Ready(None, None))
        if ready.patch is not None and ready.patch.base == live:
            return ready.patch
        return ready.staged or self._direct(target, range(len(target.sources)))

    def _staged_of(self, laid: _Laid, memory: torch.Tensor) -> Staged:
        """Return what writes all blocks, once they are there."""
        if laid.staged is None or laid.staged.memory is not memory:
            # Its views are those of the version before, as long as that lay in the same place.
            blocks = laid.blocks.all
            laid.staged = Staged(laid.targets, blocks, memory, self._mask, self._kernels)
        laid.staged.make_views()
        return laid.staged

    def synchronize(self) -> None:
        """See `DeviceOps`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def invalidate(self, target: RankPrepared) -> None:
        """See `DeviceOps`: also of what is prefetched; what is staged stays."""
        ready = self._ready.get(target)
        if ready is not None:
            self._ready[target] = _Ready(ready.staged, None)
        if self._prefetched is not None:
            self._prefetched.forget_patch()

    def compare(self, target: RankPrepared, stop: Stop) -> list[str]:
        """See `DeviceOps`: the device digests what it can, the host the rest."""
        found = self._digests(target.targets, stop)
        return self._expected.mismatched(target, self._threads, stop, found)

    @torch.inference_mode()
    def _digests(self, targets: Targets, stop: Stop) -> dict[int, bytes]:
        """Return the digests of live slices, by their index, as far as the device computes them."""
        if self._kernels is None:
            return {}
        views = dict(enumerate(targets.views()))
        return digests_of(self._kernels, views, StreamThrottle(self.device), stop)

    @torch.inference_mode()
    def digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """See `DeviceOps`."""
        if self._kernels is None:
            return {}
        return digests_of(self._kernels, tensors)

    def _proof_of(self, laid: _Laid, plan: LoadPlan, memory: torch.Tensor) -> Proof | None:
        """Return what digests the blocks of a version, as the ones of the version before."""
        # What a rank has only a part of has no digest that it could know.
        if self._kernels is None or len(plan.whole) < len(plan.slices):
            return None
        if laid.proof is None or laid.proof.memory is not memory:
            if laid.proof is not None:
                laid.proof.close()
            laid.proof = Proof(self._kernels, laid.blocks.all, plan, memory)
        laid.proof.settle()
        return laid.proof

    def _laid_out(self, plan: LoadPlan, targets: Targets) -> _Laid:
        """Return the blocks of a version; they, and their views, are those of the one before it."""
        if self._laid is None or self._laid.targets is not targets:
            if self._laid is not None:
                self._laid.drop()
            self._laid = _Laid(targets, lay_out(plan.slices, _dtypes(plan, targets)))
        return self._laid

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
            logger.warning("weightsync: no memory to find what changes; all is copied")
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


def _dtypes(plan: LoadPlan, targets: Targets) -> dict[str, torch.dtype]:
    views = targets.views()
    return {item.param: view.dtype for item, view in zip(plan.slices, views, strict=True)}
