"""What lies in the live model and in the arena, and the exchange of the two."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.vllm.apply.byte_rows import row_digests, rows_of
from weightsync.vllm.plan.live_params import ParameterChangedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weightsync.vllm.apply.device_ops import DeviceOps, Stop
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.twin.model_state import ModelState

__all__ = ["ExchangedMemory", "LoadedVersion"]


@dataclass(frozen=True)
class LoadedVersion:
    """A version as loading leaves it in memory.

    Attributes:
        content_digest: Identity of the version.
        digests: Of every row of that memory.
    """

    content_digest: str
    digests: tuple[bytes, ...]


class ExchangedMemory:
    """The live weights of a rank, and an arena of the same form.

    Args:
        live: The weights as they lie in the model.
        arena: Each piece of the arena, as a row of bytes.
        ops: Digests and exchanges.
        threads: What digests beside generation.

    Attributes:
        lock: Held by whoever writes the arena.
        in_model: What lies in the model; None: not known.
        in_arena: What lies in the arena; None: not known.
        nbytes: Of either side.
    """

    def __init__(
        self,
        live: ModelState,
        arena: Sequence[torch.Tensor],
        ops: DeviceOps,
        threads: SliceThreads,
    ) -> None:
        self.lock = threading.Lock()
        self.in_model: LoadedVersion | None = None
        self.in_arena: LoadedVersion | None = None
        self.form = live.form
        self.nbytes = sum(live.form.spans)
        self._live = rows_of(live.memory)
        self._spare = rows_of(arena)
        self._spans = [index for index, piece in enumerate(live.memory) for _ in rows_of([piece])]
        self._ops = ops
        self._threads = threads
        self._exchange = ops.exchange(self._pairs)
        self._proved: set[str] = set()

    @property
    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self._live, self._spare, strict=True))

    def replace_arena(self, arena: Sequence[torch.Tensor]) -> None:
        """Take another arena of the same form; nothing may be under way."""
        self._spare, self.in_arena = rows_of(arena), None
        self._exchange = self._ops.exchange(self._pairs)

    def check_unmoved(self, live: ModelState) -> None:
        """Refuse to write where the model no longer looks.

        Args:
            live: The weights as they lie in the model now.

        Raises:
            ParameterChangedError: Something has replaced them.
        """
        now = [row.data_ptr() for row in rows_of(live.memory)]
        if live.form != self.form or now != [row.data_ptr() for row in self._live]:
            msg = (
                "something else than weightsync has replaced weights of the model (vLLM's own "
                "reload does); restart vLLM"
            )
            raise ParameterChangedError(msg)

    def has(self, content_digest: str) -> LoadedVersion | None:
        """Return a version if it lies on either side, whole."""
        for version in (self.in_model, self.in_arena):
            if version is not None and version.content_digest == content_digest:
                return version
        return None

    def has_proved(self, content_digest: str) -> bool:
        """Whether a version lies on either side that was live.

        Of what was only loaded nobody knows whether its source stayed as it was meanwhile, unless
        the server that asked for it has looked.
        """
        return content_digest in self._proved and self.has(content_digest) is not None

    def write(self, target: LoadedVersion, threads: SliceThreads) -> None:
        """Make a version live that lies in the arena; what was live lies there then.

        Args:
            target: It.
            threads: Does the work.

        Raises:
            ParameterChangedError: It lies on neither side.
        """
        with self.lock:
            if self.in_model == target:
                return
            if self.in_arena != target or self.in_model is None:
                self._write_rows(target, threads)
                return
            before = self.in_model
            self.in_model = self.in_arena = None
            self._exchange.run(threads)
            # On a device it is still under way; whoever reads either side comes behind it.
            self.in_model, self.in_arena = target, before

    def _write_rows(self, target: LoadedVersion, threads: SliceThreads) -> None:
        """Exchange the rows that are not the version's, by what they hold.

        An exchange may have ended in the middle.
        """
        self.in_model = self.in_arena = None
        found = row_digests(self._ops, self._live, threads)
        wrong = [i for i, digest in enumerate(target.digests) if found[i] != digest]
        if not wrong:
            self.in_model = target
            return
        spare = row_digests(self._ops, [self._spare[i] for i in wrong], threads)
        if any(have != target.digests[i] for i, have in zip(wrong, spare, strict=True)):
            msg = "the version lies neither in the model nor beside it; it must be loaded again"
            raise ParameterChangedError(msg)
        self._ops.exchange([(self._live[i], self._spare[i]) for i in wrong]).run(threads)
        self.in_model = target

    def unlike(
        self, target: LoadedVersion, threads: SliceThreads | None = None, stop: Stop | None = None
    ) -> list[str]:
        """Digest the live weights; return a tensor of each piece that is not the version's.

        Args:
            target: What must be live.
            threads: Does the work in a pause; None: beside generation.
            stop: Asked now and then beside generation; True raises `StoppedError`.
        """
        found = row_digests(self._ops, self._live, threads or self._threads, stop)
        pairs = zip(self._spans, found, target.digests, strict=True)
        spans = dict.fromkeys(span for span, have, wanted in pairs if have != wanted)
        if not spans:
            self.in_model = target
            kept = {
                version.content_digest for version in (target, self.in_arena) if version is not None
            }
            self._proved = (self._proved | {target.content_digest}) & kept
        elif self.in_model == target:
            self.in_model = None
        return [self.form.named(span) for span in spans]
