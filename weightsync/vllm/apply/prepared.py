"""A version made ready on one rank: where each slice comes from and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from weightsync.shm.staged_version import StagedVersion
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.plan.view_cache import Read

__all__ = ["RankPrepared", "describe"]


@dataclass(frozen=True, eq=False)
class RankPrepared:
    """What a commit needs to know; made off the pause and never changed.

    It is told apart by its identity: what was found out for one is true of no other.

    Attributes:
        apply_id: The server's name for it.
        content_digest: Identity of the version, computed here from the document.
        segments: Segment ids of the shards.
        digests: Digest of each tensor by its name.
        plan: The copies.
        sources: A view of shared memory per slice.
        turns: Place of the slice's shard in the order in which shards are read.
        targets: The live destinations.
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
    """Return a version with what a commit of it needs. Reads no bytes."""
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
