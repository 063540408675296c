"""The failpoints themselves: notation, counting, files; and that each point is in the code once."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightsync import failpoints

_ROOT = Path(__file__).parents[2]
_CALL = re.compile(r"failpoints\.(?:hit|reach|lie)\(\s*\"([a-z0-9_.]+)\"")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the plan file of this process."""
    path = tmp_path / "plan"
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan(f"@{path}"))
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "is not NAME="),
        ("no.such.point=panic", "no failpoint 'no.such.point'"),
        ("file.fsync=explode", "is not NAME="),
        ("file.fsync=error(ENOTHING)", "no errno 'ENOTHING'"),
        ("file.fsync=sleep(-1)", "not 0 to 3600"),
        ("file.fsync=sleep", "not 0 to 3600"),
    ],
)
def test_a_malformed_plan_is_refused_with_the_term(text: str, told: str) -> None:
    with pytest.raises(failpoints.FailpointError, match=re.escape(told)):
        failpoints.parse(text)


def test_nothing_happens_where_the_variable_is_not_set() -> None:
    assert failpoints._plan is None
    assert not failpoints.enabled()
    failpoints.hit("file.fsync")
    assert failpoints.lie("worker.reply") is None


def test_skip_and_count_choose_the_hits(plan: Path) -> None:
    plan.write_text("file.fsync=2>1*error(ENOSPC)\nfile.write=error")
    failpoints.hit("file.fsync")
    failpoints.hit("file.fsync")
    with pytest.raises(OSError, match="failpoint") as caught:
        failpoints.hit("file.fsync")
    assert caught.value.errno == errno.ENOSPC
    failpoints.hit("file.fsync")
    for _ in range(2):
        with pytest.raises(OSError, match="failpoint"):
            failpoints.hit("file.write")
    met = Path(f"{plan}.hits").read_text().split("\n")
    assert met == [
        f"file.fsync error {os.getpid()}",
        *[f"file.write error {os.getpid()}"] * 2,
        "",
    ]


def test_a_changed_file_is_read_again_and_a_removed_one_means_nothing(plan: Path) -> None:
    failpoints.hit("file.fsync")
    plan.write_text("file.fsync=error")
    with pytest.raises(OSError, match="failpoint"):
        failpoints.hit("file.fsync")
    plan.unlink()
    failpoints.hit("file.fsync")


async def test_a_sleeping_task_lets_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan("apply.begin=sleep(1)"))
    begin = time.monotonic()
    await asyncio.gather(*(failpoints.reach("apply.begin") for _ in range(5)))
    # One after the other they would take five.
    assert 1 <= time.monotonic() - begin < 5


def test_a_lie_is_told_to_its_point_only(plan: Path) -> None:
    plan.write_text("worker.reply=1*lie(apply_id)")
    failpoints.hit("worker.reply")
    assert failpoints.lie("worker.reply") == "apply_id"
    assert failpoints.lie("worker.reply") is None


@pytest.mark.parametrize(("action", "status"), [("panic", -signal.SIGKILL), ("stop", None)])
def test_panic_kills_and_stop_stops(action: str, status: int | None, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text(f"file.fsync={action}")
    child = subprocess.Popen(
        [sys.executable, "-c", "from weightsync import failpoints as f; f.hit('file.fsync')"],
        env={**os.environ, failpoints.VARIABLE: f"@{plan}"},
    )
    try:
        if status is None:
            _, waited = os.waitpid(child.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(waited)
            child.send_signal(signal.SIGCONT)
            assert child.wait(30) == 0
        else:
            assert child.wait(30) == status
    finally:
        child.kill()
        child.wait()
    assert Path(f"{plan}.hits").read_text() == f"file.fsync {action} {child.pid}\n"


def test_every_point_is_in_the_code_once() -> None:
    found: list[str] = []
    for folder in ("weightsync", "server/weightsync_server"):
        for path in (_ROOT / folder).rglob("*.py"):
            found += _CALL.findall(path.read_text())
    assert sorted(found) == sorted(failpoints.POINTS)
    assert len(found) >= 40


def test_a_plan_is_replaced_in_its_file_for_all_who_share_it(plan: Path) -> None:
    failpoints.set_plan("file.fsync=1*error")
    assert failpoints.plan() == plan.read_text() == "file.fsync=1*error"
    with pytest.raises(OSError, match="failpoint"):
        failpoints.hit("file.fsync")
    assert failpoints.hits() == [f"file.fsync error {os.getpid()}"]
    with pytest.raises(failpoints.FailpointError):
        failpoints.set_plan("nonsense")
    assert failpoints.plan() == "file.fsync=1*error"
    assert {path.name for path in plan.parent.iterdir()} == {"plan", "plan.hits"}


def test_a_plan_without_a_file_is_this_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan(""))
    failpoints.set_plan("file.fsync=lie(x)")
    assert failpoints.lie("file.fsync") == "x"
    assert failpoints.plan() == "file.fsync=lie(x)"
    assert failpoints.hits() == [f"file.fsync lie {os.getpid()}"]


def test_no_plan_is_set_where_the_variable_is_not() -> None:
    assert (failpoints.plan(), failpoints.hits()) == ("", [])
    with pytest.raises(failpoints.FailpointError, match="WEIGHTSYNC_FAILPOINTS"):
        failpoints.set_plan("")
