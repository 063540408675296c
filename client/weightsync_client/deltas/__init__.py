"""What a client needs to send what changed: the last version's bytes, and shards of the difference.

A trainer rank that owns pieces of tensors fits in later: a held tensor is compared and advanced by
itself, so its bytes may as well be those of a piece, under the name and range of that piece.
"""

from __future__ import annotations

from weightsync_client.deltas.encoding import DeltaShards
from weightsync_client.deltas.pace import Pace
from weightsync_client.deltas.sampling import sampled_ratio
from weightsync_client.deltas.snapshot import Held, Snapshot, Taking
from weightsync_client.deltas.unfit import Unfit
from weightsync_client.deltas.warmth import Warmth

__all__ = ["DeltaShards", "Held", "Pace", "Snapshot", "Taking", "Unfit", "Warmth", "sampled_ratio"]
