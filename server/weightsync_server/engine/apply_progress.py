"""Where the apply is that has an engine, as GetStatus shows it until it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weightsync import clock
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.refusals import duration

#: Of several engines, that is shown which is in the first of these: the others wait for it.
_BEHIND = (
    pb.RUNNING_PHASE_RESTORE,
    pb.RUNNING_PHASE_PREPARE,
    pb.RUNNING_PHASE_PAUSE,
    pb.RUNNING_PHASE_COMMIT,
    pb.RUNNING_PHASE_SCORE,
    pb.RUNNING_PHASE_RESUME,
    pb.RUNNING_PHASE_WAIT,
)


class _Moment(NamedTuple):
    """A time by the wall clock, and by one that nobody sets."""

    wall_ns: int = 0
    steady: float = 0.0


class ApplyProgress:
    """Tells what an apply does with one engine, from when it takes it until it gives it back.

    `apply_id` is "" while none has it; nothing is told then. A trainer's transaction enters no
    phase.
    """

    def __init__(self, engine: str) -> None:
        self.apply_id = ""
        self._engine = engine
        self._version = self._previous = 0
        self._phase: pb.RunningPhase.ValueType = pb.RUNNING_PHASE_UNSPECIFIED
        self._began = self._entered = _Moment()

    def begin(self, apply_id: str) -> None:
        self.apply_id = apply_id
        self._version = self._previous = 0
        self._phase, self._began = pb.RUNNING_PHASE_UNSPECIFIED, _now()

    def end(self) -> None:
        self.apply_id = ""

    def prepare(self, version: int, previous: int) -> None:
        """Begin to prepare a version, of an engine on which another is live."""
        self._version, self._previous = version, previous
        self.enter(pb.RUNNING_PHASE_PREPARE)

    def enter(self, phase: pb.RunningPhase.ValueType) -> None:
        self._phase, self._entered = phase, _now()

    def status(self, pending_ranks: Sequence[str]) -> pb.RunningApply | None:
        """Return what GetStatus shows; `pending_ranks` have not finished what all were asked."""
        if not self.apply_id or not self._phase:
            return None
        now, preparing = clock.monotonic(), self._phase == pb.RUNNING_PHASE_PREPARE
        running = pb.RunningApply(
            apply_id=self.apply_id,
            engine=self._engine,
            version=self._version,
            previous_version=self._previous,
            phase=self._phase,
            took=duration(now - self._began.steady),
            in_phase=duration(now - self._entered.steady),
            pending_ranks=pending_ranks if preparing else (),
        )
        running.began.FromNanoseconds(self._began.wall_ns)
        running.phase_began.FromNanoseconds(self._entered.wall_ns)
        return running


def furthest_behind(engines: Iterable[pb.EngineStatus]) -> pb.RunningApply | None:
    """Return the apply on the engine that the others wait for, the longest; None: none runs."""
    running = [one.running_apply for one in engines if one.HasField("running_apply")]
    return min(
        running,
        key=lambda one: (_BEHIND.index(one.phase), one.phase_began.ToNanoseconds()),
        default=None,
    )


def _now() -> _Moment:
    return _Moment(clock.wall_ns(), clock.monotonic())
