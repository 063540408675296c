"""Trainers that are attached to the engine, and what goes wrong with them."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from tests.support.in_place_trainers import busy_trainer
from tests.support.late_writers import WAYS, late_writer

if TYPE_CHECKING:
    import contextlib
    import random
    from collections.abc import Callable

    from tests.soak.history import History
    from tests.soak.site import Site

__all__ = ["AttachedTrainers"]

#: How long an engine is looked at that must not generate, seconds.
_LOOK_S = 1.0


class AttachedTrainers:
    """Each method is a blow: nothing that such a trainer writes may be served.

    What is served is compared with what was live by who watches the engine, and by the next check.

    Args:
        site: The processes.
        history: The record.
        still: Lets nobody call while it is entered.
        rng: Of all choices.
    """

    def __init__(
        self,
        site: Site,
        history: History,
        still: Callable[[], contextlib.AbstractContextManager[None]],
        rng: random.Random,
    ) -> None:
        self._site, self._history = site, history
        self._still, self._rng = still, rng

    def late(self) -> bool:
        """Have one write when its block is over, or it has detached."""
        way = self._rng.choice(sorted(WAYS))
        with self._still():
            if not self._serves():
                return False
            ended = late_writer(self._site.server.address, way, commits=False)
        if not ended:
            self._history.violate(f"a late write ({way}) was no fault of its writer")
        return ended == -signal.SIGSEGV

    def orphaned(self) -> bool:
        """Kill the server in a block; the trainer may stand still then, and goes on later."""
        stops = self._rng.random() < 0.5
        with self._still():
            if not self._serves():
                return False
            try:
                with busy_trainer(self._site.server.address) as (trainer, _):
                    assert trainer.pid is not None
                    if stops:
                        os.kill(trainer.pid, signal.SIGSTOP)
                    self._site.kill_server()
                    self._site.start_server()
                    self._look(stops=stops)
                    if stops:
                        os.kill(trainer.pid, signal.SIGCONT)
                    time.sleep(_LOOK_S)
            except AssertionError:
                # Another fault has kept it from its block.
                return False
        return True

    def _serves(self) -> bool:
        told = self._site.engine.told()
        return bool(self._site.pid and told is not None and told["generating"])

    def _look(self, *, stops: bool) -> None:
        end = time.monotonic() + _LOOK_S
        while stops and time.monotonic() < end:
            told = self._site.engine.told()
            if told is not None and told["generating"]:
                self._history.violate("an engine generates that a stopped trainer can write")
                return
            time.sleep(0.02)
