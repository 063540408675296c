"""What a rank or a pause option is refused with: by name, and short enough for a status."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from google.protobuf import duration_pb2

from weightsync.engine import BETWEEN_STEPS, CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.worker_reports import Report

#: What tells that nothing reaches the engine, which does what nobody here knows.
OUT_OF_REACH = frozenset({Reason.ENGINE_AWAY, Reason.ENGINE_OWNED})
#: Names in the sentence, and characters of each.
_SHOWN, _SHOWN_CHARS = 3, 80
#: Bytes of the names beside it: a status travels twice in trailers of 8 KiB.
_MAX_BYTES = 1000


class ContentRefusedError(WeightSyncError):
    """Ranks refuse a version for its content, and none failed: they would do so again."""


class GateRefusedError(WeightSyncError):
    """A gate has not let a version go live, for what `report` shows."""

    def __init__(self, message: str, report: pb.GateReport) -> None:
        on_hold = report.outcome == pb.GATE_OUTCOME_HELD
        facts = {"gate": "held" if on_hold else "rolled_back"}
        super().__init__(Reason.APPLY_RESTORED, message, metadata=facts)
        self.report = report


def asleep() -> WeightSyncError:
    """Return the refusal of everything that needs weights which sleep mode holds."""
    return WeightSyncError(Reason.ENGINE_ASLEEP, "wake the engine up, then try again: it is asleep")


def of_engine(engine: str, error: WeightSyncError) -> WeightSyncError:
    return WeightSyncError(
        error.reason,
        f"engine {engine}: {error.message}",
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def check_ready(reports: Iterable[Report]) -> None:
    """Raise the `refusal` of the first rank that has not prepared what it was asked to."""
    if failed := [report for report in reports if report.phase != "ready"]:
        # Who needs a capture has not looked at it.
        looked = [one.refused for one in failed if one.phase == "failed"]
        content = bool(looked) and all(looked)
        raise refused(failed[0], ContentRefusedError if content else WeightSyncError)


def refused(report: Report, kind: type[WeightSyncError]) -> WeightSyncError:
    """Return the `refusal` of a rank that reports why it did not do what it was asked to."""
    return refusal(
        report.rank,
        report.error,
        lasting=report.refused,
        names=report.names,
        count=report.count,
        kind=kind,
    )


def refusal(
    rank: str,
    error: str,
    *,
    lasting: bool,
    names: Sequence[str],
    count: int,
    kind: type[WeightSyncError] = WeightSyncError,
) -> WeightSyncError:
    """Return why a rank did not do what it was asked to, before it wrote anything.

    The sentence has the first names, the metadata all that fit, as a JSON list in `tensors`. With
    `lasting` it is useless to ask again. The rank named `names`, of `count` in all.
    """
    if lasting:
        sentence = error + _listed(error, names, count)
        facts = {"tensors": _fitting(names)} if names else {}
        return kind(Reason.ENGINE_REFUSED, f"rank {rank} refused: {sentence}", metadata=facts)
    return kind(
        Reason.ENGINE_AWAY,
        f"rank {rank} failed: {error or 'no reason given'}; try again",
        retry_after_s=1.0,
    )


def no_place(names: Sequence[str]) -> WeightSyncError:
    sentence = "leave out the tensors that the model does not have"
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
        "tensors: if the base is at fault, name another one with base=, or push all tensors",
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


_MODES: Mapping[pb.PauseMode.ValueType, str] = {
    pb.PAUSE_MODE_UNSPECIFIED: "keep",
    pb.PAUSE_MODE_KEEP: "keep",
    pb.PAUSE_MODE_WAIT: "wait",
    pb.PAUSE_MODE_ABORT: "abort",
    pb.PAUSE_MODE_BETWEEN_STEPS: BETWEEN_STEPS,
}
_CACHES: Mapping[pb.CacheMode.ValueType, CacheUse] = {
    pb.CACHE_MODE_RECOMPUTE: CacheUse.RECOMPUTE,
    pb.CACHE_MODE_KEEP: CacheUse.KEEP,
    pb.CACHE_MODE_SHARE: CacheUse.SHARE,
}
_MAX_WAIT_S = 3600.0


def duration(seconds: float) -> duration_pb2.Duration:
    result = duration_pb2.Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def pause_spec(options: pb.PauseOptions) -> PauseSpec:
    """Return what a request asks for, defaults filled in; REQUEST_INVALID names the field."""
    mode, after = _MODES.get(options.mode), _MODES.get(options.after_wait)
    if mode is None or after not in ("keep", "abort"):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "pause.mode must be KEEP, WAIT, ABORT or BETWEEN_STEPS, pause.after_wait KEEP or ABORT",
        )
    cache = _CACHES.get(options.cache)
    if options.cache == pb.CACHE_MODE_UNSPECIFIED:
        cache = CacheUse.KEEP if mode == BETWEEN_STEPS else CacheUse.RECOMPUTE
    if cache is None:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, "pause.cache must be RECOMPUTE, KEEP or SHARE"
        )
    wait = options.wait_timeout.ToNanoseconds() / 1e9 if options.HasField("wait_timeout") else 30.0
    if not 0 <= wait <= _MAX_WAIT_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"pause.wait_timeout must be 0 to {_MAX_WAIT_S:g} s"
        )
    return PauseSpec(
        mode=mode,
        cache=cache,
        wait_timeout_s=wait,
        after_wait=after,
    )


def pause_options(spec: PauseSpec, mode: str = "") -> pb.PauseOptions:
    """Return a spec as replies show it; `mode` is the one that was used in the end."""
    modes = {name: mode for mode, name in _MODES.items() if mode}
    return pb.PauseOptions(
        mode=modes[mode or spec.mode],
        cache=next(shown for shown, cache in _CACHES.items() if cache is spec.cache),
        wait_timeout=duration(spec.wait_timeout_s),
        after_wait=modes[spec.after_wait],
    )
