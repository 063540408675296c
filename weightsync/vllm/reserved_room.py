"""Device memory that vLLM leaves free when it sizes its key-value cache, because a user said so."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.vllm.env import Amount

__all__ = ["reserve_room"]

logger = logging.getLogger(__name__)


def reserve_room(worker_class: type, room: Amount) -> None:
    """Let workers on a GPU take less for their cache by what is wanted beside vLLM's share.

    What `gpu_memory_utilization` leaves counts first. A cache of a given size
    (`kv_cache_memory_bytes`) stays as it was asked for. Repeating it is harmless.

    Args:
        worker_class: VLLM's worker for GPUs.
        room: What a rank may take.
    """
    own: Any = vars(worker_class).get("determine_available_memory")
    if own is None or hasattr(own, "_weightsync"):
        return

    @functools.wraps(own)
    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> int:
        found = int(own(self, *args, **kwargs))
        lacking = _lacking(self, room)
        if lacking <= 0 or getattr(self.cache_config, "kv_cache_memory_bytes", None):
            return found
        if lacking >= found:
            msg = (
                f"WEIGHTSYNC_DEVICE_ROOM asks for {lacking} bytes more than "
                f"gpu_memory_utilization leaves, and vLLM has only {found} for its cache; lower "
                "one of the two"
            )
            raise ValueError(msg)
        logger.info(
            "weightsync: the cache is %d bytes smaller, for WEIGHTSYNC_DEVICE_ROOM", lacking
        )
        return found - lacking

    determine_available_memory._weightsync = True  # type: ignore[attr-defined]  # noqa: SLF001 - our mark
    worker_class.determine_available_memory = determine_available_memory  # type: ignore[attr-defined]  # VLLM's class


def _lacking(worker: Any, room: Amount) -> int:
    """Return how many bytes of the room are not left by what vLLM may take; 0: on a CPU."""
    if getattr(worker.device, "type", "") != "cuda":
        return 0
    total = int(worker.init_snapshot.total_memory)
    return room.of(total) - (total - int(worker.requested_memory))
