"""Which trainer a server supervises, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TrainOptions"]


@dataclass(frozen=True)
class TrainOptions:
    """What there is to know of it.

    Attributes:
        trainer: module:Class.
        python: What runs it; None: the server's interpreter.
        model: Model name.
        engine: Name of the engine; "": the only one.
        address: Where it attaches: a socket of its own.
        states: Folder of the states of its optimizer.
        checkpoints: Folder below which it writes checkpoints; None: it writes none.
        checkpoint_folders: How many of these stay; 0: all.
        identity: Of the server, whose folders they are.
        queue: Jobs that may wait.
        start_timeout_s: Longest start, seconds.
        silence_s: Longest time without a sign of life, seconds.
        grace_s: What a job gets to end, seconds.
        log_level: Of its log.
    """

    trainer: str
    python: Path | None
    model: str
    engine: str
    address: str
    states: Path
    checkpoints: Path | None
    checkpoint_folders: int
    identity: str
    queue: int
    start_timeout_s: float
    silence_s: float
    grace_s: float
    log_level: str
