"""A process ends in time, whatever it is that hangs, and leaves none that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.leftovers import Mark

_CODE = 4


def _run(body: str, mark: Mark | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program which begins its deadline of 0.2 s and then hangs."""
    program = f"""
        import asyncio, ctypes, subprocess, sys, threading, time
        from weightsync_server.ops.stop_deadline import StopDeadline

        async def main():
            deadline = StopDeadline({_CODE})
            deadline.begin(0.2, asyncio.get_running_loop())
            deadline.begin(600, asyncio.get_running_loop())
            {body}

        async def forever():
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    variables = mark.variables if mark is not None else {}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize(
    "body",
    [
        "await forever()",
        "time.sleep(600)",
        "threading.Thread(target=time.sleep, args=(600,)).start()",
        "await asyncio.to_thread(time.sleep, 600)",
    ],
    ids=["a task", "the loop", "a thread, after the loop has ended", "a thread that is waited for"],
)
def test_whatever_hangs_it_ends(body: str) -> None:
    done = _run(body)
    assert done.returncode == _CODE
    assert "did not stop within 0.2 s" in done.stderr


def test_it_tells_what_hung_and_how_often() -> None:
    done = _run("await asyncio.gather(forever(), forever())")
    assert "2 x forever > Event.wait > FutureIter" in done.stderr
    assert "1 x main > FutureIter" in done.stderr


def test_the_kernel_ends_one_in_which_nothing_can_run() -> None:
    done = _run("ctypes.PyDLL(None).sleep(600)")
    assert done.returncode == -signal.SIGALRM


def test_what_it_has_started_ends_with_it() -> None:
    mark = Mark()
    nested = "subprocess.Popen(['sh', '-c', 'sleep 600 & wait'])"
    done = _run(f"{nested}; await forever()", mark)
    assert done.returncode == _CODE
    assert mark.left_after(10) == []


def test_one_that_stops_in_time_is_left_alone() -> None:
    done = _run("pass")
    assert (done.returncode, done.stderr) == (0, "")
