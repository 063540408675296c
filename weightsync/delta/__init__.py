"""The lossless delta codec: what differs between two versions, in about a byte per changed value.

Needs the base's bytes and nothing else of it: `docs/reference/delta-format.md` specifies the
format. Encoding
and decoding release the GIL in their heavy parts.
"""

from __future__ import annotations

from weightsync.delta.coding import DeltaError
from weightsync.delta.decoder import ElementUpdate, apply_change, decode_tensor, patch
from weightsync.delta.delta_shard import (
    DenseDelta,
    DenseTensor,
    ShardDelta,
    TensorChange,
    parse_shard,
)
from weightsync.delta.encoder import (
    Changes,
    EncodedShard,
    Encoder,
    Item,
    Later,
    TensorStats,
    WholeTensor,
    encode_shard,
)
from weightsync.delta.kernels import warm_up

__all__ = [
    "Changes",
    "DeltaError",
    "DenseDelta",
    "DenseTensor",
    "ElementUpdate",
    "EncodedShard",
    "Encoder",
    "Item",
    "Later",
    "ShardDelta",
    "TensorChange",
    "TensorStats",
    "WholeTensor",
    "apply_change",
    "decode_tensor",
    "encode_shard",
    "parse_shard",
    "patch",
    "warm_up",
]
