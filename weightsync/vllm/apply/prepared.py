"""A version made ready on one rank: where each slice comes from and what its live bytes must be."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedVersion
from weightsync.vllm.apply.host_find import find_differences
from weightsync.vllm.apply.host_patch import Copy, Patch, split
from weightsync.vllm.apply.writes import write_each
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, check_against_base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from weightsync.vllm.apply.host_find import Differences
    from weightsync.vllm.apply.parallel import Crew
    from weightsync.vllm.apply.writes import Work
    from weightsync.vllm.cuda.device_patch import DevicePatch
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.view_cache import Read

__all__ = [
    "NeedsCaptureError",
    "Plans",
    "Prepared",
    "prepare",
    "read_document",
]


#: Refusals that a rank remembers.
_REFUSALS = 64


class NeedsCaptureError(Exception):
    """There is no load plan for this layout yet."""


@dataclass
class Plans:
    """The load plans of a rank.

    Attributes:
        base: The first one, captured for the adopted checkpoint; what is covered is measured by it.
        by_signature: All of them.
        refused: What was said of layouts that the model cannot take, by their signatures: their
            plans need not be captured again to say so.
    """

    base: LoadPlan | None = None
    by_signature: dict[str, LoadPlan] = field(default_factory=dict)
    refused: OrderedDict[str, tuple[str, list[str]]] = field(default_factory=OrderedDict)

    def add(self, plan: LoadPlan) -> None:
        """Keep a plan; the first one becomes the base."""
        if self.base is None:
            self.base = plan
        self.by_signature[plan.signature] = plan

    def check(self, signature: str) -> None:
        """Refuse a layout that was refused before.

        Raises:
            PlanRefusedError: As then.
        """
        if signature in self.refused:
            self.refused.move_to_end(signature)
            raise PlanRefusedError(*self.refused[signature])

    @contextlib.contextmanager
    def remembering(self, signature: str) -> Iterator[None]:
        """Remember a refusal of a layout that is raised meanwhile."""
        try:
            yield
        except PlanRefusedError as error:
            self.refused[signature] = error.message, error.names
            while len(self.refused) > _REFUSALS:
                self.refused.popitem(last=False)
            raise


@dataclass
class Prepared:
    """What commit needs; made off the pause.

    Attributes:
        apply_id: The server's name for it.
        content_digest: Identity of the version, computed here from the document.
        segments: Segment ids of the shards.
        digests: Digest of each tensor by its name.
        plan: The copies.
        sources: A view of shared memory per slice.
        turns: Place of the slice's shard in the order in which shards are read.
        expected: Digest that each slice must have once it is live; None: not computed yet.
        targets: The live destinations.
        patch: What changes since the version that was live at the prepare, if that is little.
        whole: What writes all of it on a device; None: this does, on the host.
        patched: Always False: it writes everything.
        compared_all: Always True.
    """

    apply_id: str
    content_digest: str
    segments: tuple[str, ...]
    digests: Mapping[str, bytes]
    plan: LoadPlan
    sources: list[torch.Tensor]
    turns: list[int]
    expected: list[bytes | None]
    targets: Targets
    patch: Patch | DevicePatch | None = None
    whole: Work | None = None
    patched: bool = False
    compared_all: bool = True

    def work(self, held: str) -> Work:
        """Return what writes this version, proved by what it writes.

        Args:
            held: Content digest of what the live parameters are proved to hold; "": unknown.
        """
        whole = self.whole or self
        return self.patch if self.patch is not None and self.patch.base == held else whole

    @property
    def nbytes(self) -> int:
        """Bytes that a commit of everything writes."""
        return sum(place.nbytes for place in self.targets.views())

    def write(self, crew: Crew) -> None:
        """Copy every slice into the live parameters."""
        targets, sources = self.targets.views(), self.sources

        def copy(index: int) -> None:
            targets[index].copy_(sources[index])

        write_each(crew, copy, [source.nbytes for source in sources])

    def mismatched(
        self,
        crew: Crew,
        stop: Callable[[], bool] = bool,
        found: Mapping[int, bytes] = MappingProxyType({}),
    ) -> list[str]:
        """Digest the live slices; return the parameters whose bytes are not those expected.

        Args:
            crew: Does the work.
            stop: Asked before every piece; True raises `StoppedError`.
            found: Digests of live slices that are known, by their index.
        """
        targets = self.targets.views()
        wrong: set[int] = set()

        def compare(index: int) -> None:
            wanted = self._expect(index, stop)
            if (found.get(index) or tensor_digest_of(targets[index], stop=stop)) != wanted:
                wrong.add(index)

        crew.each(compare, [target.nbytes for target in targets])
        return list(dict.fromkeys(self.plan.slices[index].param for index in sorted(wrong)))

    def expect_all(self, crew: Crew, stop: Callable[[], bool]) -> None:
        """Compute every digest that is not known yet; reads this rank's part of the version once.

        Raises:
            StoppedError: `stop` returned True.
        """

        def expect(index: int) -> None:
            self._expect(index, stop)

        crew.each(expect, [source.nbytes for source in self.sources])

    def _expect(self, index: int, stop: Callable[[], bool]) -> bytes:
        digest = self.expected[index]
        if digest is None:
            place = self.targets.views()[index]
            device = None if place.device.type == "cpu" else place.device
            digest = tensor_digest_of(self.sources[index], place.dtype, stop, device)
            self.expected[index] = digest
        return digest

    def expect_known(self) -> None:
        """Expect of slices that are whole tensors what the server has proved of those."""
        for index in self.plan.whole:
            self.expected[index] = self.digests[self.plan.slices[index].tensor]

    def differences(
        self, base: Prepared, crew: Crew, stop: Callable[[], bool]
    ) -> Differences | None:
        """Return what differs from a version of the same plan; None: a copy is less work.

        Raises:
            StoppedError: `stop` returned True.
        """
        slices = self.plan.slices
        same = {name for name, digest in self.digests.items() if digest == base.digests[name]}
        old = [
            None if item.tensor in same else source
            for item, source in zip(slices, base.sources, strict=True)
        ]
        return find_differences(slices, old, self.sources, self.targets.views(), crew, stop)

    def find_patch(self, base: Prepared, crew: Crew, stop: Callable[[], bool]) -> None:
        """Make the patch from a version of the same plan, where less changes than a copy writes.

        Raises:
            StoppedError: `stop` returned True.
        """
        found = self.differences(base, crew, stop)
        if found is None:
            return
        slices = self.plan.slices
        for index in range(len(slices)):
            if index not in found.changes and index not in found.dense:
                self.expected[index] = base.expected[index]
        copies = [
            Copy(i, slices[i].param, self.sources[i], self._expect(i, stop))
            for i in sorted(found.dense)
        ]
        changes = split(found.changes[index] for index in sorted(found.changes))
        self.patch = Patch(base.content_digest, self.targets, changes, copies)


def read_document(socket: str, document: str) -> StagedVersion:
    """Return the staged version that a document segment describes.

    Raises:
        OSError: Nobody listens on the segment socket.
        LookupError: The server has no such document.
    """
    with SegmentClient(socket) as client:
        ((fd, size),) = client.map([document])
    mapped = MappedSegment(fd, size)
    staged = StagedVersion.from_view(mapped.view)
    # Not in a `finally`: the traceback of a failure holds views, and closing would hide the reason.
    mapped.close()
    return staged


def find_plan(
    staged: StagedVersion, plans: Plans, uniform: Callable[[str], bool] = lambda _: False
) -> LoadPlan:
    """Return the plan for a staged version.

    Args:
        staged: The version.
        plans: Those there are.
        uniform: Tells whether one of its tensors, by name, holds one value all over.

    Raises:
        NeedsCaptureError: Its layout is new; the model's loaders must run once.
        PlanRefusedError: It cannot fit the adopted model; with names.
    """
    layout = staged.manifest.layout
    plans.check(layout.signature)
    plan = plans.by_signature.get(layout.signature)
    if plan is None:
        if plans.base is not None:
            check_against_base(layout, plans.base)
        raise NeedsCaptureError
    digests = dict(zip((t.name for t in layout.tensors), staged.manifest.digests, strict=True))
    if plan is plans.base:
        plan.note_ignored(digests, uniform)
    assert plans.base is not None  # noqa: S101 - there is a plan, so there is a first one
    plan.accept_ignored(digests, plans.base)
    return plan


def prepare(
    apply_id: str, staged: StagedVersion, plan: LoadPlan, read: Read, targets: Targets
) -> Prepared:
    """Return a version with what a commit of it needs. Reads no bytes."""
    manifest = staged.manifest
    names = (tensor.name for tensor in manifest.layout.tensors)
    return Prepared(
        apply_id,
        manifest.content_digest,
        staged.segments,
        digests=dict(zip(names, manifest.digests, strict=True)),
        plan=plan,
        sources=read.sources,
        turns=read.turns,
        expected=[None] * len(plan.slices),
        targets=targets,
    )
