"""What leads from a version's bytes to a rank's live bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weightsync.vllm.apply.device_ops import Progress, Stop

if TYPE_CHECKING:
    from weightsync.shm.staged_version import StagedVersion
    from weightsync.vllm.apply.writes import ParamWriter


class NeedsLoadError(Exception):
    """A rank has not loaded a version, or does not know any more whether it has."""


class Prepared(Protocol):
    """A version made ready on one rank.

    It is told apart by its identity: what was found out for one is true of no other.
    """

    @property
    def apply_id(self) -> str:
        """The server's name for it."""

    @property
    def content_digest(self) -> str:
        """Identity of the version, computed on the rank."""

    @property
    def segments(self) -> tuple[str, ...]:
        """Ids of the segments that it reads; none of them is unmapped while it is kept."""


@dataclass(frozen=True)
class TransformRequest:
    """A version that is complete.

    Attributes:
        base: What the live parameters are proved to hold; None: not known.
        stage: Whether it is staged, where versions are.
        ticket: What it was called when it was prefetched; "": it was not.
        progress: Called with how far the version was read.
    """

    apply_id: str
    staged: StagedVersion
    socket: str
    base: Prepared | None
    stage: bool
    ticket: str
    progress: Progress


class VersionTransform(Protocol):
    """Makes versions ready beside generation, writes them in a pause, compares them after it.

    What takes a `stop` asks it now and then, and True raises StoppedError.
    """

    @property
    def name(self) -> str:
        """`plan` or `twin`, as replies tell it."""

    def prepare(self, request: TransformRequest, stop: Stop) -> tuple[Prepared, Mapping[str, Any]]:
        """Return a version that can be written, and what the report tells of that.

        Raises:
            PlanRefusedError: The model cannot take it.
            NeedsLoadError: It must be loaded first.
        """

    def writer(self, target: Prepared, live: str) -> ParamWriter:
        """Return what writes a prepared version, cheaply enough for a pause.

        `live` is the content digest of what the live parameters are proved to hold, "" if it is not
        known.
        """

    def invalidate(self, target: Prepared) -> None:
        """Forget what was found in live parameters before `target` was written over them."""

    def compare(self, target: Prepared, stop: Stop) -> list[str]:
        """Digest the live parameters; return those that do not hold a version."""
