"""What `weightsync up` reads, sets and says, and how it ends both: with a program for vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from benchmarks.servers import free_port
from tests.unit.client.servicer import Running
from weightsync.errors import Reason, WeightSyncError
from weightsync_client.cli import up
from weightsync_client.client import Client
from weightsync_client.errors import ClientError, DeniedError, InvalidError, RefusedError


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


def test_underscores_of_a_flag_are_dashes() -> None:
    assert up._flag(["--served_model_name=a_b"], "--served-model-name") == "a_b"
    assert up._flag(["--served_model_name", "a_b"], "--served-model-name") == "a_b"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "model is served at http://127.0.0.1:8000/v1,"),
        (["--host=::1", "--port", "1"], "model is served at http://[::1]:1/v1,"),
        (["--served-model-name", "a"], "a is served at http://127.0.0.1:8000/v1,"),
        (["--ssl-certfile=x"], "model is served at https://127.0.0.1:8000/v1,"),
        (["--uds", "/a.sock", "--port", "1"], "model is served where its flags say,"),
        (["--config=a.yaml"], "model is served where its flags say,"),
    ],
)
def test_it_says_where_vllm_serves(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    up._show_ready("model", flags, "127.0.0.1:50551", 1, tmp_path)
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("--port", ["8001"], "^give MODEL before `--`"),
        ("", [], "^give MODEL before `--`"),
        ("a", ["--model", "b"], "^leave out --model: "),
        ("./a b", [], "^correct MODEL: there is no folder ./a b$"),
        ("/" + "a" * 300, [], "^correct MODEL: "),
        ("~/a", [], "^correct MODEL: "),
    ],
)
def test_a_model_that_cannot_be_one_is_refused_at_once(
    model: str, flags: list[str], said: str
) -> None:
    with pytest.raises(InvalidError, match=said):
        up.up(model, flags)


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
    # As where it is not set, for the server.
    monkeypatch.setenv("WEIGHTSYNC_STATE_DIR", "")
    assert up._environment(tmp_path)["WEIGHTSYNC_STATE_DIR"] == str(tmp_path)
    monkeypatch.setenv("WEIGHTSYNC_CPU_PLAIN_WEIGHTS", "linear")
    assert up._environment(tmp_path)["WEIGHTSYNC_CPU_PLAIN_WEIGHTS"] == "linear"


@pytest.mark.parametrize(
    ("flags", "compiler", "torch", "added"),
    [
        ([], "no-such-compiler", "2.13.0+cpu", ["--enforce-eager"]),
        (["--port", "8001"], "no-such-compiler", "2.13.0+cpu", ["--enforce-eager"]),
        ([], sys.executable, "2.13.0+cpu", []),
        ([], "no-such-compiler", "2.13.0+cu130", []),
        (["--enforce_eager"], "no-such-compiler", "2.13.0+cpu", []),
        (["--compilation-config={}"], "no-such-compiler", "2.13.0+cpu", []),
        (["-O3"], "no-such-compiler", "2.13.0+cpu", []),
    ],
)
def test_without_a_compiler_a_vllm_on_a_cpu_compiles_nothing(
    flags: list[str],
    compiler: str,
    torch: str,
    added: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: torch)
    assert up._eager_without_compiler(flags) == added
    assert ("install no-such-compiler" in capsys.readouterr().err) == bool(added)


def test_each_model_has_a_folder_of_its_own(tmp_path: Path) -> None:
    kept = {up._kept_of(one) for one in ("org/model", "other/model", str(tmp_path))}
    assert len(kept) == 3
    assert {folder.name.rpartition("-")[0] for folder in kept} == {"model", tmp_path.name}
    assert up._kept_of(f"{tmp_path}/../{tmp_path.name}/") in kept


@pytest.mark.parametrize("package", ["vllm", "pydantic"])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ClientError, match=r"^run `pip install "):
        up.up("model")


def test_a_folder_named_vllm_is_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("vllm", "pydantic", "weightsync_server"):
        (tmp_path / package).mkdir()
        monkeypatch.delitem(sys.modules, package, raising=False)
        if package != "vllm":
            (tmp_path / package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    with pytest.raises(ClientError, match=r"^run `pip install vllm` "):
        up.up("model")


def test_nothing_is_started_beside_a_server_that_answers_there(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WEIGHTSYNC_RUN_DIR", "WEIGHTSYNC_STATE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(ClientError, match=f"^stop the weightsync-server .* {running.address}"):
        up.up("model", address=running.address)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_started_beside_another_vllm(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_RUN_DIR", str(short_dir))
    address = f"127.0.0.1:{free_port()}"
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(short_dir / "engine.sock"))
        engine.listen()
        with pytest.raises(RefusedError, match=r"^stop the vLLM .*engine.sock, or set WEIGHTSYNC"):
            up.up("model", address=address)
    # What is left of one that was killed.
    with socket.create_server(("127.0.0.1", 0)) as http:
        port = http.getsockname()[1]
        with pytest.raises(RefusedError, match=f"^stop the program .*:{port}, or add `-- --port`"):
            up.up("model", ["--port", str(port)], address=address)


def test_folders_that_cannot_be_made_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name, other in (
        ("WEIGHTSYNC_RUN_DIR", "WEIGHTSYNC_STATE_DIR"),
        ("WEIGHTSYNC_STATE_DIR", "WEIGHTSYNC_RUN_DIR"),
    ):
        monkeypatch.setenv(other, str(tmp_path / "made"))
        monkeypatch.setenv(name, str(tmp_path / "file"))
        with pytest.raises(InvalidError, match=f"^set {name} to a folder that you can write: "):
            up.up("model", address=f"127.0.0.1:{free_port()}")


def test_a_server_that_denies_is_not_waited_for(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object) -> None:
        raise WeightSyncError(Reason.UNAUTHENTICATED, "no valid token")

    with Client(running.address) as client:
        assert up._engine(client) is not None
        monkeypatch.setattr(running.servicer, "before", deny)
        with pytest.raises(DeniedError):
            up._engine(client)


def test_brackets_in_a_name_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with up._Progress() as progress:
        progress.show("vLLM is loading a [/b]", 20)
    assert "vLLM is loading a [/b] (20 s)\n" in capsys.readouterr().err


def test_a_terminal_without_cursor_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with up._Progress() as progress:
        progress.show("vLLM is loading", 20)
    assert "vLLM is loading (20 s)\n" in capsys.readouterr().err


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
    missing = "Failed to import from vllm._C: ImportError('libnuma.so.1: cannot open')"
    program.log.write_text(f"(Engine) WARNING {missing}\n(Engine) AttributeError: init\n")
    assert program.last_words() == missing
    program.log.write_bytes(b"OldError: x\n" + bytes(1 << 20) + b"x" * 10_000 + b"\xff")
    assert len(program.last_words()) == 4000
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
    up._end_programs([program], [])
    assert program.process is not None
    assert program.process.returncode in (-signal.SIGKILL, -signal.SIGTERM)


def test_a_log_that_a_program_writes_is_not_taken(tmp_path: Path) -> None:
    program = _sleeper(tmp_path)
    program.start()
    try:
        assert program.log.stat().st_mode & 0o777 == 0o600
        program.log.write_text("first")
        with pytest.raises(RefusedError, match=r"^stop the other `weightsync up` first: "):
            _sleeper(tmp_path).start()
        assert program.log.read_text() == "first"
    finally:
        up._end_programs([program], [])
    (tmp_path / "sleeper.log").unlink()
    (tmp_path / "sleeper.log").mkdir()
    with pytest.raises(InvalidError, match=r"^make \S+sleeper.log a file that you can write: "):
        _sleeper(tmp_path).start()


def test_files_beside_the_user_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    program = up._Program("x", ["json.tool", "--help"], os.environ, tmp_path)
    program.start()
    assert program.process is not None
    assert program.process.wait() == 0


class _Typed:
    """`weightsync up` with a real server, and a shell script in the place of vLLM."""

    def __init__(self, folder: Path) -> None:
        package = folder / "vllm/entrypoints/openai"
        package.mkdir(parents=True)
        for one in (package, *package.parents[:2]):
            (one / "__init__.py").touch()
        (package / "api_server.py").write_text(
            'import os\nos.execvp("sh", ["sh", "-c", os.environ["AS_VLLM"]])\n'
        )
        self._pids = folder / "pids"
        self._address = f"127.0.0.1:{free_port()}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTSYNC_")}
        self._environment = kept | {
            "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
            "WEIGHTSYNC_RUN_DIR": str(folder / "run"),
            "WEIGHTSYNC_STATE_DIR": str(folder / "state"),
            "WEIGHTSYNC_METRICS": "",
            "TERM": "xterm",
        }

    def start(self, script: str, terminal: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start it, and return when the script runs and has started a process of its own."""
        noted = f"{script}; sleep 600 & echo $$ $! > {self._pids}.new; mv {self._pids}.new "
        flags = ["--address", self._address, "model", "--", "--port", str(free_port())]
        process = subprocess.Popen(
            [sys.executable, "-m", "weightsync_client.cli", "up", *flags],
            env={**self._environment, "AS_VLLM": f"{noted}{self._pids}; wait; sleep 600"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            # A run of the tests under nohup would have it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509 - no lock is taken
        )
        _wait(self._pids.exists)
        return process

    def end(self) -> None:
        """End what a test that failed has left."""
        subprocess.run(["pkill", "-KILL", "-f", self._address], check=False)
        for pid in self._started():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _started(self) -> list[int]:
        return [int(pid) for pid in self._pids.read_text().split()] if self._pids.exists() else []

    def all_ended(self) -> bool:
        server = subprocess.run(
            ["pgrep", "-f", self._address], check=False, stdout=subprocess.DEVNULL
        )
        return server.returncode != 0 and not any(map(_runs, self._started()))


def _wait(is_so: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        # Other processes do it.
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="wu") as made:
        yield Path(made)


@pytest.fixture
def typed(short_dir: Path) -> Iterator[_Typed]:
    made = _Typed(short_dir)
    yield made
    made.end()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_both_and_what_they_started(typed: _Typed, number: signal.Signals) -> None:
    process = typed.start("true")
    process.send_signal(number)
    assert process.wait(60) == 0
    assert typed.all_ended()


def test_a_second_interrupt_does_not_wait(typed: _Typed) -> None:
    process = typed.start("trap '' TERM")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert typed.all_ended()


def test_when_it_is_killed_both_end_with_what_they_started(typed: _Typed) -> None:
    process = typed.start("true")
    process.kill()
    process.wait()
    _wait(typed.all_ended)


def test_when_its_terminal_is_closed_both_end(typed: _Typed) -> None:
    outer, inner = pty.openpty()
    process = typed.start("true", inner)
    os.close(inner)
    os.close(outer)
    process.send_signal(signal.SIGHUP)
    process.wait(60)
    assert typed.all_ended()


def test_it_says_how_to_use_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightsync_client.cli", "up", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Ctrl-C ends both" in done.stdout
