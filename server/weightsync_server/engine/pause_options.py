"""Checks and defaults of the pause options in requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf import duration_pb2

from weightsync.engine import BETWEEN_STEPS, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["duration", "pause_options", "pause_spec"]

_MODES: Mapping[pb.PauseMode.ValueType, str] = {
    pb.PAUSE_MODE_UNSPECIFIED: "keep",
    pb.PAUSE_MODE_KEEP: "keep",
    pb.PAUSE_MODE_WAIT: "wait",
    pb.PAUSE_MODE_ABORT: "abort",
    pb.PAUSE_MODE_BETWEEN_STEPS: BETWEEN_STEPS,
}
_MAX_WAIT_S = 3600.0


def duration(seconds: float) -> duration_pb2.Duration:
    """Return seconds as a protobuf duration."""
    result = duration_pb2.Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def pause_spec(options: pb.PauseOptions) -> PauseSpec:
    """Return what a request asks for, defaults filled in.

    Raises:
        WeightSyncError: REQUEST_INVALID, naming the field.
    """
    mode, after = _MODES.get(options.mode), _MODES.get(options.after_wait)
    if mode is None or after not in ("keep", "abort"):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "pause.mode must be KEEP, WAIT, ABORT or BETWEEN_STEPS, pause.after_wait KEEP or ABORT",
        )
    cache_modes = (pb.CACHE_MODE_UNSPECIFIED, pb.CACHE_MODE_RECOMPUTE, pb.CACHE_MODE_KEEP)
    if options.cache not in cache_modes:
        raise WeightSyncError(Reason.REQUEST_INVALID, "pause.cache must be RECOMPUTE or KEEP")
    if mode == BETWEEN_STEPS and options.cache == pb.CACHE_MODE_RECOMPUTE:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "pause.cache RECOMPUTE needs a pause; use KEEP with BETWEEN_STEPS, or mode KEEP",
        )
    keeps = options.cache == pb.CACHE_MODE_KEEP or mode == BETWEEN_STEPS
    wait = options.wait_timeout.ToNanoseconds() / 1e9 if options.HasField("wait_timeout") else 30.0
    if not 0 <= wait <= _MAX_WAIT_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"pause.wait_timeout must be 0 to {_MAX_WAIT_S:g} s"
        )
    return PauseSpec(
        mode=mode,
        clear_cache=not keeps,
        wait_timeout_s=wait,
        after_wait=after,
    )


def pause_options(spec: PauseSpec, mode: str = "") -> pb.PauseOptions:
    """Return a spec as replies show it; `mode` is the one that was used in the end."""
    modes = {name: mode for mode, name in _MODES.items() if mode}
    return pb.PauseOptions(
        mode=modes[mode or spec.mode],
        cache=pb.CACHE_MODE_RECOMPUTE if spec.clear_cache else pb.CACHE_MODE_KEEP,
        wait_timeout=duration(spec.wait_timeout_s),
        after_wait=modes[spec.after_wait],
    )
