"""`weightsync up`: vLLM and the server beside it, started together and ended together."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import typer

from weightsync.errors import Reason
from weightsync.host_dirs import make_dir, run_dir, state_dir
from weightsync.wire.child_channel import die_with_parent
from weightsync_client.cli.cli_options import Address, ExitCode, echo
from weightsync_client.client import Client
from weightsync_client.errors import ClientError, refuse
from weightsync_client.options import DEFAULT_ADDRESS, Retry
from weightsync_client.types import EngineState, EngineStatus

_VLLM = "vllm.entrypoints.openai.api_server"
_SERVER = "weightsync_server.cli"
#: Seconds between two looks at both programs.
_LOOK_S = 0.5
#: Seconds between two lines of progress where there is no terminal.
_LINE_S = 15.0
#: Seconds that both get to end. The server's own limit is 40.
_END_S = 50.0
#: Lines of a log that are shown when its program has ended by itself, and names no error.
_TAIL = 15
#: An error, and what follows it where that is no record of a log: pydantic needs more lines.
_ERROR = re.compile(r"(?:(?<=\s)|^)[\w.]+(?:Error|Exception): .+(?:\n[^(\n].*){0,2}")
#: GiB of memory for vLLM's cache on a CPU, where it takes 92 % of all memory otherwise.
_CPU_CACHE_GIB = 4


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
    _check_installed()
    _check_free(address)
    flags = list(vllm_flags or ())
    kept = state_dir() if "WEIGHTSYNC_STATE_DIR" in os.environ else _kept_of(checkpoint)
    make_dir(run_dir())
    make_dir(kept)
    environment = _environment(kept)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(_signals())
        # The server first: it is ready in a second, and says at once what is wrong with it.
        server = _Program("weightsync-server", [_SERVER, "--listen", address], environment, kept)
        vllm = _Program("vLLM", [_VLLM, "--model", checkpoint, *flags], environment, kept)
        stack.callback(_end, [vllm, server])
        for program in (server, vllm):
            program.start()
        # Not before: processes are started while this one has a single thread. It asks often
        # enough without retries.
        client = stack.enter_context(Client(address, retry=Retry(attempts=1)))
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
        echo("ending vLLM and weightsync-server", err=True)
    if failed is None:
        return ExitCode.OK
    raise refuse(
        Reason.ENGINE_AWAY,
        f"see {failed.log}: {failed.name} ended with {failed.ended_with()}\n{failed.last_words()}",
    )


def _check_installed() -> None:
    for package, extra in (("weightsync_server", "server"), ("pydantic", "server"), ("vllm", "")):
        if not any(Path(folder, package).is_dir() for folder in sys.path):
            what = f"'weightsync[{extra}]'" if extra else "vllm"
            raise refuse(
                Reason.NOT_SUPPORTED,
                f"run `pip install {what}` in this environment: `weightsync up` starts "
                f"{'weightsync-server' if extra else 'vLLM'} from it",
            )


def _check_free(address: str) -> None:
    """Refuse an address where a server listens, whose engine would be taken for ours."""
    path = address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        if path != address:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
        else:
            socket.create_connection((host.strip("[]"), int(port)), _LOOK_S).close()
        raise refuse(
            Reason.ENGINE_OWNED,
            f"stop the weightsync-server that listens at {address}, or give another --address",
        )


def _kept_of(checkpoint: str) -> Path:
    """Return the folder of one model's versions: those of another would not fit its engine."""
    where = str(Path(checkpoint).absolute()) if Path(checkpoint).exists() else checkpoint
    name = re.sub(r"[^\w.-]+", "-", Path(where).name)[:40]
    digest = hashlib.sha256(os.fsencode(where)).hexdigest()[:8]
    return state_dir() / "up" / f"{name}-{digest}"


def _environment(kept: Path) -> dict[str, str]:
    plugins = [one for one in os.environ.get("VLLM_PLUGINS", "").split(",") if one]
    if "weightsync" not in plugins:
        plugins.append("weightsync")
    # What vLLM repacks for a CPU cannot be written in place. On a GPU these change nothing.
    cpu = {"WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "1", "VLLM_CPU_KVCACHE_SPACE": str(_CPU_CACHE_GIB)}
    own = {"VLLM_PLUGINS": ",".join(plugins), "WEIGHTSYNC_RUN_DIR": str(run_dir())}
    return cpu | {"WEIGHTSYNC_STATE_DIR": str(kept)} | dict(os.environ) | own


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Within the block SIGINT and SIGTERM end nothing; they are put into the list."""
    found: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: found.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield found
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Program:
    """One of the two: a Python module in a process of its own, whose output goes to `log`."""

    def __init__(
        self, name: str, module: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.name = name
        self.log = folder / f"{name.lower()}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._command = [sys.executable, "-m", *module]
        self._environment = environment

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt from the terminal is ours; the two are told in their turn.
                start_new_session=True,
                # It runs between fork and exec of a process of one thread.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509
            )

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def ended_with(self) -> str:
        """Return its exit code, or the signal that ended it."""
        code = self.process.returncode if self.process else 0
        return f"code {code}" if code >= 0 else signal.Signals(-code).name

    def last_words(self) -> str:
        """Return the error that its log names first, which is the cause of others; else its end."""
        text = self.log.read_text(errors="replace")
        error = _ERROR.search(text)
        return error[0] if error else "\n".join(text.splitlines()[-_TAIL:])


def _failed(programs: Sequence[_Program]) -> _Program | None:
    return next((one for one in programs if one.ended()), None)


def _end(programs: Sequence[_Program]) -> None:
    """Ask all of them to end, and end with the processes they started those that do not."""
    running = [one.process for one in programs if one.process is not None]
    for process in running:
        process.terminate()
    end = time.monotonic() + _END_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        # What it started is in its session; a group without processes is not there.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _engine(client: Client) -> EngineStatus | None:
    """Return the engine, as the server sees it; None: the server does not answer yet."""
    try:
        return client.status().models[0].engine
    except ClientError:
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
        text = f"{doing} ({seconds:.0f} s)"
        self._status.update(text)
        if not self._console.is_terminal and seconds >= self._next:
            self._next += _LINE_S
            echo(text, err=True)


def _show_ready(
    checkpoint: str, flags: Sequence[str], address: str, seconds: float, kept: Path
) -> None:
    host, port = _flag(flags, "--host") or "127.0.0.1", _flag(flags, "--port") or "8000"
    where = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    echo(f"{checkpoint} is served at http://{host}:{port}/v1, after {seconds:.0f} s")
    echo(f"next: `weightsync push FOLDER{where}` and `weightsync apply{where}`, or from Python:")
    echo(f'      client = Client("{address}"); client.apply(client.push(model).version)')
    echo(f"versions and logs are in {kept}; Ctrl-C ends both")


def _flag(flags: Sequence[str], name: str) -> str:
    """Return the value that flags give one of them, in either of its forms; "": none."""
    found = ""
    for flag, after in itertools.pairwise([*flags, ""]):
        if flag == name:
            found = after
        elif flag.startswith(f"{name}="):
            found = flag.partition("=")[2]
    return found
