"""A version made ready on one rank: where each slice comes from and what its live bytes must be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.handover import SegmentClient
from weightsync.segments import MappedSegment
from weightsync.staged import StagedVersion
from weightsync.vllm.live import Targets, bytes_digest
from weightsync.vllm.plan import LoadPlan, check_against_base
from weightsync.vllm.sources import Sources, expected_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from weightsync.vllm.crew import Crew
    from weightsync.vllm.live import LiveParameters

__all__ = [
    "CancelledPrepareError",
    "NeedsCaptureError",
    "Plans",
    "Prepared",
    "prepare",
    "read_document",
]


class NeedsCaptureError(Exception):
    """There is no load plan for this layout yet."""


class CancelledPrepareError(Exception):
    """The server let go of this apply."""


@dataclass
class Plans:
    """The load plans of a rank.

    Attributes:
        base: The first one, captured for the adopted checkpoint; what is covered is measured by it.
        by_signature: All of them.
    """

    base: LoadPlan | None = None
    by_signature: dict[str, LoadPlan] = field(default_factory=dict)

    def add(self, plan: LoadPlan) -> None:
        """Keep a plan; the first one becomes the base."""
        if self.base is None:
            self.base = plan
        self.by_signature[plan.signature] = plan


@dataclass
class Prepared:
    """What commit needs; made off the pause.

    Attributes:
        apply_id: The server's name for it.
        content_digest: Identity of the version, computed here from the document.
        segments: Segment ids of the shards.
        plan: The copies.
        sources: A view of shared memory per slice.
        expected: Digest that each slice must have once it is live.
        targets: The live destinations.
        nbytes: Bytes that a commit writes.
    """

    apply_id: str
    content_digest: str
    segments: tuple[str, ...]
    plan: LoadPlan
    sources: list[torch.Tensor]
    expected: list[bytes]
    targets: Targets
    nbytes: int

    def write(self, crew: Crew) -> None:
        """Copy every slice into the live parameters."""
        targets, sources = self.targets.views(), self.sources
        turns, half = itertools.count(), len(sources) // 2

        def copy(index: int) -> None:
            if next(turns) == half:
                failpoints.hit("worker.half")
            targets[index].copy_(sources[index])

        crew.each(copy, [source.nbytes for source in sources])

    def mismatched(self, crew: Crew, stop: Callable[[], bool] = bool) -> list[str]:
        """Digest the live slices; return the parameters whose bytes are not those expected.

        Args:
            crew: Does the work.
            stop: Asked before every slice; True raises `CancelledPrepareError`.
        """
        targets, expected = self.targets.views(), self.expected
        wrong: set[int] = set()

        def compare(index: int) -> None:
            if stop():
                raise CancelledPrepareError
            if bytes_digest(targets[index]) != expected[index]:
                wrong.add(index)

        crew.each(compare, [target.nbytes for target in targets])
        return list(dict.fromkeys(self.plan.slices[index].param for index in sorted(wrong)))


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


def find_plan(staged: StagedVersion, plans: Plans) -> LoadPlan:
    """Return the plan for a staged version.

    Raises:
        NeedsCaptureError: Its layout is new; the model's loaders must run once.
        PlanRefusedError: It cannot fit the adopted model; with names.
    """
    layout = staged.manifest.layout
    plan = plans.by_signature.get(layout.signature)
    if plan is None:
        if plans.base is not None:
            check_against_base(layout, plans.base)
        raise NeedsCaptureError
    digests = dict(zip((t.name for t in layout.tensors), staged.manifest.digests, strict=True))
    if plan is plans.base:
        plan.note_ignored(digests)
    assert plans.base is not None  # noqa: S101 - there is a plan, so there is a first one
    plan.accept_ignored(digests, plans.base)
    return plan


def prepare(
    apply_id: str,
    staged: StagedVersion,
    plan: LoadPlan,
    views: list[memoryview],
    live: LiveParameters,
    stop: Callable[[], bool],
) -> Prepared:
    """Digest what every slice must become. Reads all bytes of this rank's part once.

    Raises:
        CancelledPrepareError: `stop` returned True.
        ParameterChangedError: The live parameters are no longer those of the plan.
    """
    targets = Targets(live, plan.slices)
    places = targets.views()
    source_tensors = Sources(staged.manifest.layout, views)
    sources, expected = [], []
    for item, place in zip(plan.slices, places, strict=True):
        if stop():
            raise CancelledPrepareError
        source = source_tensors.slice(item)
        sources.append(source)
        expected.append(expected_digest(source, place.dtype))
    nbytes = sum(place.numel() * place.element_size() for place in places)
    digest = staged.manifest.content_digest
    return Prepared(apply_id, digest, staged.segments, plan, sources, expected, targets, nbytes)
