"""The handle of a push that runs in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from weightsync_client.types import PushResult

__all__ = ["PushHandle"]


class PushHandle:
    """A push that runs in the background.

    Attributes:
        source_free: Done when the source may be changed: the server holds every byte, or all that
            changed was encoded, and the adapters of a PEFT model are unmerged. It fails if the push
            fails before that; they are unmerged then too.
        committed: Done when the version is committed, with its PushResult, or with the error.
    """

    def __init__(self) -> None:
        self.source_free: Future[None] = Future()
        self.committed: Future[PushResult] = Future()
        # Running futures cannot be cancelled by whoever waits for them; the push can, by `cancel`.
        self.source_free.set_running_or_notify_cancel()
        self.committed.set_running_or_notify_cancel()
        self._cancel: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], PushResult], cancel: Callable[[], None]) -> None:
        """Run the push in a thread of its own; called once, by the client."""
        self._cancel = cancel
        # No daemon: a trainer that ends after its last step does not lose that step's push.
        self._thread = threading.Thread(target=self._run, args=(run,), name="weightsync-push-run")
        self._thread.start()

    def _run(self, run: Callable[[], PushResult]) -> None:
        try:
            result = run()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            if not self.source_free.done():
                self.source_free.set_exception(error)
            self.committed.set_exception(error)
        else:
            self.committed.set_result(result)
        finally:
            # It holds the source, which may have memory of its own.
            self._cancel = lambda: None

    def cancel(self) -> None:
        """End the push; `committed` then fails with AbortedError, unless the commit came first."""
        self._cancel()

    def join(self) -> None:
        """Wait until the push has ended, well or not."""
        if self._thread is not None:
            self._thread.join()
