from __future__ import annotations

import math
from typing import Any

import pytest

from weightsync import clock
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.extensions.vllm_verbs.weight_update import (
    DEFAULT_PAUSE_S,
    MAX_PAUSE_S,
    PauseRequest,
    pause_options,
)


@pytest.mark.parametrize(
    ("fields", "mode", "cache", "seconds"),
    [
        ({}, pb.PAUSE_MODE_ABORT, pb.CACHE_MODE_RECOMPUTE, DEFAULT_PAUSE_S),
        (
            {"mode": "keep", "clear_cache": "false"},
            pb.PAUSE_MODE_KEEP,
            pb.CACHE_MODE_KEEP,
            DEFAULT_PAUSE_S,
        ),
        ({"mode": "wait", "timeout_s": "2.5"}, pb.PAUSE_MODE_WAIT, pb.CACHE_MODE_RECOMPUTE, 2.5),
        ({"clear_cache": False, "timeout_s": 7}, pb.PAUSE_MODE_ABORT, pb.CACHE_MODE_KEEP, 7.0),
        ({"timeout_s": MAX_PAUSE_S}, pb.PAUSE_MODE_ABORT, pb.CACHE_MODE_RECOMPUTE, MAX_PAUSE_S),
    ],
)
def test_what_a_pause_says(fields: dict[str, Any], mode: int, cache: int, seconds: float) -> None:
    options, kept = pause_options(fields)
    assert (options.mode, options.cache, kept) == (mode, cache, seconds)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mode": "stop"}, "mode must be one of abort, wait, keep"),
        ({"mode": ["keep"]}, "mode must be"),
        ({"mode": None}, "mode must be"),
        ({"clear_cache": "maybe"}, "clear_cache must be true or false"),
        ({"clear_cache": []}, "clear_cache must be true or false"),
        ({"clear_cache": None}, "clear_cache must be true or false"),
        ({"timeout_s": "soon"}, "timeout_s must be a number"),
        ({"timeout_s": None}, "timeout_s must be a number"),
        ({"timeout_s": [1]}, "timeout_s must be a number"),
        ({"timeout_s": 0}, "timeout_s must be a number"),
        ({"timeout_s": -1}, "timeout_s must be a number"),
        ({"timeout_s": "nan"}, "timeout_s must be a number"),
        ({"timeout_s": math.inf}, "timeout_s must be a number"),
        ({"timeout_s": MAX_PAUSE_S + 1}, "at most 3600"),
        ({"timeout": 1}, "'timeout' is not a field of a pause; use mode, clear_cache, timeout_s"),
    ],
)
def test_what_is_no_pause(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightSyncError, match=named):
        pause_options(fields)


def test_a_pause_is_kept_for_its_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    pause = PauseRequest()
    assert pause.current() is None
    first, second = pb.PauseOptions(mode=pb.PAUSE_MODE_KEEP), pb.PauseOptions()
    pause.keep(first, 10)
    now[0] = 109.9
    # An update does not end it: that is what /resume is for.
    assert pause.current() is first
    assert pause.current() is first
    now[0] = 110.0
    assert pause.current() is None
    pause.keep(first, 10)
    pause.keep(second, 20)
    now[0] = 125.0
    assert pause.current() is second
    pause.drop()
    pause.drop()
    assert pause.current() is None
