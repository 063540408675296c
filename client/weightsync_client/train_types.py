"""What the client returns of the trainer that a server supervises; see `types`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["CheckpointResult", "TrainEvent", "TrainProgress", "TrainStatus", "TrainerState"]


class TrainEvent(enum.StrEnum):
    """What a job has come to: it waits, the trainer has taken it, it did a step, it ended well."""

    UNSPECIFIED = enum.auto()
    QUEUED = enum.auto()
    STARTED = enum.auto()
    STEP = enum.auto()
    FINISHED = enum.auto()


class TrainerState(enum.StrEnum):
    """Where the trainer's process stands."""

    UNSPECIFIED = enum.auto()
    STARTING = enum.auto()
    READY = enum.auto()
    TRAINING = enum.auto()
    AWAY = enum.auto()


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """What a job has come to; what does not belong to the event is 0 or None.

    Attributes:
        job_id: Names the job.
        event: What happened.
        version: STARTED: the live version that it begins on. STEP: the version that is live since
            this step; 0: it has committed none. FINISHED: the version that is live after it.
        ahead: QUEUED: jobs before it, the one that runs included.
        state_version: STARTED: the version whose state the optimizer has; 0: it was begun anew.
        step: STEP: its number in the job. FINISHED: how many there were.
        loss: STEP: its loss, if it has one.
        tokens: STEP: how many it was trained on, if known.
        duration_s: FINISHED: how long it ran, seconds.
    """

    job_id: str
    event: TrainEvent
    version: int = 0
    ahead: int = 0
    state_version: int = 0
    step: int = 0
    loss: float | None = None
    tokens: int | None = None
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """A durable version.

    Attributes:
        version: Its number.
        path: Folder that was written, on the server's host; empty: none was asked for.
        missing: What a vLLM that loads the folder needs and does not find in it, such as
            config.json, one sentence; empty: nothing.
    """

    version: int
    path: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class TrainStatus:
    """What the trainer does.

    Attributes:
        state: Where its process stands.
        reason: Why it is not ready, or why its last process ended; empty: nothing is wrong.
        pid: Its process; 0: there is none.
        restarts: Times that it was started anew.
        running_job_id: The job that runs; empty: none.
        running_steps: Steps that it has done.
        queued_job_ids: Jobs that wait, the next one first.
        finished: Jobs that ended well, since the server started.
        failed: Jobs that failed.
        cancelled: Jobs that were cancelled.
        state_version: The version whose state the optimizer has; 0: it was begun anew.
    """

    state: TrainerState
    reason: str
    pid: int
    restarts: int
    running_job_id: str
    running_steps: int
    queued_job_ids: tuple[str, ...]
    finished: int
    failed: int
    cancelled: int
    state_version: int
