from __future__ import annotations

import pytest
from google.protobuf import duration_pb2

from weightsync.engine import CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.refusals import duration, pause_options, pause_spec


def test_defaults() -> None:
    assert pause_spec(pb.PauseOptions()) == PauseSpec("keep", CacheUse.RECOMPUTE, 30.0, "keep")


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        (pb.PauseOptions(mode=pb.PAUSE_MODE_ABORT), PauseSpec(mode="abort")),
        (pb.PauseOptions(cache=pb.CACHE_MODE_KEEP), PauseSpec(cache=CacheUse.KEEP)),
        (
            pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS),
            PauseSpec("between_steps", CacheUse.KEEP),
        ),
        (
            pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS, cache=pb.CACHE_MODE_KEEP),
            PauseSpec("between_steps", CacheUse.KEEP),
        ),
        (
            pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS, cache=pb.CACHE_MODE_RECOMPUTE),
            PauseSpec("between_steps", CacheUse.RECOMPUTE),
        ),
        (pb.PauseOptions(cache=pb.CACHE_MODE_SHARE), PauseSpec(cache=CacheUse.SHARE)),
        (pb.PauseOptions(cache=pb.CACHE_MODE_RECOMPUTE), PauseSpec(cache=CacheUse.RECOMPUTE)),
        (
            pb.PauseOptions(
                mode=pb.PAUSE_MODE_WAIT,
                wait_timeout=duration_pb2.Duration(seconds=2, nanos=500_000_000),
                after_wait=pb.PAUSE_MODE_ABORT,
            ),
            PauseSpec("wait", CacheUse.RECOMPUTE, 2.5, "abort"),
        ),
        (
            pb.PauseOptions(mode=pb.PAUSE_MODE_WAIT, wait_timeout=duration_pb2.Duration()),
            PauseSpec("wait", CacheUse.RECOMPUTE, 0.0, "keep"),
        ),
        (
            pb.PauseOptions(wait_timeout=duration_pb2.Duration(seconds=3600)),
            PauseSpec(wait_timeout_s=3600.0),
        ),
    ],
)
def test_what_is_asked_for(options: pb.PauseOptions, spec: PauseSpec) -> None:
    assert pause_spec(options) == spec
    assert pause_spec(pause_options(spec)) == spec


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (pb.PauseOptions(mode=9), "pause.mode"),  # type: ignore[arg-type]
        (pb.PauseOptions(cache=9), "pause.cache"),  # type: ignore[arg-type]
        (pb.PauseOptions(after_wait=pb.PAUSE_MODE_BETWEEN_STEPS), "pause.after_wait"),
        (pb.PauseOptions(after_wait=9), "pause.after_wait"),  # type: ignore[arg-type]
        (pb.PauseOptions(after_wait=pb.PAUSE_MODE_WAIT), "pause.after_wait"),
        (pb.PauseOptions(wait_timeout=duration_pb2.Duration(seconds=-1)), "pause.wait_timeout"),
        (pb.PauseOptions(wait_timeout=duration_pb2.Duration(seconds=3601)), "pause.wait_timeout"),
        (pb.PauseOptions(wait_timeout=duration_pb2.Duration(seconds=1 << 40)), "wait_timeout"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_the_name_of_its_field(options: pb.PauseOptions, field: str) -> None:
    with pytest.raises(WeightSyncError, match=field) as caught:
        pause_spec(options)
    assert caught.value.reason is Reason.REQUEST_INVALID


def test_the_mode_that_was_used_in_the_end_is_shown() -> None:
    shown = pause_options(PauseSpec("wait", after_wait="abort"), "abort")
    assert (shown.mode, shown.after_wait) == (pb.PAUSE_MODE_ABORT, pb.PAUSE_MODE_ABORT)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.0125, 1.5, 12345.678])
def test_durations(seconds: float) -> None:
    assert duration(seconds).ToNanoseconds() == round(seconds * 1e9)
