"""Folders that a host's processes agree on: root's, a group's, and a user's own."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightsync import host_dirs
from weightsync.errors import WeightSyncError
from weightsync.host_dirs import make_dir, run_dir, state_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

_USER = 4711


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be an ordinary user, also where root runs the tests, of a host that has no folders yet."""
    # Not tmp_path, whose parents let nobody but root in.
    made = Path(tempfile.mkdtemp())
    for name, folder in (("_SYSTEM_RUN", "run"), ("_SYSTEM_STATE", "lib"), ("_TEMPORARY", "tmp")):
        monkeypatch.setattr(host_dirs, name, made / folder)
    (made / "tmp").mkdir(mode=0o777)
    before = os.geteuid()
    if before == 0:
        os.chown(made, _USER, -1)
        (made / "tmp").chmod(0o1777)
        os.seteuid(_USER)
    try:
        yield made
    finally:
        os.seteuid(before)
        shutil.rmtree(made)


def test_variables_name_them(host: Path) -> None:
    given = {"WEIGHTSYNC_RUN_DIR": "/a", "WEIGHTSYNC_STATE_DIR": "/b"}
    assert (run_dir(given), state_dir(given)) == (Path("/a"), Path("/b"))


def test_relative_ones_are_in_the_current_folder(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM takes no socket with a relative path, and trainers start elsewhere.
    monkeypatch.chdir(host)
    given = {"WEIGHTSYNC_RUN_DIR": "a", "WEIGHTSYNC_STATE_DIR": "b/c"}
    assert (run_dir(given), state_dir(given)) == (host / "a", host / "b/c")


def test_what_cannot_be_made_or_written_is_refused(host: Path) -> None:
    (host / "file").touch()
    (host / "closed").mkdir(mode=0o500)
    for name in ("file", "file/a", "closed/a", "closed/a/b", "closed"):
        with pytest.raises(WeightSyncError, match=r"^set X to a folder that you can write: ") as at:
            make_dir(host / name, "X")
        assert str(host / name) in at.value.message


def test_a_user_has_folders_of_their_own(host: Path) -> None:
    session = host / "session"
    session.mkdir(mode=0o700)
    found = {"XDG_RUNTIME_DIR": str(session), "XDG_STATE_HOME": str(host / "kept")}
    assert run_dir(found) == session / "weightsync"
    assert state_dir(found) == host / "kept/weightsync"
    assert state_dir({"HOME": "ignored"}) == Path.home() / ".local/state/weightsync"


@pytest.mark.parametrize("session", ["", "relative", "/nowhere"])
def test_without_a_session_it_is_in_tmp_and_nobody_elses(host: Path, session: str) -> None:
    folder = run_dir({"XDG_RUNTIME_DIR": session})
    if folder.parent == Path(f"/run/user/{os.geteuid()}"):
        pytest.skip("this user has a login session")
    assert folder == host / f"tmp/weightsync-{os.geteuid()}"
    make_dir(folder)
    make_dir(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_session_that_others_can_write_to_is_not_taken(host: Path) -> None:
    session = host / "session"
    session.mkdir()
    session.chmod(0o770)
    assert run_dir({"XDG_RUNTIME_DIR": str(session)}).parent != session


def test_folders_that_were_made_for_a_group_are_taken(host: Path) -> None:
    # As units and images make them, for users that are not root.
    for folder in (host / "run", host / "lib"):
        folder.mkdir()
        folder.chmod(0o770)
    assert (run_dir({}), state_dir({})) == (host / "run", host / "lib")
    make_dir(run_dir({}))
    (host / "run").chmod(0o500)
    assert run_dir({}) != host / "run"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_in_tmp_to_which_others_can_write_is_refused(host: Path, mode: int) -> None:
    folder = run_dir({"XDG_RUNTIME_DIR": ""})
    folder = host / "tmp" / folder.name
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(WeightSyncError, match=r"^remove .*WEIGHTSYNC_RUN_DIR.*mode 0(770|707)"):
        make_dir(folder)


def test_a_link_in_tmp_is_refused(host: Path) -> None:
    (host / "elsewhere").mkdir()
    folder = host / "tmp/weightsync-1"
    folder.symlink_to(host / "elsewhere")
    with pytest.raises(WeightSyncError, match=r"^remove "):
        make_dir(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder of another user")
def test_a_folder_in_tmp_that_another_user_made_is_refused(host: Path) -> None:
    folder = host / "tmp/weightsync-1"
    folder.mkdir(mode=0o700)
    os.seteuid(0)
    os.chown(folder, _USER + 1, -1)
    os.seteuid(_USER)
    with pytest.raises(WeightSyncError, match=f"user {_USER + 1}, who owns it"):
        make_dir(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_has_those_of_the_system(host: Path) -> None:
    os.seteuid(0)
    assert (run_dir({}), state_dir({})) == (host / "run", host / "lib")
    make_dir(run_dir({}))
    assert stat.S_IMODE((host / "run").stat().st_mode) == 0o755
