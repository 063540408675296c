"""Trainers for a server of tests: they do what their requests say."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from weightsync_client.trainer import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from weightsync_client.attach import Attached

__all__ = ["AddingTrainer", "BrokenTrainer"]

#: Longer than any test.
_FOREVER_S = 600.0


class AddingTrainer:
    """Adds a number to every parameter, once per step, and counts its steps as its state.

    A request may have

        add: the number; default 10
        steps: how often; default 1
        quiet: after how many steps it commits nothing more
        lease_s: of each transaction
        background: whether each transaction is pushed while the trainer goes on
        wait_s: before each step, for as long or until it is cancelled
        raise, hang, leave, fork: "before", "inside" or "after" the transaction of a step
        yield: what a step is, in the place of progress

    """

    def setup(self, attached: Attached) -> None:
        self.attached = attached
        self.count = 0

    def train(self, request: Mapping[str, Any], cancelled: threading.Event) -> Iterator[Any]:
        for step in range(request.get("steps", 1)):
            if cancelled.wait(request.get("wait_s", 0.0)):
                return
            self._fail("before", request)
            if step < request.get("quiet", _FOREVER_S):
                self._add(request)
            self.count += 1
            self._fail("after", request)
            yield request.get("yield") or Progress(step, loss=float(self.count), tokens=4)

    def save_state(self, folder: Path) -> None:
        (folder / "count").write_text(str(self.count))

    def load_state(self, folder: Path) -> None:
        self.count = int((folder / "count").read_text())

    def _add(self, request: Mapping[str, Any]) -> None:
        options = {name: request[name] for name in ("lease_s", "background") if name in request}
        with self.attached.transaction(**options):
            for name in self.attached.boxes:
                written = self.attached.read(name) + request.get("add", 10)
                self.attached.write(name, written)
            self._fail("inside", request)

    def _fail(self, place: str, request: Mapping[str, Any]) -> None:
        if request.get("raise") == place:
            msg = f"diverged {place} the transaction"
            raise ArithmeticError(msg)
        if request.get("leave") == place:
            os._exit(7)
        if request.get("fork") == place:
            os.fork()
        if request.get("hang") == place:
            # The server's log has what trainers print.
            print(f"it hangs {place} the transaction", flush=True)  # noqa: T201 - as they do
            time.sleep(_FOREVER_S)


class BrokenTrainer(AddingTrainer):
    """Cannot be set up."""

    def setup(self, attached: Attached) -> None:
        msg = f"no optimizer for {attached.checkpoint}"
        raise LookupError(msg)
