"""`weightsync up`: vLLM and the server beside it, started together and ended together."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

import typer

from weightsync.errors import Reason, WeightSyncError
from weightsync.host_dirs import make_dir, run_dir, state_dir
from weightsync_client.cli.cli_options import Address, ExitCode, echo, escaped
from weightsync_client.client import Client
from weightsync_client.errors import DeadlineError, UnavailableError, invalid, refuse
from weightsync_client.options import DEFAULT_ADDRESS, Retry, Timeouts
from weightsync_client.types import EngineState, EngineStatus

_VLLM = "vllm.entrypoints.openai.api_server"
_SERVER = "weightsync_server.cli"
#: Seconds between two looks at both programs.
_LOOK_S = 0.5
#: Seconds between two lines of progress where there is no terminal.
_LINE_S = 15.0
#: Seconds that both get to end. The server's own limit is 40.
_END_S = 50.0
#: Seconds for one answer of the server: an interrupt waits as long where it hangs.
_ANSWER_S = 5.0
#: Bytes at the end of a log that are read, and characters of them that are shown.
_READ, _SHOWN = 1 << 18, 4000
#: Lines of a log that are shown when its program has ended by itself, and names no error.
_TAIL = 15
#: What vLLM cannot load of itself, such as a library that is not installed; or an error, and what
#: follows it where that is no record of a log: pydantic needs more lines.
_ERROR = re.compile(
    r"Failed to import from vllm\._C: .+"
    r"|(?:(?<=\s)|^)[\w.]+(?:Error|Exception): .+(?:\n[^(\n].*){0,2}"
)
#: GiB of memory for vLLM's cache on a CPU, where it takes 92 % of all memory otherwise.
_CPU_CACHE_GIB = 4
#: With one of these a user has said what vLLM compiles.
_COMPILES = re.compile(
    r"--(no-)?enforce-eager|--compilation-config|--optimization-level|-O.*|-cc.*"
)


def up(
    checkpoint: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or name of a model, as vLLM takes it.")
    ],
    vllm_flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM_FLAGS]", help="Flags of vLLM.")
    ] = None,
    *,
    address: Address = DEFAULT_ADDRESS,
) -> int:
    """Start vLLM and weightsync-server together. Ctrl-C ends both.

    Settings of the server are variables, as WEIGHTSYNC_HTTP=127.0.0.1:8551 is.
    """
    flags = list(vllm_flags or ())
    _check_installed()
    _check_model(checkpoint, flags)
    _check_free(address, flags)
    flags += _eager_without_compiler(flags)
    kept = state_dir() if os.environ.get("WEIGHTSYNC_STATE_DIR") else _kept_of(checkpoint)
    _make_dirs(kept)
    environment = _environment(kept)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(_signals())
        started = stack.enter_context(_outlived())
        # The server first: it is ready in a second, and says at once what is wrong with it.
        server = _Program("weightsync-server", [_SERVER, "--listen", address], environment, kept)
        vllm = _Program("vLLM", [_VLLM, "--model", checkpoint, *flags], environment, kept)
        stack.callback(_end_programs, [vllm, server], stopped)
        for program in (server, vllm):
            started(program.start())
        # Not before: processes are started while this one has a single thread. It asks often
        # enough without retries.
        client = stack.enter_context(
            Client(address, retry=Retry(attempts=1), timeouts=Timeouts(call_s=_ANSWER_S))
        )
        begun = time.monotonic()
        with _Progress() as progress:
            while not stopped and not _failed([server, vllm]):
                engine = _engine(client)
                if engine is not None and engine.state is EngineState.SERVING:
                    break
                progress.show(_doing(engine, checkpoint), time.monotonic() - begun)
                time.sleep(_LOOK_S)
        if not stopped and not _failed([server, vllm]):
            _show_ready(checkpoint, flags, address, time.monotonic() - begun, kept)
        while not stopped and not _failed([server, vllm]):
            time.sleep(_LOOK_S)
        failed = None if stopped else _failed([server, vllm])
        # A terminal that was closed takes no more.
        with contextlib.suppress(OSError):
            echo("ending vLLM and weightsync-server; Ctrl-C ends them at once", err=True)
    if failed is None:
        return ExitCode.OK
    raise refuse(
        Reason.ENGINE_AWAY,
        f"see {failed.log}: {failed.name} ended with {failed.ended_with()}\n{failed.last_words()}",
    )


def _check_installed() -> None:
    for package, extra in (("weightsync_server", "server"), ("pydantic", "server"), ("vllm", "")):
        # Where an installation is editable, no folder of sys.path has it. A folder of this name
        # that is no package has no origin.
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            what = f"'weightsync[{extra}]'" if extra else "vllm"
            raise refuse(
                Reason.NOT_SUPPORTED,
                f"run `pip install {what}` in this environment: `weightsync up` starts "
                f"{'weightsync-server' if extra else 'vLLM'} from it",
            )


def _check_model(checkpoint: str, flags: Sequence[str]) -> None:
    if not checkpoint or checkpoint.startswith("-"):
        raise invalid("give MODEL before `--`, as in `weightsync up MODEL -- --port 8001`")
    if _flag(flags, "--model"):
        raise invalid(f"leave out --model: vLLM loads {checkpoint}, which stands before `--`")
    if checkpoint.startswith(("/", ".", "~")) and not _is_file(checkpoint):
        raise invalid(f"correct MODEL: there is no folder {checkpoint}")


def _is_file(checkpoint: str) -> bool:
    # Path.exists raises an error for a name that is too long.
    return os.path.exists(checkpoint)  # noqa: PTH110


def _check_free(address: str, flags: Sequence[str]) -> None:
    """Refuse addresses where others listen: their server or engine would be taken for ours."""
    engine = f"unix:{run_dir()}/engine.sock"
    for where, what, other in (
        (address, "weightsync-server", "give another --address"),
        (engine, "vLLM", "set WEIGHTSYNC_RUN_DIR to another folder"),
        (_http_address(flags), "program", "add `-- --port` with another port"),
    ):
        if _answers(where):
            raise refuse(
                Reason.ENGINE_OWNED, f"stop the {what} that listens at {where}, or {other}"
            )


def _eager_without_compiler(flags: Sequence[str]) -> list[str]:
    """Return the flag with which a vLLM on a CPU needs no C++ compiler, where there is none."""
    given = (flag.partition("=")[0].replace("_", "-") for flag in flags)
    if any(map(_COMPILES.fullmatch, given)) or not _is_cpu_torch():
        return []
    # As PyTorch looks for it.
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return []
    echo(
        f"vLLM runs with --enforce-eager: install {compiler}, which is absent, for faster answers",
        err=True,
    )
    return ["--enforce-eager"]


def _is_cpu_torch() -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch").endswith("+cpu")
    return False


def _answers(address: str) -> bool:
    path = address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        if path != address:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
        else:
            socket.create_connection((host.strip("[]"), int(port)), _LOOK_S).close()
        return True
    return False


def _make_dirs(kept: Path) -> None:
    try:
        make_dir(run_dir())
        make_dir(kept, "WEIGHTSYNC_STATE_DIR")
    except WeightSyncError as error:
        raise refuse(error.reason, error.message) from error


def _kept_of(checkpoint: str) -> Path:
    """Return the folder of one model's versions: those of another would not fit its engine."""
    where = os.path.abspath(checkpoint) if _is_file(checkpoint) else checkpoint  # noqa: PTH100
    name = re.sub(r"[^\w.-]+", "-", Path(where).name)[:40]
    digest = hashlib.sha256(os.fsencode(where)).hexdigest()[:8]
    return state_dir() / "up" / f"{name}-{digest}"


