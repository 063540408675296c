"""Sources as vLLM's trainers make them: iterables whose iteration may be collective.

vLLM is not imported: who has such a source has imported it. See `WeightSource` in
https://docs.vllm.ai/en/latest/api/vllm/distributed/weight_transfer/base/

What a source would declare is not asked for here, where one rank pushes: for some, as Megatron's,
that is a collective as well. Who has called `metadata()` on all ranks pushes `Declared`.
"""

from __future__ import annotations

import sys
from typing import Any

from weightsync.errors import Reason
from weightsync_client.errors import refuse

__all__ = ["check_whole", "is_weight_source"]


def is_weight_source(value: object) -> bool:
    """Whether a value is a `WeightSource` of vLLM, whose ranks must all iterate to the end."""
    base = getattr(sys.modules.get("vllm.distributed.weight_transfer.base"), "WeightSource", None)
    return base is not None and isinstance(value, base)


def check_whole(source: Any) -> None:
    """Refuse a source of which this rank gives only what it has itself.

    Raises:
        InvalidError: Naming how many of the model's tensors it would lack.
    """
    names = getattr(source, "held_names", lambda: None)()
    if names is None:
        return
    known = {str(about.name) for about in source.metadata()}
    missing = known.difference(names)
    if missing:
        raise refuse(
            Reason.REQUEST_INVALID,
            f"this source lacks {len(missing)} of the {len(known)} tensors of the model, such as "
            f"{min(missing)!r}, which other ranks have; push a source that gives all of them",
        )
