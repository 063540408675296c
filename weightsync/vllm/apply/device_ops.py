"""What a rank asks of the place where its parameters lie, and a version made ready there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from weightsync.model.manifest import Layout
    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync.shm.staged_version import StagedVersion
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.apply.writes import ParamWriter
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.plan.staged_tensors import Read


_Key = TypeVar("_Key", int, str)
_NAMES = 10

#: Asked now and then; True ends the work with a `StoppedError`.
Stop = Callable[[], bool]
#: Called with n when nothing will read the first n shards of a version any more.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class StagingProof:
    """Whole `tensors` that lie in staging memory as the manifest says, and those that do not."""

    tensors: frozenset[str] = frozenset()
    unlike: tuple[str, ...] = ()

    def report(self, layout: Layout) -> dict[str, Any]:
        if not self.tensors and not self.unlike:
            return {}
        shards = [
            index
            for index, tensors in enumerate(layout.by_shard)
            if all(t.name in self.tensors or t.begin == t.end for t in tensors)
        ]
        return {"shards": shards, "unlike": self.unlike[:_NAMES]}


@dataclass(frozen=True)
class PrepareResult:
    """What was done; `prefetched` counts bytes sent before the version was complete."""

    prefetched: int = 0
    proof: StagingProof = field(default_factory=StagingProof)


@dataclass(frozen=True)
class PrefetchRequest:
    """A version that still comes in; `ticket` is the server's name for it.

    `arrivals` yields the place in `Layout.largest_first` of each shard, once it has come, and
    before that, if it lies on a GPU, with where. `live` is the digest of what the live parameters
    are proved to hold, "" if not known. `unwanted` is a `Stop` for what is done once all of it is
    there.
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

    `base` is what the live parameters are proved to hold, None if not known. `progress` is called
    with how far a device has read the version. `stage` tells whether it is staged. `ticket` is ""
    if it was not prefetched.
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
    def register(self, name: str, view: memoryview) -> None:
        """Register a mapping until `unregister`; without effect where it is registered."""

    def unregister(self, name: str) -> None:
        """Let go of a mapping, before it is unmapped; without effect where it is not registered."""


class DeviceOps(Protocol):
    """Makes versions ready beside generation, writes them in a pause, compares them after it.

    What takes a `stop` asks it now and then, and True raises StoppedError.
    """

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

    def prepare(self, request: PrepareRequest, stop: Stop) -> PrepareResult:
        """Make a version ready to be written, and find what it changes."""

    def writer(self, target: RankPrepared, live: str) -> ParamWriter:
        """Return what writes a prepared version, cheaply enough for a pause.

        `live` is the content digest that the live parameters are proved to hold, "" if not known; a
        patch of anything else is never returned.
        """

    def synchronize(self) -> None:
        """Wait until all that was written is there."""

    def invalidate(self, target: RankPrepared) -> None:
        """Forget what was found in live parameters before `target` was written over them."""

    def compare(self, target: RankPrepared, stop: Stop) -> list[str]:
        """Digest the live parameters; return those that do not hold a version."""

    def digests(
        self, tensors: Mapping[_Key, torch.Tensor], stop: Stop | None = None
    ) -> dict[_Key, bytes]:
        """Return the digests that a device can compute; without a `stop` the engine stands."""

    def exchange(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Exchange:
        """Return what exchanges the bytes of pairs, made off the pause.

        Both sides are rows of bytes of one length; none overlaps another.
        """

    def memory_stats(self) -> dict[str, int]:
        """Return what reports tell about its memory."""

    def drop_staging(self) -> None:
        """Give back what was taken to stage versions; nothing may be at work, none is staged."""

    def set_budget(self, size: int) -> None:
        """Have so many bytes of device memory from now on. Nothing may be at work."""


@dataclass(frozen=True, eq=False)
class RankPrepared:
    """What a commit needs to know; made off the pause, never changed, told apart by identity.

    `content_digest` was computed here from the document. `sources` has a view of shared memory per
    slice, and `turns` the place of its shard in the order in which shards are read.
    """

    apply_id: str
    content_digest: str
    segments: tuple[str, ...]
    digests: Mapping[str, bytes]
    plan: LoadPlan
    sources: Sequence[torch.Tensor]
    turns: Sequence[int]
    targets: Targets


def describe(
    apply_id: str, staged: StagedVersion, plan: LoadPlan, read: Read, targets: Targets
) -> RankPrepared:
    manifest = staged.manifest
    names = (tensor.name for tensor in manifest.layout.tensors)
    return RankPrepared(
        apply_id,
        manifest.content_digest,
        staged.segments,
        digests=dict(zip(names, manifest.digests, strict=True)),
        plan=plan,
        sources=read.sources,
        turns=read.turns,
        targets=targets,
    )
