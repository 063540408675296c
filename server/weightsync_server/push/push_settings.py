"""What one push may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.model.layout import MAX_TENSORS
from weightsync_server.ops.settings_group import setting


@dataclass(frozen=True)
class PushSettings:
    """Settings of pushes, and bounds that are always the same.

    `max_streams` and `max_writers` are per push, `max_shards` and `max_tensors` per version.

    Attributes:
        max_boxes: Slices that all writers of a push declare.
        slot_wait_s: Longest wait for a slot when the call has no deadline.
        max_message_bytes: Largest message that is no chunk.
        max_metadata_bytes: Of all keys and values together.
        keep_bytes: Bytes of a shard that are made durable at once.
        loss_bytes: Most bytes of a shard that a crash of the server may lose.
        remembered: Ended pushes that can still be asked about.
    """

    max_pushes: int = setting(4, "Limit of open pushes, shared among the callers that push.", ge=1)
    max_version_jump: int = setting(
        1_000_000, "How far a version number may be above the newest.", ge=1
    )
    # It may be late by a quarter.
    stream_idle_timeout_s: float = setting(
        60,
        "Seconds without a message or heartbeat after which a stream is ended.",
        name="push_idle_timeout_s",
        gt=0,
    )
    resume_timeout_s: float = setting(
        600,
        "Seconds without a stream after which an open push is dropped; after a twentieth of that "
        "it gives its slot back, unless the store is memory://.",
        name="push_resume_timeout_s",
        gt=0,
    )
    writer_timeout_s: float = setting(
        60,
        "Seconds for which one of several writers of a push may be missing or send nothing; then "
        "the push is dropped for all.",
        name="push_writer_timeout_s",
        gt=0,
    )
    max_streams: int = 64
    max_writers: int = 1024
    max_boxes: int = 1 << 22
    slot_wait_s: float = 60.0
    max_chunk_bytes: int = 2 << 20
    max_message_bytes: int = 1 << 20
    max_shards: int = 4096
    max_tensors: int = MAX_TENSORS
    max_metadata_entries: int = 64
    max_metadata_bytes: int = 16 << 10
    max_key_bytes: int = 128
    keep_bytes: int = 16 << 20
    loss_bytes: int = 64 << 20
    remembered: int = 256

    @property
    def sleep_after_s(self) -> float:
        """Seconds without stream and call after which a push gives its slot back, if it can."""
        return self.resume_timeout_s / 20
