"""A rank's connection to a trainer, which ends once, whoever ends it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.vllm.worker.update_sink import UpdateSink

__all__ = ["TrainerConnection"]

logger = logging.getLogger(__name__)


class TrainerConnection:
    """Ends without a word of the trainer; every method may be called by any thread.

    Args:
        wire: vLLM's own engine of the transfer.
        close: Ends it and what is under way on it; may take seconds.

    Attributes:
        wire: As given.
    """

    def __init__(self, wire: Any, close: Callable[[], None]) -> None:
        self.wire = wire
        self._close = close
        self._lock = threading.Lock()
        self._ended = False

    @property
    def open(self) -> bool:
        """Whether nobody has begun to end it."""
        return not self._ended

    def refuse(self) -> None:
        """Begin no transfer any more: its thread must not use a communicator that is being freed.

        Returns at once; the one that is under way goes on until `end`.
        """
        self._ended = True
        sink: UpdateSink = self.wire.model
        sink.leave()
        group = getattr(self.wire, "model_update_group", None)
        if group is not None:
            group.broadcast = _refuse_broadcast

    def end(self) -> None:
        """Refuse, and end what is under way, which takes seconds where a communicator waits."""
        self.refuse()
        # Twice at once would free a communicator twice.
        with self._lock:
            try:
                self._close()
            except Exception:
                logger.exception("weightsync: a connection to a trainer could not be closed")


def _refuse_broadcast(*args: object, **more: object) -> NoReturn:
    del args, more
    msg = "the connection to the trainer was ended"
    raise RuntimeError(msg)
