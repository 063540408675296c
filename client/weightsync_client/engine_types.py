"""What the client returns of the engines beside a server; see `types`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightsync_client.rank_types import RankResult

__all__ = ["EngineOrder", "EngineProof", "EngineState", "EngineStatus"]


class EngineOrder(enum.StrEnum):
    """In which order the engines of a host take a version: all in one pause, or in turn."""

    UNSPECIFIED = enum.auto()
    TOGETHER = enum.auto()
    ROLLING = enum.auto()


class EngineState(enum.StrEnum):
    """What the server is doing with the engine."""

    UNSPECIFIED = enum.auto()
    AWAY = enum.auto()
    RECONCILING = enum.auto()
    SERVING = enum.auto()
    APPLYING = enum.auto()
    FENCED = enum.auto()
    PROVING = enum.auto()


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine beside the server; `reason` says why it is fenced or away.

    Attributes:
        warnings: What makes its vLLM less safe than it need be.
        name: The file name of its socket without `.sock`, or how the server was told to make it;
            empty: the server is an earlier one, which tells nothing of what follows either.
        live_version: What every rank serves; 0: not known.
        rollback_version: What a rollback of this engine would go to; 0: none.
        rollback_resident: That lies in memory, and where versions are loaded, loaded.
        apply_id: Apply in progress; empty: none.
    """

    state: EngineState
    reason: str
    engine_id: str
    vllm_version: str
    kind: str
    ranks: tuple[RankResult, ...]
    capabilities: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    name: str = ""
    live_version: int = 0
    live_content_digest: str = ""
    rollback_version: int = 0
    rollback_resident: bool = False
    apply_id: str = ""


@dataclass(frozen=True, slots=True)
class EngineProof:
    """Whether every rank's live parameters hold exactly the version, on the engine so named."""

    engine: str
    verified: bool
    version: int
    ranks: tuple[RankResult, ...]
    absent: str = ""
    """Why it was not asked: it serves nothing, and counts for nothing in the whole."""
