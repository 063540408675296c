"""Processes that the user's class forks: none of them is the trainer."""

from __future__ import annotations

import logging
import os

__all__ = ["end_forked_child"]

logger = logging.getLogger(__name__)


def end_forked_child(trainer: int) -> None:
    """Return in the trainer's process alone; one that was forked from it ends here, with status 1.

    Args:
        trainer: Process id of the trainer.
    """
    pid = os.getpid()
    if pid == trainer:
        return
    logger.error(
        "process %d, forked from trainer %d, has come back from the trainer's class: it is ended; "
        "end such a process with os._exit, or start it as a program of its own",
        pid,
        trainer,
    )
    os._exit(1)
