"""Limits on what an engine may do, and for whom: stay paused, stay in an apply, go on serving."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable

from weightsync import clock
from weightsync.engine import OnExpiry, OpenApply, PauseSpec
from weightsync.engine.v1 import engine_pb2 as pb
from weightsync.errors import Reason, WeightSyncError

#: Longest lease; a server that wants more renews.
MAX_LEASE_S = 3600.0


class PauseLease:
    """At most one lease, which runs out by itself.

    One that has run out cannot be prolonged any more, also when this process, or its whole host,
    stood still meanwhile and hears of both at once.

    Args:
        on_end: Called with the id of a lease that has run out; it stays the present one until
            `drop`.

    Attributes:
        id: The present lease; empty: none.
        on_expiry: What is to be done when it runs out.
        open_apply: That of the last pause with FENCE; None: there was none, or it is decided.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self.id = ""
        self.on_expiry = OnExpiry.RESUME
        self.open_apply: OpenApply | None = None
        self._on_end = on_end
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, seconds: float, spec: PauseSpec) -> str:
        """Begin the lease of a pause and return its id."""
        self.id = secrets.token_hex(8)
        self.on_expiry = spec.on_expiry
        if spec.on_expiry is OnExpiry.FENCE:
            self.open_apply = spec.apply
        self._run(seconds)
        return self.id

    def check(self, lease_id: str) -> None:
        """Raise ENGINE_REFUSED unless this is the present lease and has not run out."""
        if not self.id or lease_id != self.id or clock.boottime() >= self._until:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"lease {lease_id or '(none)'} is not the current lease; pause the engine again",
            )

    def renew(self, lease_id: str, seconds: float) -> None:
        """Let a lease run out so many seconds from now.

        Raises:
            WeightSyncError: As `check`.
        """
        self.check(lease_id)
        self._run(seconds)

    def drop(self) -> None:
        """End the lease; nobody is told."""
        self.id = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def settle(self) -> None:
        """End the lease: generation has started, and no apply is open any more."""
        self.drop()
        self.open_apply = None

    def undecided(self) -> str:
        """Return, in one sentence, why an engine is fenced whose pause ran out."""
        apply = self.open_apply
        what = f"apply {apply.apply_id} ({apply.base_version} to {apply.version})" if apply else ""
        return (
            f"the pause of {what or 'an apply'} timed out before it was decided; the engine "
            "serves again when its weightsync-server is back and confirms the live version"
        )

    def _run(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = min(max(seconds, 0.0), MAX_LEASE_S)
        self._until = clock.boottime() + seconds
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._on_end, self.id)


def to_message(apply: OpenApply | None) -> pb.OpenApply | None:
    """Return it as a field of a message; None leaves the field unset."""
    if apply is None:
        return None
    return pb.OpenApply(
        apply_id=apply.apply_id, base_version=apply.base_version, version=apply.version
    )


def from_message(apply: pb.OpenApply) -> OpenApply | None:
    """Return what a field of a message holds; None: it is unset, or names no apply."""
    if not apply.apply_id:
        return None
    return OpenApply(apply.apply_id, apply.base_version, apply.version)


class ServeLimit:
    """At most one limit, which each word of the server moves; without one the engine serves on.

    It is counted by `clock.boottime`, as the server counts, also while the host is suspended. One
    that has run out is noticed before it is moved, also when this process stood still meanwhile and
    hears of both at once. After a suspension the timer comes late, as the event loop's clock stood
    still: whoever answers for the engine calls `check` first.

    Args:
        on_end: Called when it has run out; it stays so until it is moved.

    Attributes:
        reason: Why an engine is fenced then, in one sentence.
    """

    reason = (
        "start its weightsync-server again, and see `weightsync fleet status`: the server did "
        "not renew this engine's permission to serve in time, because it is dead, suspended, or "
        "could not read its fleet's register for max_age_s"
    )

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Whether the engine may not serve now."""
        return clock.boottime() >= self._until

    def check(self) -> None:
        """Notice that it has run out, where nobody has noticed yet."""
        if self._timer is not None and self.over:
            self._end()

    def move(self, seconds: float | None) -> None:
        """Let the engine serve for so long from now; None: without a limit."""
        self.check()
        self.drop()
        if seconds is not None:
            self._until = clock.boottime() + seconds
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(seconds, 0.0), self._end)

    def drop(self) -> None:
        """Forget the limit."""
        self._until = math.inf
        self._stop()

    def _end(self) -> None:
        self._stop()
        self._on_end()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


#: In the metadata of a refusal because another server owns the engine.
OWNER_PID = "owner_pid"
#: Longest run_dir of an owner.
MAX_RUN_DIR_BYTES = 4096
#: Characters of it in a sentence.
_SHOWN = 200


def server_of(owner: pb.Owner) -> str:
    """Return how an owner is called in a sentence."""
    folder = "".join(c if c.isprintable() else "?" for c in owner.run_dir[:_SHOWN])
    return f"weightsync-server (pid {owner.pid}, run_dir {folder or 'unknown'})"


def owned_by(owner: pb.Owner) -> str:
    """Return why another server than the owner is refused, and what to do."""
    return (
        f"stop the other {server_of(owner)}, or name another engine here: that server owns this "
        "one while it runs"
    )
