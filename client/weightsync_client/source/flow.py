"""Tensors that come one after the other, and are never collected."""

from __future__ import annotations

import contextlib
import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from weightsync.errors import Reason
from weightsync.model.layout import check_count
from weightsync_client.errors import refuse, typed_errors
from weightsync_client.source.casting import Casting
from weightsync_client.source.copy_memory import CopyMemory
from weightsync_client.source.shards import Shard, cut, tensor_shard
from weightsync_client.source.tensors import Scratch, SourceTensor, wrap

if TYPE_CHECKING:
    from weightsync_client.source.declared import Declaration

__all__ = ["Flow", "drained_on_error", "named", "note_name", "wrap_pair"]

logger = logging.getLogger(__name__)

#: What an iterator does not give.
_END = object()


class Flow(Iterator[SourceTensor]):
    """The tensors of an iterable: each is copied as it comes, and the iterable's is not held.

    An iterator may put every tensor into the same memory: it is written to when the next is asked
    for, long before the bytes of this one are sent.

    Args:
        pairs: Names and tensors.
        shard_bytes: Where the tensors are cut into shards.

    Attributes:
        failed: It gave no tensor where one was due, but an error.
        declared: What has to come; None: nobody knows.
        casting: How they are sent.
    """

    def __init__(self, pairs: Iterator[object], shard_bytes: int) -> None:
        self._pairs = pairs
        self._seen: set[str] = set()
        self._memory, self._scratch = CopyMemory(), Scratch(views=True)
        self.shard_bytes = shard_bytes
        self.declared: Declaration | None = None
        self.casting = Casting()
        self.failed = False

    def __next__(self) -> SourceTensor:
        try:
            pair = next(self._pairs, _END)
            if pair is not _END:
                return self._copied(wrap_pair(pair))
            if self.declared is not None:
                self.declared.check_end()
        except BaseException:
            self.failed = True
            raise
        raise StopIteration

    def _copied(self, tensor: SourceTensor) -> SourceTensor:
        note_name(tensor.name, self._seen)
        with typed_errors():
            check_count(len(self._seen))
        if self.declared is not None:
            self.declared.check(tensor)
        sent = self.casting.tensor(tensor)
        return sent.copied(self._memory.take(sent.size), self._scratch)

    def shards(
        self,
        before: Iterable[SourceTensor] = (),
        on_group: Callable[[Sequence[SourceTensor]], None] = lambda _: None,
    ) -> Iterator[Shard]:
        """Yield shards of all that has not come yet.

        Args:
            before: Tensors that go first.
            on_group: Called with the tensors of every shard before it is given.
        """
        for index, group in enumerate(cut(chain(before, self), self.shard_bytes)):
            on_group(group)
            name = f"model-{index + 1:05}.safetensors"
            if self.declared is not None:
                name = self.declared.shards[index].entry.name
            yield tensor_shard(group, index, name)

    def drain(self) -> None:
        """Read what has not come yet, for the other ranks that take part in it."""
        _drain(self._pairs)

    def close(self) -> None:
        """Let go of the iterable; a generator that was left early runs its clean-up now."""
        self._pairs = iter(())


@contextlib.contextmanager
def drained_on_error(pairs: Iterator[object], *, collective: bool) -> Iterator[None]:
    """Within the block, an error has an iterable read to its end before it goes on.

    Args:
        pairs: The iterable.
        collective: Other ranks take part in it; else nothing is read.
    """
    try:
        yield
    except BaseException:
        if collective:
            _drain(pairs)
        raise


def _drain(pairs: Iterator[object]) -> None:
    try:
        for _ in pairs:
            pass
    except Exception:
        # The push has failed before: that is what its caller is told.
        logger.warning("the iterable failed when it was read to its end", exc_info=True)


def note_name(name: str, seen: set[str]) -> None:
    """Add a name to those that were seen.

    Raises:
        InvalidError: It is one of them.
    """
    if name in seen:
        raise refuse(Reason.LAYOUT_INVALID, f"the source gave tensor {name!r} twice")
    seen.add(name)


def wrap_pair(pair: object) -> SourceTensor:
    """Return the tensor that a pair is.

    Raises:
        InvalidError: It is none, or has none.
    """
    return wrap(*named(pair))


def named(pair: object) -> tuple[str, object]:
    """Return the name and the value of a pair.

    Raises:
        InvalidError: It is none.
    """
    match pair:
        case (str() as name, value):
            return name, value
        case (name, _):
            raise refuse(
                Reason.REQUEST_INVALID,
                f"the name of a tensor is {reprlib.repr(name)}; use a string",
            )
    raise refuse(
        Reason.REQUEST_INVALID,
        f"a source must give pairs of a name and a tensor, this one gave a {type(pair).__name__}",
    )
