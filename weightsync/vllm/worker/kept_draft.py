"""The draft that was live before a version brought another one, for versions that bring none.

A version without a draft leaves the draft as it is. Its way back, after an apply of one that has a
draft, must bring back what was there; where that came from nobody may have any more, so that it is
kept.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from weightsync.vllm.plan.int_views import memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.apply.writes import Writer
    from weightsync.vllm.plan.live_params import LiveParameters
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["KeptDraft"]

#: Versions of which it is known whether they bring a draft.
_VERSIONS = 64
#: Drafts that are kept.
_DRAFTS = 2


class KeptDraft:
    """Keeps a draft in the host's memory as long as it may be asked for.

    Args:
        live: Where the draft's parameters are.
    """

    def __init__(self, live: LiveParameters) -> None:
        self._live = live
        self._brings: OrderedDict[str, bool] = OrderedDict()
        #: Bytes of drafts, by the version that they were live with.
        self._kept: OrderedDict[str, Mapping[str, torch.Tensor]] = OrderedDict()

    def note(self, content_digest: str, plan: LoadPlan) -> None:
        """Take note of whether a version brings a draft."""
        self._brings[content_digest] = bool(plan.draft)
        self._brings.move_to_end(content_digest)
        while len(self._brings) > _VERSIONS:
            self._brings.popitem(last=False)

    def around(self, writer: Writer, content_digest: str, plan: LoadPlan, live: str) -> Writer:
        """Return what writes a version, and what it does to the draft.

        Args:
            writer: Writes the version.
            content_digest: Identity of the version.
            plan: Of the version.
            live: Content digest of what is live; "": not known.
        """
        if plan.draft:
            return _Keeping(writer, self, live, plan.draft)
        tensors = self._kept.get(content_digest)
        return writer if tensors is None else _BringingBack(writer, self._live, tensors)

    def keep(self, live: str, params: frozenset[str]) -> None:
        """Keep the draft that is live, if its version would not bring it back.

        Args:
            live: As for `around`.
            params: Of the draft.
        """
        if not live:
            # Half written: what was kept before that is what may be asked for.
            return
        if self._brings.get(live, False):
            return
        self._kept[live] = {
            name: memory_of(self._live.tensor(name)).to("cpu", copy=True) for name in params
        }
        self._kept.move_to_end(live)
        while len(self._kept) > _DRAFTS:
            self._kept.popitem(last=False)


class _Around:
    """See `Writer`: another one, and something before or behind it."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @property
    def nbytes(self) -> int:
        return self._writer.nbytes

    @property
    def patched(self) -> bool:
        return self._writer.patched

    @property
    def compared_all(self) -> bool:
        return self._writer.compared_all

    def write(self, threads: SliceThreads) -> None:
        self._writer.write(threads)

    def verify(self, threads: SliceThreads) -> list[str]:
        return self._writer.verify(threads)


class _Keeping(_Around):
    """Writes a version that brings a draft."""

    def __init__(self, writer: Writer, kept: KeptDraft, live: str, params: frozenset[str]) -> None:
        super().__init__(writer)
        self._kept = kept
        self._live = live
        self._params = params

    def write(self, threads: SliceThreads) -> None:
        self._kept.keep(self._live, self._params)
        super().write(threads)


class _BringingBack(_Around):
    """Writes a version that brings none, and the draft that was live with it."""

    def __init__(
        self, writer: Writer, live: LiveParameters, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(writer)
        self._live = live
        self._tensors = tensors

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(tensor.nbytes for tensor in self._tensors.values())

    def write(self, threads: SliceThreads) -> None:
        super().write(threads)
        for name, tensor in self._tensors.items():
            memory_of(self._live.tensor(name)).copy_(tensor)

    def verify(self, threads: SliceThreads) -> list[str]:
        wrong = super().verify(threads)
        for name, tensor in self._tensors.items():
            if not torch.equal(memory_of(self._live.tensor(name)).cpu(), tensor):
                wrong.append(name)
        return wrong
