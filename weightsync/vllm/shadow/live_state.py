"""What lies in the live model and in the arenas beside it, and their exchange."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.vllm.apply.device_ops import DeviceOps, Exchange, Stop
from weightsync.vllm.apply.host_patch import row_digests, rows_of
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.plan.live_params import ParameterChangedError

if TYPE_CHECKING:
    import torch

    from weightsync.vllm.shadow.model_state import ModelState


#: What vLLM calls the scales by which it reads a quantised cache, whatever is around these words.
_CACHE_SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True)
class LoadedVersion:
    """A version as loading leaves it in memory.

    `digests` are of every row, and `numbers` are what kernels are called with, by path, as bits.
    """

    content_digest: str
    digests: tuple[bytes, ...]
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class _Arena:
    """Memory that is exchanged with the live weights, row for row.

    `version` is what lies there; None: not known.
    """

    rows: Sequence[torch.Tensor]
    exchange: Exchange
    version: LoadedVersion | None = None


class ExchangedMemory:
    """The live weights of a rank, and arenas of the same form: none at first.

    `threads` digest beside generation. A thread that writes an arena holds `lock`. `in_model`,
    which lies in the model, is None if it is not known. `nbytes` is of the live weights, and of
    each arena.
    """

    def __init__(self, live: ModelState, ops: DeviceOps, threads: SliceThreads) -> None:
        self.lock = threading.Lock()
        self.in_model: LoadedVersion | None = None
        self.form = live.form
        self.nbytes = sum(live.form.spans)
        self._live = rows_of(live.memory)
        self._places = live.places
        self._spans = [index for index, piece in enumerate(live.memory) for _ in rows_of([piece])]
        self._ops = ops
        self._threads = threads
        self._arenas: list[_Arena] = []
        #: What was live before the version that is.
        self._before: LoadedVersion | None = None
        self._proved: set[str] = set()

    @property
    def arenas(self) -> int:
        return len(self._arenas)

    @property
    def versions(self) -> list[LoadedVersion]:
        """What lies in the model and in every arena, as far as that is known."""
        found = [self.in_model, *(arena.version for arena in self._arenas)]
        return [version for version in found if version is not None]

    def replaceable(self, limit: int, content_digest: str = "") -> int:
        """Return the arena that a load may fill; the number of arenas stands for a new one.

        One that holds the version is filled again. What was live before is kept if another one can
        be filled. There may be `limit` arenas.
        """
        for at, arena in enumerate(self._arenas):
            if arena.version is not None and arena.version.content_digest == content_digest:
                return at
        unknown = [at for at, arena in enumerate(self._arenas) if arena.version is None]
        if unknown:
            return unknown[0]
        if len(self._arenas) < max(1, limit):
            return len(self._arenas)
        other = [at for at, arena in enumerate(self._arenas) if arena.version != self._before]
        return other[0] if other else 0

    def put_arena(self, index: int, memory: Sequence[torch.Tensor]) -> None:
        """Take rows of bytes as arena `index`, in place of another, or as one more.

        Nothing may be under way.
        """
        rows = rows_of(memory)
        pairs = list(zip(self._live, rows, strict=True))
        self._arenas[index : index + 1] = [_Arena(rows, self._ops.exchange(pairs))]

    def drop_arenas(self) -> None:
        """Let go of all of them; nothing is under way."""
        self._arenas = []
        self._forget()

    def set_version(self, index: int, version: LoadedVersion | None) -> None:
        """Take note of what was put into an arena; None: not known.

        That version counts as unknown in other arenas, and as unproved: its source may be damaged.
        """
        for at, arena in enumerate(self._arenas):
            again = version is not None and _digest(arena.version) == version.content_digest
            if at == index or again:
                arena.version = None
        self._forget()
        if version is not None:
            self._arenas[index].version = version

    def _forget(self) -> None:
        self._proved &= {version.content_digest for version in self.versions}

    def check_unmoved(self, live: ModelState) -> None:
        """Refuse to write where the model no longer looks: its weights lie in `live` now."""
        now = [row.data_ptr() for row in rows_of(live.memory)]
        owners = {path: place.owner for path, place in live.places.items()}
        # Paths and forms stay the same where vLLM has made a helper object anew: its numbers would
        # be written to the old one, and read back from there.
        moved = any(owners.get(path) is not place.owner for path, place in self._places.items())
        if moved or live.form != self.form or now != [row.data_ptr() for row in self._live]:
            raise ParameterChangedError(
                "restart vLLM: something other than weightsync replaced weights of the model "
                "(vLLM's own reload does)"
            )

    def has(self, content_digest: str) -> LoadedVersion | None:
        """Return a version if it lies in the model or in an arena, whole."""
        found = (v for v in self.versions if v.content_digest == content_digest)
        return next(found, None)

    def has_proved(self, content_digest: str) -> bool:
        """Whether a version lies in the model or in an arena, and was proved.

        One that was only loaded is not proved: its source may have changed meanwhile.
        """
        return content_digest in self._proved and self.has(content_digest) is not None

    def write(self, target: LoadedVersion, threads: SliceThreads) -> None:
        """Make a version live that lies in an arena; what was live lies there then."""
        with self.lock:
            before = self.in_model
            if before == target:
                return
            arena = next((arena for arena in self._arenas if arena.version == target), None)
            if arena is None or before is None:
                self._write_rows(target, threads)
                return
            self.in_model = arena.version = None
            arena.exchange.run(threads)
            self._write_numbers(target)
            # On a device it is still under way; whoever reads either side comes behind it.
            self.in_model, arena.version, self._before = target, before, before

    def _write_rows(self, target: LoadedVersion, threads: SliceThreads) -> None:
        """Exchange the rows that are not the version's: an exchange may have broken off."""
        self.in_model = None
        found = row_digests(self._ops, self._live, threads)
        wrong = [i for i, digest in enumerate(target.digests) if found[i] != digest]
        arena = self._holding(wrong, target, threads) if wrong else None
        if arena is not None:
            arena.version = None
            self._ops.exchange([(self._live[i], arena.rows[i]) for i in wrong]).run(threads)
        self._write_numbers(target)
        self.in_model = target

    def _write_numbers(self, target: LoadedVersion) -> None:
        for path in self._other_numbers(target):
            self._places[path].write(float.fromhex(target.numbers[path]))

    def _other_numbers(self, target: LoadedVersion) -> list[str]:
        return [path for path, bits in target.numbers.items() if self._bits(path) != bits]

    def _bits(self, path: str) -> str:
        number = self._places[path].read()
        return "" if number is None else number.hex()

    def _holding(self, rows: Sequence[int], target: LoadedVersion, threads: SliceThreads) -> _Arena:
        for arena in self._arenas:
            digests = row_digests(self._ops, [arena.rows[i] for i in rows], threads)
            if digests == [target.digests[i] for i in rows]:
                return arena
        msg = "the version is neither in the model nor beside it; it must be loaded again"
        raise ParameterChangedError(msg)

    def unlike(
        self, target: LoadedVersion, threads: SliceThreads | None = None, stop: Stop | None = None
    ) -> list[str]:
        """Digest the live weights; return a tensor of each piece that is not the version's.

        `target` must be live. Without `threads` it runs beside generation, and raises StoppedError
        when `stop` returns True.
        """
        found = row_digests(self._ops, self._live, threads or self._threads, stop)
        pairs = zip(self._spans, found, target.digests, strict=True)
        spans = dict.fromkeys(span for span, have, wanted in pairs if have != wanted)
        numbers = self._other_numbers(target)
        if not spans and not numbers:
            self.in_model = target
            self._proved.add(target.content_digest)
            self._forget()
        elif self.in_model == target:
            self.in_model = None
        return [*(self.form.named(span) for span in spans), *numbers]

    def reads_cache_otherwise(self, target: LoadedVersion) -> bool:
        """Whether cached keys and values mean something else under a version, by their scales."""
        live = self.in_model
        if live is None:
            return any(map(_is_cache_scale, (*self.form.tensors, *target.numbers)))
        spans = {form.span for path, form in self.form.tensors.items() if _is_cache_scale(path)}
        rows = zip(self._spans, live.digests, target.digests, strict=True)
        moved = any(span in spans and have != wanted for span, have, wanted in rows)
        return moved or any(
            _is_cache_scale(path) and live.numbers.get(path) != bits
            for path, bits in target.numbers.items()
        )


def _is_cache_scale(path: str) -> bool:
    name = path.rpartition(".")[2]
    return any(word in name for word in _CACHE_SCALES)


def _digest(version: LoadedVersion | None) -> str:
    return version.content_digest if version is not None else ""
