"""What a rank asks of the place where its parameters lie: a host's memory, or a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weightsync.model.manifest import Layout
    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.apply.prepared import RankPrepared
    from weightsync.vllm.apply.writes import Writer
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.plan.view_cache import Read

__all__ = [
    "DeviceOps",
    "Exchange",
    "MemoryRegistrar",
    "PrefetchRequest",
    "Prep",
    "PrepareRequest",
    "Progress",
    "StagingProof",
    "Stop",
]

_Key = TypeVar("_Key", int, str)
_NAMES = 10

#: Asked now and then; True ends the work with a `StoppedError`.
Stop = Callable[[], bool]
#: Called with n when nothing will read the first n shards of a version any more.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class StagingProof:
    """What a rank found of a version that it staged.

    Attributes:
        tensors: Whole tensors that lie in staging memory as the manifest tells.
        unlike: Tensors that do not, as far as the rank has them whole.
    """

    tensors: frozenset[str] = frozenset()
    unlike: tuple[str, ...] = ()

    def report(self, layout: Layout) -> dict[str, Any]:
        """Return what a report tells: shards that need no other proof, and what is unlike."""
        if not self.tensors and not self.unlike:
            return {}
        shards = [
            index
            for index, tensors in enumerate(layout.by_shard)
            if all(t.name in self.tensors or t.begin == t.end for t in tensors)
        ]
        return {"shards": shards, "unlike": self.unlike[:_NAMES]}


@dataclass(frozen=True)
class Prep:
    """What was done to make a version ready.

    Attributes:
        prefetched: Bytes that had been sent before it was complete.
        proof: What was found of it in staging memory.
    """

    prefetched: int = 0
    proof: StagingProof = field(default_factory=StagingProof)


@dataclass(frozen=True)
class PrefetchRequest:
    """A version that still comes in.

    Attributes:
        ticket: The server's name for it.
        segments: Ids of the segments that it comes into.
        plan: Of its layout.
        targets: The live destinations.
        read: What the plan reads.
        layout: Of the version.
        arrivals: Yields the place in `Layout.largest_first` of each shard, once it has come, and
            before that, if it lies on a GPU, with where.
        live: Content digest of what the live parameters are proved to hold; "": not known.
        unwanted: A `Stop` for what is done once all of it is there.
    """

    ticket: str
    segments: tuple[str, ...]
    plan: LoadPlan
    targets: Targets
    read: Read
    layout: Layout
    arrivals: Iterable[tuple[int, IpcAddresses | None]]
    live: str
    unwanted: Stop


@dataclass(frozen=True)
class PrepareRequest:
    """A version that is complete.

    Attributes:
        target: It.
        base: What the live parameters are proved to hold; None: not known.
        progress: Told how far the version was read, where a device reads it.
        stage: Whether it is staged, where versions are.
        ticket: What it was called when it was prefetched; "": it was not.
    """

    target: RankPrepared
    base: RankPrepared | None
    progress: Progress
    stage: bool
    ticket: str


class Exchange(Protocol):
    """Exchanges bytes; done twice, all is as it was."""

    def run(self, threads: SliceThreads) -> None:
        """Exchange them; on a device it may still be under way when this returns."""


class MemoryRegistrar(Protocol):
    """Makes mapped segments known to a device."""

    def register(self, name: str, view: memoryview) -> None:
        """Register a mapping until `unregister`; without effect where it is registered."""

    def unregister(self, name: str) -> None:
        """Let go of a mapping, before it is unmapped; without effect where it is not registered."""


class DeviceOps(Protocol):
    """Makes versions ready beside generation, writes them in a pause, compares them after it."""

    @property
    def stages(self) -> bool:
        """Whether versions are sent beforehand to memory that a commit reads."""

    @property
    def registrar(self) -> MemoryRegistrar | None:
        """What mapped segments are registered with; None: nothing, and unmapping them is quick."""

    @property
    def sent(self) -> int:
        """Bytes that were sent to a device so far."""

    def enter_background(self) -> None:
        """Let the calling thread work where and when those that generate leave room."""

    def warm_up(self, plan: LoadPlan) -> None:
        """Use once whatever a commit of this plan uses. The engine stands meanwhile."""

    def prefetch(self, request: PrefetchRequest, stop: Stop) -> None:
        """Read what there is of a version that still comes in. No commit may run meanwhile."""

    def prepare(self, request: PrepareRequest, stop: Stop) -> Prep:
        """Make a version ready to be written, and find what it changes.

        Args:
            request: The version.
            stop: Asked before every piece.

        Raises:
            StoppedError: `stop` returned True.
        """

    def writer(self, target: RankPrepared, live: str) -> Writer:
        """Return what writes a prepared version, cheaply enough for a pause.

        Args:
            target: The version.
            live: Content digest of what the live parameters are proved to hold; "": not known.
                A patch of something else is never returned.
        """

    def synchronize(self) -> None:
        """Wait until all that was written is there."""

    def invalidate(self, target: RankPrepared) -> None:
        """Forget what was found in live parameters before `target` was written over them."""

    def compare(self, target: RankPrepared, stop: Stop) -> list[str]:
        """Digest the live parameters; return those that do not hold a version.

        Raises:
            StoppedError: `stop` returned True.
        """

    def digests(
        self, tensors: Mapping[_Key, torch.Tensor], stop: Stop | None = None
    ) -> dict[_Key, bytes]:
        """Return the digests of tensors by their keys, as far as a device computes them.

        Args:
            tensors: Any.
            stop: Asked now and then, beside generation; None: all at once, the engine stands.

        Raises:
            StoppedError: `stop` returned True.
        """

    def exchange(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Exchange:
        """Return what exchanges the bytes of pairs, made off the pause.

        Args:
            pairs: Rows of bytes of one length each; none overlaps another.
        """

    def memory_stats(self) -> dict[str, int]:
        """Return what reports tell about its memory."""

    def drop_staging(self) -> None:
        """Give back what was taken to stage versions; nothing may be at work, none is staged."""

    def set_budget(self, size: int) -> None:
        """Have so many bytes of device memory from now on. Nothing may be at work."""
