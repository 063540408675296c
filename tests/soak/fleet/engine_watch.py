"""Asks the engine of a member again and again what it generates with, past every server."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from tests.soak.fleet.fleet_record import Served

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Container

    from tests.soak.fleet.fleet_record import FleetRecord
    from tests.soak.history import History

__all__ = ["EngineWatch"]

_PACE_S = 0.05


class EngineWatch:
    """Puts what one engine serves into the record.

    Args:
        member: Whose engine it is.
        ask: Asks it; None: it does not answer.
        known: Contents that there are.
        record: Where it goes.
        history: Is told of each change, and where it serves what is no content.

    Attributes:
        member: As given.
        answers: How often it answered.
        serves: What it generated with at the last look; empty: nothing.
    """

    def __init__(
        self,
        member: str,
        ask: Callable[[], dict[str, Any] | None],
        known: Container[str],
        record: FleetRecord,
        history: History,
    ) -> None:
        self.answers, self.serves = 0, ""
        self.member, self._ask, self._known = member, ask, known
        self._record, self._history = record, history
        self._run: Served | None = None
        #: When it was asked for the last answer that was given.
        self._before = -math.inf

    def run(self, over: threading.Event) -> None:
        """Look until it is over."""
        while not over.wait(_PACE_S):
            self.look()

    def look(self) -> None:
        """Look once."""
        asked = time.monotonic()
        answer = self._ask()
        self.answers += answer is not None
        content = str(answer["content"]) if answer is not None and answer["generating"] else ""
        if content != self.serves:
            self._history.note(member=self.member, serves=content)
        self.serves = content
        if not content:
            self._run = None
        elif self._run is not None and self._run.content == content:
            self._run.ended = asked
        else:
            self._run = Served(self.member, content, time.monotonic(), asked, self._before)
            self._record.served.append(self._run)
            if content not in self._known:
                self._history.violate(f"{self.member} serves what is no version: {content}")
        if answer is not None:
            self._before = asked
