"""Digests of what is live on a rank, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from weightsync.model.digest import tensor_digest
from weightsync.vllm.apply.device_ops import DeviceOps, RankPrepared
from weightsync.vllm.apply.host_patch import digest_all
from weightsync.vllm.apply.transform import Prepared
from weightsync.vllm.plan.load_plan import PlanRefusedError, Slice

if TYPE_CHECKING:
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.plan.live_params import Targets


#: Most that a device digests with one block of threads. Of 15 GB an embedding of 1 GB, by one, took
#: 30 ms on an H200, and all took 32; cut into 16 MiB 5.6 ms, 32 MiB 4.8, 64 MiB 4.4.
_PIECE_BYTES = 64 << 20
#: Elements: pieces begin where a device can digest them.
_ALIGNED = 16


@dataclass(frozen=True)
class LiveDigests:
    """What live parameters held at a time: the digest of each slice of the plan of `target`."""

    target: RankPrepared
    slices: tuple[bytes, ...]

    def parts(self) -> dict[str, str]:
        """Return the digests in hexadecimal; ranks that have the same part call it the same."""
        pairs = zip(self.target.plan.slices, self.slices, strict=True)
        return {_part(each): digest.hex() for each, digest in pairs}

    def unlike(self, other: LiveDigests) -> list[str]:
        both = zip(self.target.plan.slices, self.slices, other.slices, strict=True)
        return list(dict.fromkeys(each.tensor for each, one, two in both if one != two))


def digest_live(
    target: Prepared,
    ops: DeviceOps,
    threads: SliceThreads,
    stop: Callable[[], bool] | None = None,
) -> LiveDigests:
    """Read all that is live once; `stop` is None if the engine stands.

    Raises PlanRefusedError if there is no load plan, StoppedError when `stop` returns True.
    """
    if not isinstance(target, RankPrepared):
        msg = "vLLM computes the live weights of this model, so only vLLM may write them"
        raise PlanRefusedError(msg)
    pieces, counts = _cut(target.targets)
    found = digest_all(ops, pieces, threads, stop)
    digests = (found[number] for number in pieces)
    return LiveDigests(target, tuple(_joined(islice(digests, count)) for count in counts))


def changed_since(
    before: LiveDigests | None,
    ops: DeviceOps,
    threads: SliceThreads,
    stop: Callable[[], bool] | None = None,
) -> list[str]:
    """Return the tensors that are not what they were; of None: none. `stop` as in `digest_live`."""
    if before is None:
        return []
    return before.unlike(digest_live(before.target, ops, threads, stop))


class _Cut(NamedTuple):
    """The live views of a plan in pieces, and how many each has; made once for all uses."""

    views: Sequence[torch.Tensor]
    pieces: Mapping[int, torch.Tensor]
    counts: Sequence[int]


_cuts: WeakKeyDictionary[Targets, _Cut] = WeakKeyDictionary()


def _cut(targets: Targets) -> tuple[Mapping[int, torch.Tensor], Sequence[int]]:
    views, known = targets.views(), _cuts.get(targets)
    # They are others once a parameter was replaced.
    if known is None or known.views is not views:
        cut = [_pieces(view) for view in views]
        pieces = dict(enumerate(piece for of_view in cut for piece in of_view))
        known = _cuts[targets] = _Cut(views, pieces, [len(of_view) for of_view in cut])
    return known.pieces, known.counts


def _pieces(view: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut what is live; ranks that have the same part of a tensor cut it alike."""
    if not view.is_contiguous() or view.nbytes <= _PIECE_BYTES:
        return [view]
    # As long as each other: all end together.
    count = -(-view.nbytes // _PIECE_BYTES)
    size = -(-view.numel() // (count * _ALIGNED)) * _ALIGNED
    return torch.split(view.reshape(-1), size)


def _joined(digests: Iterable[bytes]) -> bytes:
    return tensor_digest(b"".join(digests))


def _part(each: Slice) -> str:
    source = each.source
    return f"{each.tensor} {source.offset} {source.shape} {source.stride}"
