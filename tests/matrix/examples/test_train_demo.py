"""The demo as a user runs it: `make demo-train` is `python -m examples.train_demo`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.model import SENTENCE
from tests.support.leftovers import Mark

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

_ROOT = Path(__file__).parents[3]
_STEP = re.compile(r"(?m)^step +(\d+)  loss ([\d.]+)  version +(\d+)  longest gap +([\d.]+) ms")
_ANSWER = r"(?m)^{}: 'Tell me:' is answered (.*)$"
#: What the last processes need to be gone once the demo itself is.
_GONE_S = 5.0


def _run(*arguments: str) -> tuple[int, str]:
    mark = Mark()
    done = subprocess.run(
        [sys.executable, "-m", "examples.train_demo", *arguments],
        cwd=_ROOT,
        env={**os.environ, **mark.variables, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert mark.left_after(_GONE_S) == []
    return done.returncode, done.stdout


def test_the_target_is_this_program() -> None:
    assert "\t$(PY) -m examples.train_demo\n" in (_ROOT / "Makefile").read_text()


@pytest.mark.battery
def test_it_learns_from_a_request_and_a_fresh_vllm_answers_the_same() -> None:
    status, output = _run()
    assert status == 0, output
    before, after, fresh = (
        re.findall(_ANSWER.format(when), output) for when in ("Before", "After", "Fresh")
    )
    assert before != after == fresh == [repr(SENTENCE)], output
    steps = _STEP.findall(output)
    assert [int(step) for step, *_ in steps] == list(range(1, len(steps) + 1)), output
    assert [int(version) for _, _, version, _ in steps] == list(range(2, len(steps) + 2)), output
    losses = [float(loss) for _, loss, *_ in steps]
    assert losses[-1] < losses[0] / 20, output
    (tokens,) = re.findall(r"(?m)^(\d+) tokens were generated meanwhile$", output)
    assert int(tokens) > len(steps), output


@pytest.mark.battery
def test_a_model_that_has_not_learned_fails_the_demo() -> None:
    status, output = _run("--steps", "1")
    assert status == 1, output
    assert "Not learned, or not kept" in output
