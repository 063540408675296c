"""What a rank knows of the content of its live parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.vllm.worker.live_digests import LiveDigests

__all__ = ["LiveContent"]


@dataclass
class LiveContent:
    """What the live parameters were last proved to hold.

    Attributes:
        apply_id: By which it came; "": by none.
        content_digest: Of what they held when that was last proved.
        dirty: They may be half written.
        digests: Of what somebody else has written, which was compared with no version yet; None:
            nothing of that kind.
        writes: Rises before and after every write, so that a comparison notices one that ran
            meanwhile.
    """

    apply_id: str = ""
    content_digest: str = ""
    dirty: bool = False
    digests: LiveDigests | None = None
    writes: int = 0

    @property
    def proved(self) -> str:
        """Content digest of what they hold whole; "" if unknown or half written."""
        return "" if self.dirty else self.content_digest

    def unprove(self) -> None:
        """Know nothing of what they hold, before somebody else writes them."""
        self.begin("")
        self.writes += 2

    def begin(self, apply_id: str) -> None:
        """Take them for half written, by an apply."""
        self.apply_id, self.content_digest, self.dirty, self.digests = apply_id, "", True, None

    def accept(self, name: str, digests: LiveDigests) -> None:
        """Take what somebody else has written for whole, under a name in place of a digest."""
        self.content_digest, self.dirty, self.digests = name, False, digests

    def prove(self, apply_id: str, content_digest: str) -> None:
        """Take note of the version that they hold."""
        self.apply_id, self.content_digest = apply_id, content_digest
        self.dirty, self.digests = False, None
