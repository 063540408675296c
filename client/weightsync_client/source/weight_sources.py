"""Sources as vLLM's trainers make them, whose iteration may be collective.

vLLM is not imported: who has such a source has imported it. See `WeightSource` in
https://docs.vllm.ai/en/latest/api/vllm/distributed/weight_transfer/base/

Up to vLLM 0.32 a source is itself iterable, and `held_names()` tells what this rank has. What it
would declare is not asked for here, where one rank pushes: for some, as Megatron's, that is a
collective as well. Who has called `metadata()` on all ranks pushes `Declared`.

From 0.33 on `iter_full()` begins a pass, `metadata` is there without one, and `owned_names(rank)`
tells what any rank has.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

from weightsync.errors import Reason
from weightsync_client.errors import refuse

__all__ = ["Pairs", "check_owned", "check_whole", "full_pairs", "is_weight_source"]


class _FullTensors(Protocol):
    """A `WeightSource` from vLLM 0.33 on."""

    def iter_full(self) -> Iterator[tuple[str, Any]]: ...


#: Names and tensors, one after the other.
Pairs = Iterable[tuple[str, Any]] | _FullTensors


def is_weight_source(value: object) -> bool:
    """Whether a value is a `WeightSource` of vLLM, whose ranks must all iterate to the end."""
    base = getattr(sys.modules.get("vllm.distributed.weight_transfer.base"), "WeightSource", None)
    return base is not None and isinstance(value, base)


def full_pairs(source: Any) -> Iterator[tuple[str, Any]]:
    """Begin a pass over `Pairs`, each tensor in full."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


def check_whole(source: Any) -> None:
    """Refuse a source of which this rank gives only what it has itself.

    Raises:
        InvalidError: Naming how many of the model's tensors it would lack.
    """
    if not getattr(source, "implements_iter_full", lambda: True)():
        raise refuse(
            Reason.REQUEST_INVALID,
            "this source gives parts of tensors only; push one with iter_full, such as vLLM's "
            "ModuleSource(model)",
        )
    names = getattr(source, "held_names", lambda: None)()
    if names is not None:
        _check_lacks_none("this source", [about.name for about in source.metadata()], names)


def check_owned(source: Any, rank: int) -> None:
    """Refuse a source, from vLLM 0.33 on, of which one rank does not have all tensors.

    Args:
        source: The source; one of an older vLLM says nothing of other ranks, and is not refused.
        rank: Of the process that pushes.

    Raises:
        InvalidError: Naming how many of the model's tensors it would lack.
    """
    if hasattr(source, "owned_names"):
        known = [about.name for about in source.metadata]
        _check_lacks_none(f"rank {rank}", known, source.owned_names(rank))


def _check_lacks_none(who: str, known: Collection[str], names: Collection[str]) -> None:
    missing = set(known).difference(names)
    if missing:
        raise refuse(
            Reason.REQUEST_INVALID,
            f"{who} lacks {len(missing)} of the {len(known)} tensors of the model, such as "
            f"{min(missing)!r}, which other ranks have; push a source that gives all of them",
        )
