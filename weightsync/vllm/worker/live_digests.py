"""Digests of what is live on a rank, whatever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.vllm.apply.prepared import RankPrepared
from weightsync.vllm.plan.int_views import joined_digest_of
from weightsync.vllm.plan.load_plan import PlanRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.vllm.apply.device_ops import DeviceOps
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.apply.transform import Prepared
    from weightsync.vllm.plan.load_plan import Slice

__all__ = ["LiveDigests", "changed_since", "digest_live"]


@dataclass(frozen=True)
class LiveDigests:
    """What live parameters held at a time.

    Attributes:
        target: A version of which the load plan tells what they are.
        slices: The digest of each slice of that plan, in its order.
    """

    target: RankPrepared
    slices: tuple[bytes, ...]

    def parts(self) -> dict[str, str]:
        """Return the digests in hexadecimal; ranks that have the same part call it the same."""
        pairs = zip(self.target.plan.slices, self.slices, strict=True)
        return {_part(each): digest.hex() for each, digest in pairs}

    def unlike(self, other: LiveDigests) -> list[str]:
        """Return the tensors of which the same plan has other digests."""
        both = zip(self.target.plan.slices, self.slices, other.slices, strict=True)
        return list(dict.fromkeys(each.tensor for each, one, two in both if one != two))


def digest_live(
    target: Prepared,
    ops: DeviceOps,
    threads: SliceThreads,
    stop: Callable[[], bool] | None = None,
) -> LiveDigests:
    """Read all that is live once.

    Args:
        target: A version that was prepared by a load plan.
        ops: Digests what lies on a device.
        threads: Digest the rest.
        stop: Asked before every piece, beside generation; None: the engine stands.

    Raises:
        PlanRefusedError: There is no load plan.
        StoppedError: `stop` returned True.
    """
    if not isinstance(target, RankPrepared):
        msg = "vLLM computes what is live of this model, so that nobody but it may write that"
        raise PlanRefusedError(msg)
    views = target.targets.views()
    found: dict[int, bytes] = dict(ops.digests(dict(enumerate(views)), stop))
    rest = [index for index in range(len(views)) if index not in found]

    def digest(at: int) -> None:
        index = rest[at]
        found[index] = joined_digest_of([views[index]], stop=stop or bool)

    threads.each(digest, [views[index].nbytes for index in rest])
    return LiveDigests(target, tuple(found[index] for index in range(len(views))))


def changed_since(
    before: LiveDigests | None,
    ops: DeviceOps,
    threads: SliceThreads,
    stop: Callable[[], bool],
) -> list[str]:
    """Return the tensors that are not what they were, beside generation; of None: none.

    Raises:
        StoppedError: `stop` returned True.
    """
    if before is None:
        return []
    return before.unlike(digest_live(before.target, ops, threads, stop))


def _part(each: Slice) -> str:
    source = each.source
    return f"{each.tensor} {source.offset} {source.shape} {source.stride}"
