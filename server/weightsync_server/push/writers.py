"""The writers of one push: who has come, who gets on, who has finished."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from weightsync.errors import Reason, WeightSyncError
from weightsync.errors import WeightSyncError as Refusal
from weightsync.v1 import weightsync_pb2 as pb

#: Looks within the time that a writer may bring nothing.
_LOOKS = 8
#: Characters of what a writer tells the others.
MAX_REASON_CHARS = 1024


class PushWriters:
    """Fails a push when one of several writers does not come or brings nothing more.

    A lone writer is not waited for. A writer may bring nothing for `timeout_s`, late by at most an
    eighth. `progress` returns the bytes that it has brought, `complete` whether that is everything,
    and `busy` whether all of them may be waiting for the server now. `fail` is called at most once.

    Attributes:
        absent: Writers of several that have not begun.
        committed: Those that have brought everything and wait for the others.
        met: Set once all have committed, or the push has ended.
    """

    def __init__(
        self,
        count: int,
        timeout_s: float,
        progress: Callable[[int], int],
        complete: Callable[[int], bool],
        busy: Callable[[], bool],
        fail: Callable[[Refusal], None],
    ) -> None:
        self.several = count > 1
        self.absent = set(range(count)) if self.several else set()
        self.committed: set[int] = set()
        self.met = asyncio.Event()
        self.count = count
        self._timeout_s = timeout_s
        self._progress = progress
        self._complete = complete
        self._busy = busy
        self._fail = fail
        self._calls: Counter[int] = Counter()
        self._seen: dict[int, tuple[int, int]] = {}
        self._loop = asyncio.get_running_loop()
        self._since: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def check(self, writer: int) -> None:
        if writer >= self.count:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"writer is {writer}, but the push has {self.count} writers; number them from 0",
            )

    def given_up(self, request: pb.AbortPushRequest) -> WeightSyncError:
        if not self.several:
            return WeightSyncError(Reason.PUSH_ABORTED, "the push was aborted; begin it again")
        why = f": {request.reason[:MAX_REASON_CHARS]}" if request.reason else ""
        return WeightSyncError(
            Reason.PUSH_ABORTED,
            f"writer {request.writer} gave the push up for all{why}; push again",
            metadata={"writer": str(request.writer)},
        )

    def start(self) -> None:
        if not self.several:
            return
        self._since = dict.fromkeys(range(self.count), self._loop.time())
        self._look()

    def come(self, writer: int) -> None:
        """A writer begins; that it does so again is no progress."""
        if writer in self.absent:
            self.absent.discard(writer)
            self._calls[writer] += 1

    def declare(self, writer: int) -> None:
        """A writer has told, for the first time, what it brings of a shard."""
        self._calls[writer] += 1

    def commit(self, writer: int) -> None:
        self.committed.add(writer)
        if len(self.committed) == self.count:
            self.met.set()

    def close(self) -> None:
        """The push has ended; further calls do nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.met.set()

    def _look(self) -> None:
        now = self._loop.time()
        waited_for = set(range(self.count)) - self.committed
        # Who has brought everything may wait for the others before it asks for the commit.
        waiting = {writer for writer in waited_for if self._complete(writer)}
        if waiting == waited_for:
            waiting = set()
        if self._busy():
            waiting = waited_for
        for writer in waited_for:
            brought = self._calls[writer], self._progress(writer)
            if brought != self._seen.get(writer) or writer in waiting:
                self._seen[writer] = brought
                self._since[writer] = now
        # Others may wait for the one that has been late for longest.
        last = min(waited_for, key=lambda writer: (self._since[writer], writer), default=None)
        if last is not None and now - self._since[last] >= self._timeout_s:
            self._timer = None
            self._fail(self._late(last))
            return
        self._timer = self._loop.call_later(self._timeout_s / _LOOKS, self._look)

    def _late(self, writer: int) -> WeightSyncError:
        what = "did not arrive" if writer in self.absent else "brought nothing more"
        return WeightSyncError(
            Reason.PUSH_ABORTED,
            f"writer {writer} of {self.count} {what} for {self._timeout_s:g} s, so the push was "
            "dropped for all; see what that process does, and push again",
            metadata={"writer": str(writer)},
        )
