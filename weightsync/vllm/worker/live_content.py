"""What a rank knows of the content of its live parameters."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LiveContent"]


@dataclass
class LiveContent:
    """What the live parameters were last proved to hold.

    Attributes:
        apply_id: By which it came; "": by none.
        content_digest: Of what they held when that was last proved.
        dirty: They may be half written.
        writes: Rises before and after every write, so that a comparison notices one that ran
            meanwhile.
    """

    apply_id: str = ""
    content_digest: str = ""
    dirty: bool = False
    writes: int = 0

    @property
    def proved(self) -> str:
        """Content digest of what they hold whole; "" if unknown or half written."""
        return "" if self.dirty else self.content_digest

    def unprove(self) -> None:
        """Know nothing of what they hold, before somebody else writes them."""
        self.apply_id, self.content_digest, self.dirty = "", "", True
        self.writes += 2
