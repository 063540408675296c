"""Why a push is sent in full."""

from __future__ import annotations

from weightsync_client.types import Fallback

__all__ = ["Unfit"]


class Unfit(Exception):  # noqa: N818 - no error: the push goes on in full
    """No delta can be sent, or none that pays; the same push in full can.

    Attributes:
        reason: What the result and the server's counter tell.
        text: The same for people.
    """

    def __init__(self, reason: Fallback, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text
