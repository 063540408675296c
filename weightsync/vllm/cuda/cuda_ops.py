"""What a rank has on its CUDA device beside vLLM, and how a version is made ready there."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weightsync.gpu.device_kernels import Kernels
from weightsync.vllm.cuda.blocks import lay_out
from weightsync.vllm.cuda.cuda_runtime import Registrar, Runtime
from weightsync.vllm.cuda.device_patch import DevicePatch, fill_sent
from weightsync.vllm.cuda.direct_write import Direct
from weightsync.vllm.cuda.ipc_copy import Lent, Loan
from weightsync.vllm.cuda.memory_budget import Room
from weightsync.vllm.cuda.patch_find import PatchFinder, fill
from weightsync.vllm.cuda.prefetched import Ahead
from weightsync.vllm.cuda.read_progress import Reading
from weightsync.vllm.cuda.scatter import Scatters
from weightsync.vllm.cuda.staged_write import Arena, Staged, send_blocks
from weightsync.vllm.cuda.staging_proof import Proof, Proved
from weightsync.vllm.cuda.tensor_digests import digests_of
from weightsync.vllm.cuda.uploader import CHUNK, Pace, Uploader
from weightsync.vllm.cuda.warmup import warm_up
from weightsync.vllm.dtypes import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from weightsync.model.manifest import Layout
    from weightsync.shm.incoming_version import Lying
    from weightsync.vllm.apply.parallel import Crew
    from weightsync.vllm.apply.prepared import Prepared
    from weightsync.vllm.cuda.blocks import Blocks
    from weightsync.vllm.env import Amount
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.plan.view_cache import Read

__all__ = ["Device", "Made"]

logger = logging.getLogger(__name__)

#: Truth values that are compared at a time; they stay in the device's cache. On an H200 16 MiB are
#: compared at 3.34 TB/s of both sides, 32 MiB at 3.59; a bare read reaches 4.2.
_MASK = 32 << 20
#: What is held whatever the room is, to convert, cut and compare.
_SCRATCH = 2 * CHUNK + _MASK


@dataclass(frozen=True)
class Made:
    """What was done to make a version ready.

    Attributes:
        ahead: Bytes that had been sent before it was complete.
        proved: What was found of it in staging memory.
    """

    ahead: int = 0
    proved: Proved = field(default_factory=Proved)


class Device:
    """Stages and finds on a stream of its own, one version at a time.

    Args:
        device: Of the rank.
        amount: How much memory the user gave it; None: what vLLM leaves.
        share: Part of the device that vLLM may take.
    """

    def __init__(self, device: torch.device, amount: Amount | None, share: float) -> None:
        runtime = Runtime.find() if device.type == "cuda" else None
        self.device = device
        self.registrar = Registrar(device, runtime) if device.type == "cuda" else None
        self._room = Room(device, amount, share)
        self._arena = Arena(self._room)
        scratch = torch.empty(_SCRATCH, dtype=torch.uint8, device=device)
        self._kernels = Kernels.find(device)
        self._scatters = Scatters(self._room, device, self._kernels)
        self._mask = scratch[2 * CHUNK :].view(torch.bool)
        self._finder = PatchFinder()
        self._uploader = Uploader(scratch[: 2 * CHUNK], runtime)
        # Of the plan that was used last; its views are of what is kept, whatever lies there.
        self._laid: tuple[Targets, Blocks] | None = None
        self._staged: Staged | None = None
        # Whose version lies in what is kept; it writes from host memory when another one comes.
        self._holder: weakref.ref[Prepared] | None = None
        self._ahead: Ahead | None = None
        self._proof: Proof | None = None

    @property
    def sent(self) -> int:
        """Bytes that were sent to the device so far."""
        return self._uploader.sent

    def told(self) -> dict[str, int]:
        """Return what reports tell about its memory."""
        return {"device_room": self._room.limit, "device_used": self._room.used + _SCRATCH}

    def set_room(self, size: int) -> None:
        """Have another budget from now on. What was staged is dropped; nothing may be at work.

        Args:
            size: Bytes.
        """
        self._let_go()
        self._staged = self._ahead = None
        self._drop_proof()
        self._arena.drop()
        self._scatters.drop()
        self._room.limit = size

    @torch.inference_mode()
    def warm_up(self, plan: LoadPlan) -> None:
        """Use once whatever a commit of this plan uses. The engine stands meanwhile."""
        pairs = {
            (torch_dtype(plan.tensors[item.tensor][0]), torch_dtype(plan.param_dtypes[item.param]))
            for item in plan.slices
        }
        known = [(of, to) for of, to in pairs if of is not None and to is not None]
        warm_up(known, self._uploader, self._mask, self._kernels)

    @torch.inference_mode()
    def read_ahead(
        self,
        ticket: str,
        segments: tuple[str, ...],
        plan: LoadPlan,
        targets: Targets,
        read: Read,
        layout: Layout,
        turns: Iterable[tuple[int, Lying | None]],
        live: str,
        stop: Callable[[], bool],
        unwanted: Callable[[], bool],
    ) -> None:
        """Send what there is of a version that still comes in, as far as there is room.

        When all of it is there, it finds what that changes.

        Beside generation, on the calling thread's stream. No commit may run meanwhile.

        Args:
            ticket: The server's name for it.
            segments: Ids of the segments that it comes into.
            plan: Of its layout.
            targets: The live destinations.
            read: What the plan reads.
            layout: Of the version.
            turns: Yields the place in `Layout.largest_first` of each shard, once it has come, and
                before that, if it lies on a GPU, with where.
            live: Content digest of what the live parameters are proved to hold; "": not known.
            stop: Asked before every piece that is sent; True raises `StoppedError`.
            unwanted: The same, once all of it is there.
        """
        self._let_go()
        begun, self._ahead = self._ahead, None
        blocks = self._blocks(plan, targets)
        memory = self._arena.reserve(blocks.size)
        # A source that was copied was copied before its bytes had come.
        if memory is None or read.copied:
            return
        if begun is None or not begun.is_of(ticket, segments, targets, memory):
            begun = Ahead(ticket, segments, targets, memory)
        self._ahead = begun
        # What it was found with is about to be used again.
        begun.forget_patch()
        proof = self._proof_of(blocks, plan, memory)
        pace = Pace(self.device)
        with _lent(memory) as lent:
            loan = Loan(lent, layout, plan, proof) if proof is not None else None
            sent = proof.begin if proof is not None else _nothing
            begun.fill(blocks, read, turns, self._uploader, pace, stop, sent, loan)
        if live and len(begun.there) == len(blocks.all):
            staged = self._staged_of(targets, blocks, memory)
            begun.patch, begun.compared = self._found_here(staged, live, unwanted), live

    @torch.inference_mode()
    def make_ready(
        self,
        ready: Prepared,
        base: Prepared | None,
        crew: Crew,
        stop: Callable[[], bool],
        tell: Callable[[int], None],
        *,
        staging: bool,
        ahead: str = "",
    ) -> Made:
        """Send a version to the device and find what it changes, as far as there is room.

        Beside generation, on the calling thread's stream. No commit may run meanwhile.

        Args:
            ready: The version.
            base: What the live parameters are proved to hold; None: not known.
            crew: Finds on the host what changes, without room on the device.
            stop: Asked before every piece; True raises `StoppedError`.
            tell: Called with n when nothing here will read the first n shards any more.
            staging: Whether it is sent now; else there is only the memory for others.
            ahead: What it was called when it was sent before it was complete.
        """
        self._let_go()
        self._holder = weakref.ref(ready)
        ready.expect_known()
        ready.whole = self._direct(ready, range(len(ready.sources)))
        blocks = self._blocks(ready.plan, ready.targets)
        memory = self._arena.reserve(blocks.size)
        begun, self._ahead = self._ahead, None
        if not staging:
            return Made()
        if memory is None:
            logger.info("weightsync: no room on the device for %d bytes", blocks.size)
            if base is not None:
                ready.patch = self._found_on_host(ready, base, crew, stop)
            return Made()
        if begun is not None and not begun.is_of(ahead, ready.segments, ready.targets, memory):
            begun = None
        proof = self._proof_of(blocks, ready.plan, memory)
        # What is proved here is not proved elsewhere. What comes after reads device memory only.
        reading = Reading(ready.turns, len(ready.segments), tell if proof is None else _nothing)
        rest = ready, blocks, memory, proof, reading, base, stop
        proved = self._staged_and_proved(begun, *rest)
        if proved.unlike and begun is not None and begun.lent:
            # Its trainer has written to it, or has let go of it, before the rank had read it.
            logger.warning("weightsync: what was copied from a trainer's GPU is read again")
            begun.drop(blocks, ready.plan, frozenset(proved.unlike))
            proved = self._staged_and_proved(begun, *rest)
        # A commit uses another stream.
        Pace(self.device).drain()
        return Made(begun.sent if begun is not None else 0, proved)

    def _staged_and_proved(
        self,
        begun: Ahead | None,
        ready: Prepared,
        blocks: Blocks,
        memory: torch.Tensor,
        proof: Proof | None,
        reading: Reading,
        base: Prepared | None,
        stop: Callable[[], bool],
    ) -> Proved:
        """Send the blocks that are not there, find what they change, and prove them all."""
        there = begun.there if begun is not None else frozenset()
        sent = proof.begin if proof is not None else _nothing
        pace = Pace(self.device)
        send_blocks(blocks, ready.sources, memory, self._uploader, pace, stop, reading, there, sent)
        ready.whole = staged = self._staged_of(ready.targets, blocks, memory)
        live = base.content_digest if base is not None else ""
        if live and begun is not None and begun.compared == live:
            ready.patch = begun.patch
        else:
            ready.patch = self._found_here(staged, live, stop) if live else None
        return proof.end(ready, stop) if proof is not None else Proved()

    def _staged_of(self, targets: Targets, blocks: Blocks, memory: torch.Tensor) -> Staged:
        """Return what writes all blocks, once they are there."""
        if self._staged is None or self._staged.memory is not memory:
            # Its views are those of the version before, as long as that lay in the same place.
            self._staged = Staged(targets, blocks.all, memory, self._mask, self._kernels)
        self._staged.make_views()
        return self._staged

    def written(self) -> None:
        """Forget what was found in live parameters that are about to be written."""
        if self._ahead is not None:
            self._ahead.forget_patch()

    @torch.inference_mode()
    def digests(self, targets: Targets, stop: Callable[[], bool]) -> dict[int, bytes]:
        """Return the digests of live slices, by their index, as far as the device computes them.

        Args:
            targets: The live destinations.
            stop: Asked now and then; True raises `StoppedError`.
        """
        if self._kernels is None:
            return {}
        views = dict(enumerate(targets.views()))
        return digests_of(self._kernels, views, Pace(self.device), stop)

    @torch.inference_mode()
    def digests_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """Return the digests of tensors by name, as far as the device computes them, all at once.

        The engine stands meanwhile.
        """
        if self._kernels is None:
            return {}
        return digests_of(self._kernels, tensors)

    def _proof_of(self, blocks: Blocks, plan: LoadPlan, memory: torch.Tensor) -> Proof | None:
        """Return what digests the blocks of a version, as the ones of the version before."""
        # What a rank has only a part of has no digest that it could know.
        if self._kernels is None or len(plan.whole) < len(plan.slices):
            return None
        if self._proof is None or self._proof.memory is not memory:
            self._drop_proof()
            self._proof = Proof(self._kernels, blocks.all, plan, memory)
        self._proof.settle()
        return self._proof

    def _blocks(self, plan: LoadPlan, targets: Targets) -> Blocks:
        """Return the blocks of a version; they, and their views, are those of the one before it."""
        if self._laid is None or self._laid[0] is not targets:
            self._staged = None
            self._drop_proof()
            self._laid = targets, lay_out(plan.slices, _dtypes(plan, targets))
        return self._laid[1]

    def _drop_proof(self) -> None:
        if self._proof is not None:
            self._proof.close()
            self._proof = None

    def _let_go(self) -> None:
        holder = self._holder() if self._holder is not None else None
        if holder is not None:
            holder.patch = None
            holder.whole = self._direct(holder, range(len(holder.sources)))

    def _direct(self, ready: Prepared, indices: range | list[int]) -> Direct:
        return Direct(
            ready.targets,
            ready.plan.slices,
            ready.sources,
            indices,
            self._uploader,
            self._mask,
            ready.expected,
            self._kernels,
        )

    def _found_here(
        self, staged: Staged, live: str, stop: Callable[[], bool]
    ) -> DevicePatch | None:
        """Return what turns the live parameters, of that content digest, into what is staged."""
        try:
            return self._searched(staged, live, stop)
        except torch.OutOfMemoryError:
            logger.warning("weightsync: no memory to find what changes; all is copied")
            return None

    def _searched(self, staged: Staged, live: str, stop: Callable[[], bool]) -> DevicePatch | None:
        pace = Pace(self.device)
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
        self, ready: Prepared, base: Prepared, crew: Crew, stop: Callable[[], bool]
    ) -> DevicePatch | None:
        if not self._room.limit or any(item.cast for item in ready.plan.slices):
            # What is converted on the device can differ from what the host would make of it.
            return None
        found = ready.differences(base, crew, stop)
        if found is None:
            return None
        targets = ready.targets
        counts: dict[int, int] = {}
        for change in found.changes.values():
            width = change.values.element_size()
            counts[width] = counts.get(width, 0) + change.values.numel()
        made = self._scatters.make([targets.param(name) for name in targets.names], counts)
        if made is None:
            return None
        changes = (found.changes[index] for index in sorted(found.changes))
        fill_sent(changes, made, targets, self._uploader, Pace(self.device))
        rest = self._direct(ready, sorted(found.dense))
        return DevicePatch(base.content_digest, targets, list(made.values()), rest)


@contextlib.contextmanager
def _lent(memory: torch.Tensor) -> Iterator[Lent]:
    lent = Lent(memory)
    try:
        yield lent
    finally:
        if lent.opened:
            # Closing 155 allocations took 40 ms beside generation; nobody waits for it.
            threading.Thread(target=lent.close, name="weightsync", daemon=True).start()


def _nothing(what: object) -> None:
    del what


def _dtypes(plan: LoadPlan, targets: Targets) -> dict[str, torch.dtype]:
    views = targets.views()
    return {item.param: view.dtype for item, view in zip(plan.slices, views, strict=True)}