def _environment(kept: Path) -> dict[str, str]:
    plugins = [one for one in os.environ.get("VLLM_PLUGINS", "").split(",") if one]
    if "weightsync" not in plugins:
        plugins.append("weightsync")
    # What vLLM repacks for a CPU cannot be written in place. On a GPU these change nothing.
    cpu = {"WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "1", "VLLM_CPU_KVCACHE_SPACE": str(_CPU_CACHE_GIB)}
    dirs = {"WEIGHTSYNC_RUN_DIR": str(run_dir()), "WEIGHTSYNC_STATE_DIR": str(kept)}
    return cpu | dict(os.environ) | dirs | {"VLLM_PLUGINS": ",".join(plugins)}


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Within the block SIGINT, SIGTERM and SIGHUP end nothing; they are put into the list."""
    found: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    # nohup has this one ignored, for programs that go on without their terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {
        number: signal.signal(number, lambda number, _: found.append(number)) for number in numbers
    }
    try:
        yield found
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _outlived() -> Iterator[Callable[[int], None]]:
    """Within the block, processes whose ids are given are ended if this one is killed.

    Another process does it, which is made while this one has a single thread.
    """
    reader, writer = os.pipe()
    own = os.fork()
    if own == 0:
        try:
            os.setsid()
            # Who reads what this process prints does not wait for that one.
            silent = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(silent, fd)
            os.close(writer)
            with os.fdopen(reader, "rb") as given:
                _end([int(pid) for pid in given.read().split()])
        finally:
            os._exit(0)
    os.close(reader)

    def started(pid: int) -> None:
        os.write(writer, b"%d\n" % pid)

    try:
        yield started
    finally:
        os.kill(own, signal.SIGKILL)
        os.waitpid(own, 0)
        os.close(writer)


class _Program:
    """One of the two: a Python module in a process of its own, whose output goes to `log`."""

    def __init__(
        self, name: str, module: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.name = name
        self.log = folder / f"{name.lower()}.log"
        self.process: subprocess.Popen[bytes] | None = None
        # -P: not from the folder that this is typed in, where a file may have any name.
        self._command = [sys.executable, "-P", "-m", *module]
        self._environment = environment

    def start(self) -> int:
        """Start it, and return its process id."""
        try:
            # For this user alone: with a flag of vLLM it has what users ask.
            log = os.fdopen(os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
        except OSError as error:
            raise invalid(f"make {self.log} a file that you can write: {error.strerror}") from error
        with log:
            try:
                # Held by the program and what it starts, as long as one of them runs.
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise refuse(
                    Reason.ENGINE_OWNED,
                    f"stop the other `weightsync up` first: its {self.name} writes {self.log}",
                ) from None
            log.truncate(0)
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt from the terminal is ours; the two are told in their turn.
                start_new_session=True,
            )
        return self.process.pid

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def ended_with(self) -> str:
        """Return its exit code, or the signal that ended it."""
        code = self.process.returncode if self.process else 0
        return f"code {code}" if code >= 0 else signal.Signals(-code).name

    def last_words(self) -> str:
        """Return the error that its log names first, which is the cause of others; else its end."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _READ))
            text = log.read().decode(errors="replace")
        if error := _ERROR.search(text):
            return error[0][:_SHOWN]
        return "\n".join(text.splitlines()[-_TAIL:])[-_SHOWN:]


def _failed(programs: Sequence[_Program]) -> _Program | None:
    return next((one for one in programs if one.ended()), None)


def _end_programs(programs: Sequence[_Program], stopped: Sequence[int]) -> None:
    running = [one.process for one in programs if one.process is not None]
    before = len(stopped)
    _end([process.pid for process in running], lambda: len(stopped) > before)
    for process in running:
        process.wait()


def _end(pids: Sequence[int], at_once: Callable[[], bool] = lambda: False) -> None:
    """Ask processes to end, and end with all that they started those that do not, or `at_once`."""
    waited = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            # Not by its id, which it keeps until its parent has asked for its exit code.
            waited.append(os.pidfd_open(pid))
            os.kill(pid, signal.SIGTERM)
    fds, end = set(waited), time.monotonic() + _END_S
    while fds and time.monotonic() < end and not at_once():
        fds.difference_update(select.select(fds, [], [], _LOOK_S)[0])
    for pid in pids:
        # What it started is in its session; a group without processes is not there.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for fd in waited:
        os.close(fd)


def _engine(client: Client) -> EngineStatus | None:
    """Return the engine, as the server sees it; None: the server does not answer yet."""
    try:
        return client.status().models[0].engine
    except (UnavailableError, DeadlineError):
        return None


def _doing(engine: EngineStatus | None, checkpoint: str) -> str:
    if engine is None:
        return "weightsync-server is starting"
    if engine.state in (EngineState.UNSPECIFIED, EngineState.AWAY):
        return f"vLLM is loading {checkpoint}"
    why = f": {engine.reason}" if engine.reason else ""
    return f"weightsync-server is verifying the weights that vLLM loaded{why}"


class _Progress:
    """Shows what is waited for: on a terminal in place, elsewhere a line now and then."""

    def __init__(self) -> None:
        # Not every command needs it.
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("starting")
        self._next = _LINE_S

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def show(self, doing: str, seconds: float) -> None:
        from rich.text import Text

        text = f"{doing} ({seconds:.0f} s)"
        # Brackets in a name are no markup.
        self._status.update(Text(escaped(text, self._console.encoding)))
        if not self._console.is_interactive and seconds >= self._next:
            self._next += _LINE_S
            echo(text, err=True)


def _show_ready(
    checkpoint: str, flags: Sequence[str], address: str, seconds: float, kept: Path
) -> None:
    name = _flag(flags, "--served-model-name") or checkpoint
    scheme = "https" if _flag(flags, "--ssl-certfile") else "http"
    listens = _http_address(flags)
    served = f"at {scheme}://{listens}/v1" if listens else "where its flags say"
    where = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    echo(f"{name} is served {served}, after {seconds:.0f} s")
    echo(f"next: `weightsync push FOLDER{where}` and `weightsync apply{where}`, or from Python:")
    echo(f'      client = Client("{address}"); client.apply(client.push(model).version)')
    echo(f"versions and logs are in {kept}; Ctrl-C ends both")


def _http_address(flags: Sequence[str]) -> str:
    """Return where flags have vLLM listen; "": they name a socket, or a file that may say it."""
    if _flag(flags, "--uds") or _flag(flags, "--config"):
        return ""
    host, port = _flag(flags, "--host") or "127.0.0.1", _flag(flags, "--port") or "8000"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _flag(flags: Sequence[str], name: str) -> str:
    """Return the value that flags give one of them, in either of its forms; "": none."""
    found = ""
    for flag, after in itertools.pairwise([*flags, ""]):
        key, is_joined, value = flag.partition("=")
        # As vLLM does, take underscores for dashes.
        if key.replace("_", "-") == name:
            found = value if is_joined else after
    return found
