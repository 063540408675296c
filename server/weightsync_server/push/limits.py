"""Bounds on what one push may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.model.layout import MAX_TENSORS

__all__ = ["PushLimits"]


@dataclass(frozen=True)
class PushLimits:
    """Settings of pushes.

    Attributes:
        max_pushes: Pushes open at once.
        max_streams: Streams of one push at once.
        max_version_jump: Most that a version may lie above the newest one.
        resume_timeout_s: Seconds without stream and call after which a push is dropped.
        stream_idle_timeout_s: Seconds without a message after which a stream is ended, late by at
            most a quarter.
        writer_timeout_s: Seconds for which a writer of several may stay away or bring nothing.
        max_writers: Writers of one push.
        max_boxes: Boxes that all writers of a push declare.
        slot_wait_s: Longest wait for a slot when the call has no deadline, in seconds.
        max_chunk_bytes: Largest chunk.
        max_message_bytes: Largest message that is no chunk.
        max_shards: Shards of one version.
        max_tensors: Tensors of one version.
        max_metadata_entries: Entries of metadata.
        max_metadata_bytes: Bytes of all keys and values of metadata.
        max_key_bytes: Bytes of an idempotency key.
        keep_bytes: Bytes of a shard that are made durable at once: few flushes, and little is lost.
        loss_bytes: Most bytes of a shard that a crash of the server may lose.
        remembered: Ended pushes that can still be asked about.
    """

    max_pushes: int = 4
    max_streams: int = 64
    max_version_jump: int = 1_000_000
    resume_timeout_s: float = 600.0
    stream_idle_timeout_s: float = 60.0
    writer_timeout_s: float = 60.0
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
