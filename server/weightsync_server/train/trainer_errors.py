"""What is said where the trainer has not done something, or has ended."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["away", "ending", "refusal_of", "unstartable"]


def refusal_of(answer: Mapping[str, Any]) -> WeightSyncError:
    """Return what a trainer says of something that it has not done."""
    metadata = answer.get("metadata")
    return WeightSyncError(Reason(answer["reason"]), answer["error"], metadata=metadata)


def away(why: str) -> WeightSyncError:
    """Return the refusal of a job for want of a trainer, of which there will be one soon."""
    return WeightSyncError(
        Reason.TRAINER_AWAY,
        f"no trainer can do this now ({why}); see the server's log, then send it again",
    )


def unstartable(error: WeightSyncError, again_s: float) -> WeightSyncError:
    """Return the refusal of a job where no trainer will be there unless somebody does something.

    Args:
        error: Why a start has failed, with the remedy.
        again_s: Longest time until the next one, seconds.
    """
    return WeightSyncError(
        Reason.TRAINER_AWAY,
        f"no trainer can be started, which is tried again after at most {again_s:g} s: "
        f"{error.message}",
        metadata=error.metadata,
    )


def ending(status: int | None) -> str:
    """Return how a process has ended, as the end of a sentence."""
    if status is None:
        return "does not end"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
