"""What a push on the server's host is held against: a plain copy, and what memory allows.

Both take the tensors that are pushed and have nothing to do with a server.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.source import Source
from weightsync.model.digest import tensor_digest
from weightsync.shm.segments import Segment
from weightsync_client.transport.copying import copier_of

__all__ = ["limit_of", "plain_copy"]


def plain_copy(source: Source) -> Callable[[], None]:
    """Return what copies the tensors one by one into warm memory, on one thread."""
    target = {name: np.ones_like(tensor) for name, tensor in source.tensors.items()}

    def copy() -> None:
        for name, tensor in source.tensors.items():
            np.copyto(target[name], tensor)

    return copy


@contextlib.contextmanager
def limit_of(source: Source, threads: int) -> Iterator[Callable[[], None]]:
    """Yield what moves bytes as a push does, and does nothing else.

    Threads copy the tensors into memory like the server's and digest them on the way, with the
    client's own loop; then they digest what lies there.
    """
    tensors = [tensor.data.cast("B") for tensor in source.tensors.values()]
    places: list[memoryview] = []
    # A thread takes its share at once: between two tasks of a pool it would wait.
    shares = [range(first, len(tensors), threads) for first in range(threads)]

    def copy(share: range) -> list[bytes]:
        return [_copied(tensors[number], places[number]) for number in share]

    def digest(share: range) -> list[bytes]:
        return [tensor_digest(places[number]) for number in share]

    size = sum(map(len, tensors))
    with (
        ThreadPoolExecutor(threads) as pool,
        contextlib.closing(Segment.create(size)) as segment,
    ):
        ends = itertools.accumulate(map(len, tensors), initial=0)
        places += [segment.view[begin:end] for begin, end in itertools.pairwise(ends)]

        def move() -> None:
            assert list(pool.map(copy, shares)) == list(pool.map(digest, shares))

        yield move


def _copied(tensor: memoryview, place: memoryview) -> bytes:
    copier = copier_of(len(tensor))
    copier.update(tensor, place)
    return copier.digest()
