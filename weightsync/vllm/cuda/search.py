"""Which elements differ between live and staged memory: counted first, then taken."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from weightsync.cuda.kernels import Launch
from weightsync.cuda.spans import SPAN, THREADS, cut, fits
from weightsync.vllm.cuda.compare import unequal
from weightsync.vllm.words import StoppedError, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from weightsync.cuda.kernels import Kernels
    from weightsync.vllm.cuda.blocks import Block
    from weightsync.vllm.cuda.scatter import Scatter
    from weightsync.vllm.cuda.staged import Staged
    from weightsync.vllm.cuda.upload import Pace

__all__ = ["KernelSearch", "Search", "TorchSearch", "searches"]

#: Spans of a launch: what else runs on an H200 waits for 0.2 ms of it.
_AT_ONCE = (256 << 20) // SPAN


class Search(Protocol):
    """Looks through pieces whose elements have one width.

    Attributes:
        pieces: What it looks through.
    """

    pieces: Sequence[Block]

    def count(self, pace: Pace, stop: Callable[[], bool]) -> list[int]:
        """Return how many elements of each piece differ.

        Args:
            pace: Of the current stream.
            stop: Asked now and then; True raises `StoppedError`.
        """

    def take(
        self,
        chosen: Sequence[bool],
        scatter: Scatter,
        begin: int,
        pace: Pace,
        stop: Callable[[], bool],
    ) -> int:
        """Fill in the places and the staged values of what `count` has counted.

        Args:
            chosen: The pieces whose elements are taken.
            scatter: Takes them,
            begin: from this one of its elements on.
            pace: Of the current stream.
            stop: Asked now and then; True raises `StoppedError`.

        Returns:
            One past the last element that was filled in.

        Raises:
            RuntimeError: Not as many differ as were counted.
        """


def searches(staged: Staged, pieces: Iterable[Block]) -> list[Search]:
    """Return what looks through pieces of a staged version; call `staged.targets.views` first."""
    groups: dict[tuple[int, bool], list[Block]] = defaultdict(list)
    for piece in pieces:
        ours = staged.kernels is not None and fits(*_sides(staged, piece))
        groups[piece.dtype.itemsize, ours].append(piece)
    return [
        KernelSearch(staged, some, staged.kernels)
        if ours and staged.kernels is not None
        else TorchSearch(staged, some)
        for (_, ours), some in groups.items()
    ]


@dataclass
class TorchSearch:
    """Looks at one piece after the other; see `Search`."""

    staged: Staged
    pieces: Sequence[Block]
    _counts: list[int] = field(default_factory=list)

    def count(self, pace: Pace, stop: Callable[[], bool]) -> list[int]:
        """See `Search`."""
        counts = []
        try:
            for piece in self.pieces:
                if stop():
                    raise StoppedError
                counts.append(self._unequal(piece).sum())
                pace.step()
        finally:
            pace.drain()
        self._counts = torch.stack(counts).tolist() if counts else []
        return self._counts

    def take(
        self,
        chosen: Sequence[bool],
        scatter: Scatter,
        begin: int,
        pace: Pace,
        stop: Callable[[], bool],
    ) -> int:
        """See `Search`."""
        for piece, count, wanted in zip(self.pieces, self._counts, chosen, strict=True):
            if not wanted:
                continue
            if stop():
                raise StoppedError
            end = begin + count
            # Waits for the device, which knows how many there are.
            places = self._unequal(piece).nonzero().reshape(-1)
            if places.numel() != count:
                raise _written_meanwhile()
            words = words_of(piece.staged(self.staged.memory))
            torch.index_select(words, 0, places, out=scatter.values[begin:end])
            first = scatter.place(piece.live(self.staged.targets))
            torch.add(places, first, out=scatter.positions[begin:end])
            pace.step()
            begin = end
        return begin

    def _unequal(self, piece: Block) -> torch.Tensor:
        live, wanted = map(words_of, _sides(self.staged, piece))
        return unequal(live, wanted, self.staged.mask)


class KernelSearch:
    """Looks at many pieces with each launch; see `Search`.

    Args:
        staged: The version.
        pieces: Of one width, each of which `fits` has accepted; at least one.
        kernels: Of their device.
    """

    def __init__(self, staged: Staged, pieces: Sequence[Block], kernels: Kernels) -> None:
        rows = [cut(0, *_sides(staged, piece)) for piece in pieces]
        self.pieces = pieces
        self._bits = 8 * pieces[0].dtype.itemsize
        self._kernels = kernels
        self._device = staged.memory.device
        self._table = np.concatenate(rows)
        self._piece_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        self._counts: NDArray[np.int64]

    def count(self, pace: Pace, stop: Callable[[], bool]) -> list[int]:
        """See `Search`."""
        table = self._sent(self._table)
        counts = torch.zeros(len(table), dtype=torch.int32, device=self._device)
        for part in _parts(len(table), stop):
            self._queue("count_changes", part, [table[part], counts[part]])
            pace.step()
        self._counts = counts.cpu().numpy().astype(np.int64)
        found = np.zeros(len(self.pieces), dtype=np.int64)
        np.add.at(found, self._piece_of, self._counts)
        numbers: list[int] = found.tolist()
        return numbers

    def take(
        self,
        chosen: Sequence[bool],
        scatter: Scatter,
        begin: int,
        pace: Pace,
        stop: Callable[[], bool],
    ) -> int:
        """See `Search`."""
        some = np.asarray(chosen)[self._piece_of] & (self._counts > 0)
        begins = begin + np.concatenate([[0], np.cumsum(self._counts[some])])
        table, borders = self._sent(self._table[some]), self._sent(begins)
        wrong = torch.zeros(1, dtype=torch.int32, device=self._device)
        row, positions, values = scatter.row.data_ptr(), scatter.positions, scatter.values
        for part in _parts(len(table), stop):
            own = borders[part.start : part.stop + 1]
            self._queue("take_changes", part, [table[part], own, row, positions, values, wrong])
            pace.step()
        if wrong.item():
            raise _written_meanwhile()
        return int(begins[-1])

    def _sent(self, table: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(table).to(self._device)

    def _queue(self, name: str, part: slice, arguments: Sequence[torch.Tensor | int]) -> None:
        grid = part.stop - part.start, THREADS
        Launch(self._kernels, f"{name}_{self._bits}", grid, arguments).queue()


def _sides(staged: Staged, piece: Block) -> tuple[torch.Tensor, torch.Tensor]:
    return piece.live(staged.targets), piece.staged(staged.memory)


def _parts(count: int, stop: Callable[[], bool]) -> Iterator[slice]:
    for begin in range(0, count, _AT_ONCE):
        if stop():
            raise StoppedError
        yield slice(begin, min(begin + _AT_ONCE, count))


def _written_meanwhile() -> RuntimeError:
    return RuntimeError("the parameters were written while they were compared; prepare again")
