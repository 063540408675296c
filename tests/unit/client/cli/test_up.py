"""What `weightsync up` reads, sets and says before it starts anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.client.servicer import Running
from weightsync_client.cli import up
from weightsync_client.errors import ClientError


@pytest.mark.parametrize(
    ("flags", "port"),
    [
        ([], ""),
        (["--port", "1"], "1"),
        (["--port=1", "--host", "h"], "1"),
        (["--port", "1", "--port=2"], "2"),
        (["--portable", "1"], ""),
        (["--port"], ""),
    ],
)
def test_flags_of_vllm_are_read_as_vllm_reads_them(flags: list[str], port: str) -> None:
    assert up._flag(flags, "--port") == port


@pytest.mark.parametrize(
    ("before", "plugins"),
    [("", "weightsync"), ("a", "a,weightsync"), ("weightsync,b", "weightsync,b")],
)
def test_plugins_of_others_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str, plugins: str
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", before)
    assert up._environment(tmp_path)["VLLM_PLUGINS"] == plugins


def test_what_is_set_already_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEIGHTSYNC_CPU_PLAIN_WEIGHTS", raising=False)
    monkeypatch.delenv("WEIGHTSYNC_STATE_DIR", raising=False)
    found = up._environment(tmp_path)
    assert (found["WEIGHTSYNC_CPU_PLAIN_WEIGHTS"], found["WEIGHTSYNC_STATE_DIR"]) == (
        "1",
        str(tmp_path),
    )
    monkeypatch.setenv("WEIGHTSYNC_CPU_PLAIN_WEIGHTS", "linear")
    assert up._environment(tmp_path)["WEIGHTSYNC_CPU_PLAIN_WEIGHTS"] == "linear"


def test_each_model_has_a_folder_of_its_own(tmp_path: Path) -> None:
    kept = {up._kept_of(one) for one in ("org/model", "other/model", str(tmp_path))}
    assert len(kept) == 3
    assert {folder.name.rpartition("-")[0] for folder in kept} == {"model", tmp_path.name}


@pytest.mark.parametrize("package", ["vllm", "pydantic"])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    kept = [folder for folder in sys.path if not Path(folder, package).is_dir()]
    monkeypatch.setattr(sys, "path", kept)
    with pytest.raises(ClientError, match=r"^run `pip install "):
        up.up("model")


def test_nothing_is_started_beside_a_server_that_answers_there(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WEIGHTSYNC_RUN_DIR", "WEIGHTSYNC_STATE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(ClientError, match=f"^stop the weightsync-server .* {running.address}"):
        up.up("model", address=running.address)
    assert list(tmp_path.iterdir()) == []


def test_the_first_error_of_a_log_is_what_is_shown(tmp_path: Path) -> None:
    program = up._Program("vLLM", ["x"], {}, tmp_path)
    program.log.write_text(
        "INFO: ok\n(Worker) 11:00 [x.py:1] ValueError: too much\nRuntimeError: See above"
    )
    assert program.last_words().splitlines()[0] == "ValueError: too much"
    program.log.write_text(
        "(Worker) [x.py:1] a.b.ValidationError: 1 error\nsize\n  is 0\n(Worker) more"
    )
    assert program.last_words() == "a.b.ValidationError: 1 error\nsize\n  is 0"
    program.log.write_text("\n".join(map(str, range(100))))
    assert program.last_words().splitlines() == [str(line) for line in range(85, 100)]


def _sleeper(folder: Path) -> up._Program:
    (folder / "sleeper.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n"
    )
    return up._Program("sleeper", ["sleeper"], {**os.environ, "PYTHONPATH": str(folder)}, folder)


def test_who_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "_END_S", 0.0)
    program = _sleeper(tmp_path)
    program.start()
    up._end([program])
    assert program.process is not None
    assert program.process.returncode in (-signal.SIGKILL, -signal.SIGTERM)


def test_it_says_how_to_use_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightsync_client.cli", "up", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Ctrl-C ends both" in done.stdout
