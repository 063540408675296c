"""What a rank refused, as whoever asked for it is told: by name, and short enough for a status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync_server.engine.worker_reports import Report

__all__ = [
    "OUT_OF_REACH",
    "ContentRefusedError",
    "asleep",
    "check_ready",
    "no_place",
    "of_change",
    "of_engine",
    "refusal",
]

#: What tells that nothing reaches the engine, which does what nobody here knows.
OUT_OF_REACH = frozenset({Reason.ENGINE_AWAY, Reason.ENGINE_OWNED})
#: Names in the sentence, and characters of each.
_SHOWN, _SHOWN_CHARS = 3, 80
#: Bytes of the names beside it: a status travels twice in trailers of 8 KiB.
_MAX_BYTES = 1000


class ContentRefusedError(WeightSyncError):
    """Ranks refuse a version for its content, and none failed: they would do so again."""


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
    failed = [report for report in reports if report.phase != "ready"]
    for report in failed:
        error = refusal(
            report.rank,
            report.error,
            lasting=report.refused,
            names=report.names,
            count=report.count,
        )
        # Who needs a capture has not looked at it.
        if all(one.refused for one in failed if one.phase == "failed"):
            error = ContentRefusedError(error.reason, error.message, metadata=error.metadata)
        raise error


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
    sentence = "leave out what the model has no place for"
    return WeightSyncError(
        Reason.ENGINE_REFUSED,
        f"{sentence}{_listed(sentence, names, len(names))}; every rank refused",
        metadata={"tensors": _fitting(names)},
    )


def of_change(error: WeightSyncError, version: int, base: int) -> WeightSyncError:
    """Return a refusal of a version that is kept as a change, with what it keeps."""
    return WeightSyncError(
        error.reason,
        f"{error.message}; version {version} is a change of version {base} and has its other "
        "tensors: where that is at fault, name another with base=, or push all tensors",
        metadata=error.metadata,
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
