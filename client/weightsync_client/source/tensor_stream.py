"""Tensors that come one after the other, known before or not, and are never collected.

vLLM is not imported. See `WeightSource` in
https://docs.vllm.ai/en/latest/api/vllm/distributed/weight_transfer/base/

Up to vLLM 0.32 a source is itself iterable, and `held_names()` tells what this rank has. What it
would declare is not asked for, because for some, as Megatron's, that is a collective as well: who
has called `metadata()` on all ranks pushes `Declared`. From 0.33 on `iter_full()` begins a pass,
`metadata` is there without one, and `owned_names(rank)` tells what any rank has.
"""

from __future__ import annotations

import contextlib
import logging
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from weightsync.errors import Reason
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.layout import check_count
from weightsync.model.manifest import Layout
from weightsync_client.errors import invalid, refuse, typed_errors
from weightsync_client.source.casting import Casting
from weightsync_client.source.shards import Shard, cut, tensor_shard
from weightsync_client.source.tensors import CopyMemory, Scratch, SourceTensor, dtype_name, wrap

if TYPE_CHECKING:
    from weightsync_client.source.shards import LayoutCache


logger = logging.getLogger(__name__)


#: What an iterator does not give.
_END = object()


class TensorStream(Iterator[SourceTensor]):
    """The tensors of an iterable: each is copied as it comes, and the iterable's is not held.

    An iterator may reuse the memory of a tensor when it is asked for the next one. `failed` says
    that an error came where a tensor was due. `declared` is what has to come, or None if not known.
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
        """Yield shards of `before`, then of all that has not come yet.

        `on_group` is called with the tensors of each shard before it is given.
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
    """With `collective`, read `pairs` to their end before an error goes on: other ranks need it."""
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
        logger.warning(
            "the iterable of tensors raised while the rest of it was read after a failed push",
            exc_info=True,
        )


def note_name(name: str, seen: set[str]) -> None:
    """Add a name to those that were seen; InvalidError: it is one of them."""
    if name in seen:
        raise refuse(Reason.LAYOUT_INVALID, f"the source gave tensor {name!r} twice")
    seen.add(name)


def wrap_pair(pair: object) -> SourceTensor:
    return wrap(*named(pair))


def named(pair: object) -> tuple[str, object]:
    match pair:
        case (str() as name, value):
            return name, value
        case (name, _):
            raise invalid(
                f"the name of a tensor is {reprlib.repr(name)}; use a string",
            )
    raise invalid(
        f"a source must give pairs of a name and a tensor, this one gave a {type(pair).__name__}",
    )


class _FullTensors(Protocol):
    """A `WeightSource` from vLLM 0.33 on."""

    def iter_full(self) -> Iterator[tuple[str, Any]]: ...


#: Names and tensors, one after the other.
Pairs = Iterable[tuple[str, Any]] | _FullTensors


def is_weight_source(value: object) -> bool:
    base = getattr(sys.modules.get("vllm.distributed.weight_transfer.base"), "WeightSource", None)
    return base is not None and isinstance(value, base)


def full_pairs(source: Any) -> Iterator[tuple[str, Any]]:
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


def check_whole(source: Any) -> None:
    """Refuse a source of which this rank gives only what it has itself."""
    if not getattr(source, "implements_iter_full", lambda: True)():
        raise invalid(
            "this source gives parts of tensors only; push one with iter_full, such as vLLM's "
            "ModuleSource(model)",
        )
    names = getattr(source, "held_names", lambda: None)()
    if names is not None:
        _check_lacks_none("this source", [about.name for about in source.metadata()], names)


def check_owned(source: Any, rank: int) -> None:
    """Refuse a vLLM source of which the pushing `rank` does not have all tensors.

    Sources before vLLM 0.33 say nothing of other ranks, and are not refused.
    """
    if hasattr(source, "owned_names"):
        known = [about.name for about in source.metadata]
        _check_lacks_none(f"rank {rank}", known, source.owned_names(rank))


def _check_lacks_none(who: str, known: Collection[str], names: Collection[str]) -> None:
    missing = set(known).difference(names)
    if missing:
        raise invalid(
            f"{who} lacks {len(missing)} of the {len(known)} tensors of the model, such as "
            f"{min(missing)!r}, that other ranks have; push a source that gives all of them",
        )


@dataclass(frozen=True, slots=True)
class Declared:
    """Name and tensor pairs that come one after the other, as declared, or are not pushed.

    Attributes:
        pairs: Any iterable of them, or vLLM's `WeightSource`.
        layout: Name, dtype and shape of each, in the order in which they come: tuples, or objects
            with these attributes, such as the metadata of vLLM's `WeightSource`. A dtype is
            PyTorch's, or a safetensors name such as "BF16".
    """

    pairs: Pairs
    layout: Iterable[Any]


class Declaration:
    """What was declared of an iterable, and how far it has kept to that.

    The argument `layout` is as in `Declared`; the attribute is the whole layout. `shards` have no
    bytes.
    """

    def __init__(
        self,
        layout: Iterable[Any],
        shard_bytes: int,
        layouts: LayoutCache,
        casting: Casting | None = None,
    ) -> None:
        self._expected = [_entry(about) for about in layout]
        self._seen = 0
        self.shards: Sequence[Shard]
        self.layout: Layout
        sent = self._expected
        if casting is not None:
            sent = [casting.declared(tensor) for tensor in sent]
        self.shards, self.layout = layouts.shards_of(sent, shard_bytes)

    def check(self, tensor: SourceTensor) -> None:
        if self._seen == len(self._expected):
            raise _refused(f"the iterable gave {_text(tensor)} after all that were declared")
        expected = self._expected[self._seen]
        self._seen += 1
        if _facts(tensor) != _facts(expected):
            raise _refused(f"the iterable gave {_text(tensor)}, declared was {_text(expected)}")

    def check_end(self) -> None:
        missing = self._expected[self._seen :]
        if missing:
            raise _refused(
                f"the iterable ended {len(missing)} tensors before its declaration, at "
                f"{_text(missing[0])}"
            )


def _entry(about: Any) -> SourceTensor:
    try:
        facts = (about.name, about.dtype, about.shape) if hasattr(about, "name") else tuple(about)
        name, dtype, shape = facts
        shape = tuple(map(int, shape))
    except (AttributeError, TypeError, ValueError):
        name, shape = None, ()
    if not isinstance(name, str) or min(shape, default=0) < 0:
        raise refuse(
            Reason.LAYOUT_INVALID,
            f"a declared layout has an entry of type {type(about).__name__} that is not name, "
            "dtype and shape of a tensor; declare each as such a tuple",
        )
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPE_BITS:
        dtype = dtype_name(name, dtype)
    return SourceTensor(name, dtype, shape, _no_bytes)


def _no_bytes(_: object) -> Any:
    raise refuse(
        Reason.FAULT,
        "report this fault: the declaration of a tensor was asked for its bytes, which only the "
        "iterable gives",
    )


def _facts(tensor: SourceTensor) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, tensor.dtype, tensor.shape


def _text(tensor: SourceTensor) -> str:
    return f"{tensor.name!r} ({tensor.dtype} {list(tensor.shape)})"


def _refused(problem: str) -> Exception:
    return refuse(
        Reason.LAYOUT_INVALID, f"{problem}; declare exactly what the source gives, in its order"
    )
