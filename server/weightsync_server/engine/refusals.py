"""What a rank refused, as whoever asked for it is told: by name, and short enough for a status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync_server.engine.worker_reports import Report

__all__ = ["asleep", "check_ready", "no_place", "of_engine", "refusal"]

#: Names in the sentence, and characters of each.
_SHOWN, _SHOWN_CHARS = 3, 80
#: Bytes of the names beside it: a status travels twice in trailers of 8 KiB.
_MAX_BYTES = 1000


def asleep() -> WeightSyncError:
    """Return what is said of everything that needs weights which sleep mode holds."""
    return WeightSyncError(Reason.ENGINE_ASLEEP, "the engine sleeps; wake it up, then try again")


def of_engine(engine: str, error: WeightSyncError) -> WeightSyncError:
    """Return a refusal with the name of the engine that it is of."""
    return WeightSyncError(
        error.reason,
        f"engine {engine}: {error.message}",
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def check_ready(reports: Iterable[Report]) -> None:
    """Return if every rank has come to the end of what it was asked to prepare.

    Raises:
        WeightSyncError: As `refusal`, of the first that has not.
    """
    for report in reports:
        if report.phase != "ready":
            raise refusal(
                report.rank,
                report.error,
                lasting=report.refused,
                names=report.names,
                count=report.count,
            )


def refusal(
    rank: str, error: str, *, lasting: bool, names: Sequence[str] = (), count: int = 0
) -> WeightSyncError:
    """Return why a rank did not do what it was asked to, before it wrote anything.

    The sentence has the first names, the metadata all that fit, as a JSON list in `tensors`.

    Args:
        rank: `dp/pp/tp`.
        error: What it said.
        lasting: Whether asking again is useless.
        names: Tensors or parameters at fault that it named.
        count: How many there are.
    """
    if lasting:
        sentence = error + _listed(error, names, count)
        facts = {"tensors": _fitting(names)} if names else {}
        return WeightSyncError(
            Reason.ENGINE_REFUSED, f"rank {rank} refused: {sentence}", metadata=facts
        )
    return WeightSyncError(
        Reason.ENGINE_AWAY,
        f"rank {rank} failed: {error or 'no reason given'}; try again",
        retry_after_s=1.0,
    )


def no_place(names: Sequence[str]) -> WeightSyncError:
    """Return why tensors that no rank has a place for are refused."""
    sentence = "the model has no place for these tensors; leave them out"
    return WeightSyncError(
        Reason.ENGINE_REFUSED,
        f"every rank refused: {sentence}{_listed(sentence, names, len(names))}",
        metadata={"tensors": _fitting(names)},
    )


def _listed(error: str, names: Sequence[str], count: int) -> str:
    total = max(count, len(names))
    if not names or (total == 1 and f"tensor {names[0]}" in error):
        return ""
    shown = [_short(name) for name in names[:_SHOWN]]
    more = f" and {total - len(shown)} more" if total > len(shown) else ""
    return f" ({', '.join(shown)}{more})"


def _short(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARS else name[: _SHOWN_CHARS - 3] + "..."


def _fitting(names: Sequence[str]) -> str:
    kept = list(names)
    while len((text := json.dumps(kept, ensure_ascii=False)).encode()) > _MAX_BYTES:
        kept.pop()
    return text
