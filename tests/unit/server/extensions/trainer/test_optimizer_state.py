"""What becomes of the state of an optimizer before a job."""

from __future__ import annotations

from pathlib import Path

from weightsync_server.extensions.trainer.train_state import (
    KEEP,
    LOAD,
    RESET,
    OptimizerState,
    StatePlan,
)

_FOLDER = Path("/state/7-ab")


def test_a_new_process_loads_what_there_is() -> None:
    state = OptimizerState(live=7)
    assert state.plan(7, _FOLDER) == StatePlan(LOAD, 7, str(_FOLDER))
    # It was set up on this version.
    assert state.plan(7, None) == StatePlan(KEEP, 0)
    assert state.plan(8, None) == StatePlan(RESET, 0)


def test_it_goes_on_from_what_it_has_committed() -> None:
    state = OptimizerState()
    state.begin(state.plan(1, None))
    state.end(live=3, committed=3)
    assert state.version == 3
    assert state.plan(3, _FOLDER) == StatePlan(KEEP, 3)
    state.begin(state.plan(3, None))
    # It has committed nothing.
    state.end(live=3, committed=0)
    assert state.plan(3, None) == StatePlan(KEEP, 3)


def test_another_version_is_loaded_or_begun_anew() -> None:
    state = OptimizerState()
    state.begin(state.plan(1, None))
    state.end(live=3, committed=3)
    assert state.plan(7, _FOLDER) == StatePlan(LOAD, 7, str(_FOLDER))
    assert state.plan(8, None) == StatePlan(RESET, 0)


def test_what_a_job_failed_in_is_of_no_use() -> None:
    state = OptimizerState()
    state.begin(state.plan(1, None))
    assert state.plan(1, None) == StatePlan(RESET, 0)
    assert state.plan(1, _FOLDER).action == LOAD
