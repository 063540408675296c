"""Which errors mean that bytes are damaged; all others are faults of the host, and pass.

There are three sets because three kinds of bytes are read, and each can be wrong in its own ways.
"""

from __future__ import annotations

from weightsync.errors import Reason

__all__ = ["DELTA_DAMAGE", "SHARD_DAMAGE", "STORED_DAMAGE"]

#: Of whole shards, in shared memory or a file.
SHARD_DAMAGE = frozenset({Reason.DATA_CORRUPT, Reason.SHARD_INVALID, Reason.LAYOUT_INVALID})
#: Of delta shards: their own digests, and those of what they change, may differ.
DELTA_DAMAGE = frozenset({Reason.SHARD_INVALID, Reason.DIGEST_MISMATCH, Reason.LAYOUT_INVALID})
#: Of a version in the store, where files may be missing as well.
STORED_DAMAGE = SHARD_DAMAGE | {Reason.VERSION_UNKNOWN}
