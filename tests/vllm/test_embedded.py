"""The embedded engine: vLLM in our process, its HTTP API, running requests over an apply."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.vllm_server import cpu_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.battery, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def seen(checkpoint: Callable[..., Path], run_dir: Path) -> dict[str, Any]:
    module = "tests.support.embedded_scenario"
    models = [str(checkpoint(seed=seed)) for seed in (1, 2)]
    # The endpoint plugin is allowed too: it must leave a hosted engine alone.
    done = subprocess.run(
        [sys.executable, "-m", module, *models, str(run_dir)],
        env={**os.environ, **cpu_environment(), "VLLM_PLUGINS": "weightsync"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_http_is_closed_until_the_weights_are_proved(seen: dict[str, Any]) -> None:
    assert seen["address"].startswith("http://127.0.0.1:")
    assert seen["state"] == "unreconciled"
    assert (seen["closed"], seen["open"]) == (503, 200)
    assert seen["first_phase"] == "needs_capture"
    assert seen["adopted"] is True


def test_running_request_goes_on_and_its_spans_name_the_versions(seen: dict[str, Any]) -> None:
    assert seen["prepared"] == "ready"
    assert seen["requests"] == 1
    assert seen["committed"]
    assert seen["label_set"]
    assert seen["tokens"] == 300
    assert [span[0] for span in seen["spans"]] == ["1", "2"]
    assert seen["spans"][0][2] == seen["spans"][1][1]
    assert seen["spans"][1][2] == 300


def test_answers_over_http_name_their_version(seen: dict[str, Any]) -> None:
    assert seen["answered_by"] == ["1", "2"]


def test_wait_that_takes_too_long_becomes_keep_or_abort(seen: dict[str, Any]) -> None:
    assert seen["wait_became"] == "keep"
    assert seen["wait_s"] < 5
    assert seen["still_running"]
    assert seen["kept_tokens"] == 400
    assert seen["abort_became"] == "abort"
    assert 0 < seen["aborted_tokens"] < 400
    assert seen["idle_wait"] == "wait"


def test_a_request_goes_on_over_a_switch_between_two_of_its_steps(seen: dict[str, Any]) -> None:
    assert seen["switched"]
    assert seen["switch_labelled"]
    assert seen["switch_state"] == "serving"
    assert seen["switch_tokens"] == 300
    (before, after) = seen["switch_spans"]
    assert (before[0], before[1], after[0], after[2]) == ("2", 0, "3", 300)
    # Tokens of other weights begin where their label does, or one step beside it.
    assert abs(before[2] - seen["switch_at"]) <= 1
