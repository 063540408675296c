"""The demo of a fleet as a user runs it: `python -m examples.fleet_demo`, in real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.bounds import within
from tests.support.leftovers import Mark
from tests.support.processes import end

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.timeout(240)

_ROOT = Path(__file__).parents[2]
_END_S = 180
_GONE_S = 5.0


class Demo:
    """A running demo, whose temporary files lie in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        path: str = os.environ["PATH"],
        wrapper: Sequence[str] = (),
    ) -> None:
        self.mark = Mark()
        self.temporary, self._output = folder / "tmp", folder / "output"
        self.temporary.mkdir()
        variables = {**self.mark.variables, "TMPDIR": str(self.temporary), "PATH": path}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "examples.fleet_demo", *arguments],
                cwd=_ROOT,
                env={**os.environ, **variables, "COLUMNS": "200"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A session of its own, so that the tests' Ctrl-C is not the demo's.
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str) -> None:
        within(_END_S, lambda: text in self.output or self.process.poll() is not None)
        assert text in self.output

    def pid_of(self, words: str) -> int:
        """Return a process of the demo whose command line has these words."""
        (found,) = {
            line.split(":")[0]
            for line in self.mark.alive()
            if words in line and "weightsync_server.cli" in line
        }
        return int(found)

    def left(self) -> list[str]:
        """Return what is left of it: processes and temporary files."""
        files = [str(path) for path in self.temporary.iterdir()]
        return [*self.mark.left_after(_GONE_S), *files]

    def end(self) -> None:
        # The demo is told, not what it may be wrapped in.
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            end(self.process)


def _own_shared_memory(listing: Path) -> list[str]:
    """Return what gives a command a /dev/shm of its own and lists that in the end; for root."""
    if os.geteuid():
        return []
    script = f'mount -t tmpfs tmpfs /dev/shm; "$@"; s=$?; ls -A /dev/shm >{listing}; exit $s'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short, as the paths of unix sockets must be.
    with tempfile.TemporaryDirectory(prefix="wsfd", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def demo(request: pytest.FixtureRequest, folder: Path, etcd: str) -> Iterator[Demo]:
    del etcd  # it is found on PATH
    wrapper = _own_shared_memory(folder / "shared") if hasattr(request, "param") else ()
    running = Demo(folder, *getattr(request, "param", ()), wrapper=wrapper)
    try:
        yield running
    finally:
        running.end()


@pytest.mark.parametrize("demo", [("--versions", "3", "--every", "0")], indirect=True)
def test_every_follower_ends_on_what_was_decided(demo: Demo, folder: Path) -> None:
    assert demo.process.wait(_END_S) == 0, demo.output
    assert demo.left() == []
    if not os.geteuid():
        assert (folder / "shared").read_text() == ""
    applied = re.findall(r"apply \d+, (\w+): COMMIT, version (\d+), .* live on (\d)", demo.output)
    orders, versions, hosts = zip(*applied, strict=True)
    assert (orders, hosts) == (("rolling", "barrier", "rolling"), ("3", "2", "3")), demo.output
    assert f"host3 serves version {versions[1]} after" in demo.output
    assert f"are proved to hold version {versions[-1]}, decided last." in demo.output
    lines = [line.split() for line in demo.output.splitlines()]
    # What the origin has, three hosts, what is decided.
    rows = [line[2:] for line in lines if line[1:2] == ["has"]]
    newest = versions[-1]
    assert [newest, *[newest, "serving"] * 3, newest] in rows, demo.output
    # Proving it in the end, a host may be seen at that.
    assert {word for word in rows[-1] if word.isdecimal()} == {newest}, demo.output
    # While it was away, the others went on.
    meanwhile = [versions[1], *[versions[1], "serving"] * 2, "away", versions[1]]
    assert meanwhile in rows, demo.output


def test_a_follower_that_ends_by_itself_fails_the_demo(demo: Demo) -> None:
    demo.wait_for("$ weightsync fleet apply")
    os.kill(demo.pid_of("--fleet-member host2"), signal.SIGKILL)
    assert demo.process.wait(_END_S) == 1, demo.output
    assert "host2 ended with status -9" in demo.output
    assert "Shown" not in demo.output
    assert demo.left() == []


def test_ctrl_c_leaves_nothing_behind(demo: Demo) -> None:
    demo.wait_for("the followers start")
    os.kill(demo.process.pid, signal.SIGINT)
    assert demo.process.wait(60) == 130, demo.output
    assert demo.left() == []


def test_without_etcd_it_says_what_to_install(tmp_path: Path) -> None:
    demo = Demo(tmp_path, path=str(tmp_path))
    assert demo.process.wait(60) == 1
    assert "etcd is not installed: install the Debian package etcd-server" in demo.output
    assert demo.left() == []


def test_too_few_versions_are_refused(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--versions", "2")
    assert demo.process.wait(60) == 2
    assert "--versions is 2; it must be 3 or more" in demo.output
