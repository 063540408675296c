"""Tensors that come one after the other, and of which it is known before which ones will come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync.model.dtypes import DTYPE_BITS
from weightsync_client.errors import refuse
from weightsync_client.source.tensors import SourceTensor, dtype_name
from weightsync_client.source.weight_sources import Pairs

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout
    from weightsync_client.source.casting import Casting
    from weightsync_client.source.layout_cache import LayoutCache
    from weightsync_client.source.shards import Shard

__all__ = ["Declaration", "Declared"]


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

    Args:
        layout: See `Declared`.
        shard_bytes: Most bytes of tensors in a shard that holds more than one.
        layouts: Knows how the tensors of the last push lay.
        casting: How they are sent; None: as they are.

    Attributes:
        shards: Its shards, without bytes.
        layout: The whole layout.

    Raises:
        InvalidError: It is no layout.
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
        """Refuse a tensor that is not the next one.

        Raises:
            InvalidError: Naming what came and what was declared.
        """
        if self._seen == len(self._expected):
            raise _refused(f"the iterable gave {_text(tensor)} after all that were declared")
        expected = self._expected[self._seen]
        self._seen += 1
        if _facts(tensor) != _facts(expected):
            raise _refused(f"the iterable gave {_text(tensor)}, declared was {_text(expected)}")

    def check_end(self) -> None:
        """Refuse an end before the last tensor has come.

        Raises:
            InvalidError: Naming the first that is missing.
        """
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
    raise refuse(Reason.FAULT, "what is declared of a tensor has no bytes")


def _facts(tensor: SourceTensor) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, tensor.dtype, tensor.shape


def _text(tensor: SourceTensor) -> str:
    return f"{tensor.name!r} ({tensor.dtype} {list(tensor.shape)})"


def _refused(problem: str) -> Exception:
    return refuse(Reason.LAYOUT_INVALID, f"{problem}; declare just what comes, in its order")
