"""What the client returns of a rank and of its loader; see `types`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["LoaderState", "LoaderStatus", "RankResult", "Transform"]


class Transform(enum.StrEnum):
    """What leads to a rank's live bytes: copies by the load plan, or a load beside generation."""

    UNSPECIFIED = enum.auto()
    PLAN = enum.auto()
    TWIN = enum.auto()


class LoaderState(enum.StrEnum):
    """What the loader of a rank does; UNSPECIFIED: it has none."""

    UNSPECIFIED = enum.auto()
    STARTING = enum.auto()
    PROVING = enum.auto()
    READY = enum.auto()
    LOADING = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class LoaderStatus:
    """The loader of a rank whose versions are loaded beside generation.

    Attributes:
        version: What it loads, or loaded last; 0: none.
        percent: How much of its present phase is done.
        arena_bytes: Memory that holds what it loaded.
        restarts: How often a loader had to be started again.
        last_error: Why the last load failed; empty: it did not.
        load_s: How long the last load took.
    """

    state: LoaderState
    version: int
    percent: int
    arena_bytes: int
    restarts: int
    last_error: str
    load_s: float


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank reports.

    Attributes:
        rank: Data, pipeline and tensor parallel rank, as dp/pp/tp.
        version: What its live parameters hold; 0: no whole version.
        content_digest: What its live parameters were proved to hold; empty: nothing.
        error: Why it refused or failed; empty: it did not.
        h2d_bytes: Bytes sent to its device for this version.
        device_room_bytes: Memory of its device that it may take to stage versions.
        device_used_bytes: Memory of its device that it has taken, scratch included.
        transform: How versions become live on it.
        transform_reason: Why that is not the plan; empty: it is, or nobody knows any more.
        loader: Its loader; None: it has none.
    """

    rank: str
    version: int
    content_digest: str
    written_bytes: int
    commit_s: float
    verify_s: float
    error: str
    h2d_bytes: int = 0
    device_room_bytes: int = 0
    device_used_bytes: int = 0
    transform: Transform = Transform.UNSPECIFIED
    transform_reason: str = ""
    loader: LoaderStatus | None = None
