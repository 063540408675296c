"""What /pause asks for: how the next update shall stop generation, kept for a bounded time."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_PAUSE_S", "MAX_PAUSE_S", "PauseRequest", "pause_options"]

#: Seconds that a pause is kept for, unless it says, and at most.
DEFAULT_PAUSE_S, MAX_PAUSE_S = 600.0, 3600.0

#: VLLM's names.
_MODES: Mapping[str, pb.PauseMode.ValueType] = MappingProxyType(
    {
        "abort": pb.PAUSE_MODE_ABORT,
        "wait": pb.PAUSE_MODE_WAIT,
        "keep": pb.PAUSE_MODE_KEEP,
    }
)
_FLAGS: Mapping[Any, bool] = MappingProxyType(
    {"true": True, "1": True, "false": False, "0": False, True: True, False: False}
)
_FIELDS = ("mode", "clear_cache", "timeout_s")


def pause_options(fields: Mapping[str, Any]) -> tuple[pb.PauseOptions, float]:
    """Return how to pause, with vLLM's defaults, and for how many seconds that is kept.

    Args:
        fields: `mode`, `clear_cache` and `timeout_s`, of a query or a JSON object.

    Raises:
        WeightSyncError: REQUEST_INVALID, naming the field.
    """
    if unknown := sorted(fields.keys() - set(_FIELDS)):
        raise _refused(f"{unknown[0][:64]!r} is no field of a pause; use {', '.join(_FIELDS)}")
    mode = _MODES.get(str(fields.get("mode", "abort")))
    if mode is None:
        raise _refused(f"mode must be one of {', '.join(_MODES)}")
    try:
        clear = _FLAGS[fields.get("clear_cache", True)]
    except (KeyError, TypeError):
        raise _refused("clear_cache must be true or false") from None
    cache = pb.CACHE_MODE_RECOMPUTE if clear else pb.CACHE_MODE_KEEP
    return pb.PauseOptions(mode=mode, cache=cache), _seconds(fields)


def _seconds(fields: Mapping[str, Any]) -> float:
    try:
        seconds = float(fields.get("timeout_s", DEFAULT_PAUSE_S))
    except (TypeError, ValueError):
        seconds = 0.0
    # Neither is "not a number".
    if not 0 < seconds <= MAX_PAUSE_S:
        raise _refused(f"timeout_s must be a number of seconds above 0, at most {MAX_PAUSE_S:g}")
    return seconds


class PauseRequest:
    """The pause that was asked for last, until it is taken back or its time is over."""

    def __init__(self) -> None:
        self._options: pb.PauseOptions | None = None
        self._until = 0.0

    def keep(self, options: pb.PauseOptions, seconds: float) -> None:
        """Keep one for so many seconds, in the place of the one before."""
        self._options, self._until = options, clock.monotonic() + seconds

    def drop(self) -> None:
        """Take it back, if there is one."""
        self._options = None

    def current(self) -> pb.PauseOptions | None:
        """Return how to pause; None: nobody asked, or long ago."""
        if clock.monotonic() >= self._until:
            self._options = None
        return self._options


def _refused(sentence: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, sentence)
