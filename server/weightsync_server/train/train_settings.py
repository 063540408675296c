"""The settings of a server that supervises a trainer."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, field_validator

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TrainSettings", "check_trainer"]

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class TrainSettings(BaseModel):
    """Settings of trainers in place; a server without `trainer` supervises none."""

    trainer: str = Field(
        "",
        description="module:Class of a trainer that this server starts, supervises and gives jobs, "
        "beside an engine whose memory it trains in. Empty: none.",
    )
    trainer_python: Path | None = Field(
        None,
        description="Python that runs the trainer; weightsync's client must be installed for it. "
        "Default: that of the server.",
    )
    trainer_engine: str = Field(
        "", description="Name of the engine that it trains in; empty: the only one."
    )
    trainer_queue: int = Field(
        16, ge=0, le=1024, description="Jobs that wait for the one that runs; more are refused."
    )
    trainer_start_timeout_s: float = Field(
        300, gt=0, description="Longest start of the trainer, its setup included, seconds."
    )
    trainer_silence_s: float = Field(
        60,
        gt=0,
        description="Seconds after which a trainer that gives no sign of life is ended: it is "
        "frozen, or what it runs keeps Python's lock.",
    )
    trainer_grace_s: float = Field(
        10,
        ge=0,
        description="Seconds that a job gets to end when it is cancelled; then its process is "
        "ended, and started anew.",
    )
    in_place_pause_s: float = Field(
        60,
        gt=0,
        description="Longest time that an engine stands still while a trainer writes its memory, "
        "however often that renews its lease, seconds; then the version before is put back.",
    )
    checkpoint_dir: Path | None = Field(
        None, description="Folder below which Checkpoint writes folders; None: it writes none."
    )
    checkpoint_folders: int = Field(
        16,
        ge=0,
        description="Folders of Checkpoint that stay there: beyond that the oldest is removed, "
        "unless somebody has changed it. 0: all.",
    )

    @field_validator("trainer")
    @classmethod
    def _check_class(cls, value: str) -> str:
        if value and not _CLASS.fullmatch(value):
            raise ValueError(f"trainer must be module:Class, such as tune:Tuner, not {value!r}")
        return value

    @field_validator("trainer_python")
    @classmethod
    def _check_python(cls, value: Path | None) -> Path | None:
        if value is not None and not (value.is_file() and os.access(value, os.X_OK)):
            raise ValueError(f"{value} is no program that can be run; name a Python interpreter")
        return value


def check_trainer(settings: TrainSettings, fleet: str, follow: str, engines: Sequence[str]) -> None:
    """Refuse a trainer where what it writes could never be served.

    Args:
        settings: Those of the trainer.
        fleet: The fleet of the server; "": none.
        follow: What it follows, or whose node it is; "": nothing.
        engines: Those that are named.

    Raises:
        ValueError: With the remedy.
    """
    if not settings.trainer:
        for name in ("checkpoint_dir", "trainer_python", "trainer_engine"):
            if getattr(settings, name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} is of use to a trainer alone; add --trainer module:Class, or leave "
                    f"{flag} out"
                )
        return
    if fleet:
        raise ValueError(
            "trainer is for a server that is in no fleet, which decides what its members serve"
        )
    if follow:
        raise ValueError(
            "trainer is for a server that takes versions of its own; give it to the one that is "
            "followed, or to the head"
        )
    if list(engines) == ["none"]:
        raise ValueError("trainer needs an engine to train in; name one with --engine")
    if len(engines) > 1 and not settings.trainer_engine:
        raise ValueError("there are several engines; name the trainer's with --trainer-engine")
